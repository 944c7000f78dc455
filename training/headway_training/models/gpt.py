"""GPT: a decoder-only language model (Radford et al. 2019; Brown et al. 2020; as Llama: Touvron et al. 2023).

B rows, T tokens, D model width, V vocabulary.

Deviations from GPT-2 and GPT-3: every layer attends densely, where GPT-3 alternates dense and locally banded sparse
layers; GELU is exact unless the configuration says `gelu_tanh`; no dropout on attention weights.
Deviations from Llama: the embedding is tied to the output projection unless the configuration says otherwise; residual
connections may have dropout; weights start as in GPT-2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway_training.models.architectures import architecture
from headway_training.models.base import Model, check_length
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import Attend, causal_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.initialisation import initialise_normal, scale_residual_outputs
from headway_training.models.parts.layer import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(LayerConfig):
    """Shape of a GPT.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens the model knows."""
    max_length: int
    """Most tokens of a text, prompt and continuation together."""
    num_layers: int
    """Number of layers."""
    tie_embeddings: bool = True
    """The token embedding is also the output projection."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "max_length", "num_layers")
        self._check_flags("tie_embeddings")


@architecture("gpt", GPTConfig, "generation")
class GPT(Model):
    """Predicts the next token at every position.

    Starts from N(0, 0.02^2), with the matrices that write into the residual stream divided by the square root of the
    number of residual connections (Radford et al. 2019, section 2.3).
    """

    def __init__(self, configuration: GPTConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_length = configuration.max_length
        self.tokens = TokenEmbedding(configuration.vocabulary_size, configuration.d_model)
        self.embedding = PositionedEmbedding(configuration, configuration.max_length)
        self.stack = Stack(configuration, configuration.num_layers)
        self.output = (
            None
            if configuration.tie_embeddings
            else nn.Linear(configuration.d_model, configuration.vocabulary_size, bias=False)
        )
        initialise_normal(self)
        scale_residual_outputs(self, num_residuals=2 * configuration.num_layers)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Computes the last layer's states.

        Args:
            input_ids: int64 (B, T).
            position_ids: int64 (B, T) or (T), from 0.
            attend: attention; each layer calls it once.

        Returns:
            float (B, T, D).
        """
        embedded = self.embedding(self.tokens(input_ids), position_ids)  # (B, T, D)
        hidden_states: Tensor = self.stack(embedded, self.embedding.attention(attend, position_ids))
        return hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        logits: Tensor = self.tokens.logits(hidden_states) if self.output is None else self.output(hidden_states)
        return logits

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 (B, T) -> logits (B, T, V) of the token that follows each; padding belongs on the right.

        Raises:
            ValueError: a text is longer than `max_length`.
        """
        check_length("a text", input_ids.shape[1], self.max_length)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.logits(self.hidden_states(input_ids, position_ids, causal_attention(self.kernel)))
