"""Transformer: an encoder-decoder model for translation (Vaswani et al. 2017).

B rows, T target tokens, S source tokens, D model width, H heads, K head width, V vocabulary.

One vocabulary serves both languages. Deviation from the paper: attention's projections have biases, unless the
configuration says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway_training.models.architectures import architecture
from headway_training.models.base import check_length
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import padding_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.initialisation import initialise_xavier
from headway_training.models.parts.layer import Stack
from headway_training.models.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(LayerConfig):
    """Shape of a Transformer.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens of both languages together."""
    max_source_length: int
    """Most tokens of a source sentence."""
    max_target_length: int
    """Most tokens of a translation, its first token included."""
    num_encoder_layers: int
    """Number of encoder layers."""
    num_decoder_layers: int
    """Number of decoder layers."""
    tie_embeddings: bool = True
    """One matrix is the source embedding, the target embedding and the output projection; else there are three."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "max_source_length", "max_target_length")
        self._check_integers("num_encoder_layers", "num_decoder_layers")
        self._check_flags("tie_embeddings")


@architecture("transformer", TransformerConfig, "translation")
class Transformer(Writer):
    """Predicts the next target token from a source sentence and the target so far.

    Starts from Xavier-uniform matrices and embeddings of N(0, 1/D), which are scaled by sqrt(D) on the way in (section
    3.4).
    """

    target_name = "a target sentence"

    def __init__(self, configuration: TransformerConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_source_length = configuration.max_source_length
        self.max_target_length = configuration.max_target_length
        size = (configuration.vocabulary_size, configuration.d_model)
        tied = configuration.tie_embeddings
        self.tokens = TokenEmbedding(*size)
        self.source_tokens = None if tied else TokenEmbedding(*size)
        self.output = None if tied else nn.Linear(configuration.d_model, configuration.vocabulary_size, bias=False)
        self.source_embedding = PositionedEmbedding(configuration, configuration.max_source_length, scaled=True)
        self.target_embedding = PositionedEmbedding(configuration, configuration.max_target_length, scaled=True)
        self.encoder = Stack(configuration, configuration.num_encoder_layers)
        self.decoder = Stack(configuration, configuration.num_decoder_layers, cross=True)
        initialise_xavier(self, configuration.d_model)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Reads source sentences.

        Args:
            input_ids: int64 (B, S).
            attention_mask: int64 (B, S), 1 at tokens and 0 at padding.

        Returns:
            The memory, float (B, S, D).
        """
        tokens = self.tokens if self.source_tokens is None else self.source_tokens
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.source_embedding(tokens(input_ids), position_ids)  # (B, S, D)
        attend = padding_attention(attention_mask, self.kernel)
        memory: Tensor = self.encoder(embedded, self.source_embedding.attention(attend, position_ids))
        return memory

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Predicts, at every target token, the one that follows it.

        Args:
            source_ids: int64 (B, S).
            source_mask: int64 (B, S), 1 at tokens and 0 at padding.
            target_ids: int64 (B, T), padded on the right.

        Returns:
            Logits, float (B, T, V).

        Raises:
            ValueError: a sentence is longer than its limit.
        """
        check_length("a source sentence", source_ids.shape[1], self.max_source_length)
        keys_values = self.cross_keys_values(self.encode(source_ids, source_mask))
        return self.logits(self.target_states(target_ids, keys_values, source_mask))
