"""A decoder-only language model with gated linear attention: its state has the same size after any number of tokens.

B rows, T tokens, D model width, H heads, K head width, W width of the convolution, V vocabulary.

Layers, embeddings and the start of the weights are those of the kit's GPT, with `parts/linear_attention.py` in place of
attention; there are no positions but those that decays and convolutions make.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway_training.models.architectures import architecture
from headway_training.models.base import Model, check_length
from headway_training.models.configuration import LayerConfig, PositionKind
from headway_training.models.parts.embeddings import TokenEmbedding
from headway_training.models.parts.initialisation import initialise_normal, scale_residual_outputs
from headway_training.models.parts.layer import FeedForward, Residual, make_norm
from headway_training.models.parts.linear_attention import CONVOLUTION_WIDTH, LinearAttention

BLOCK = 64
"""Tokens of a block in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig(LayerConfig):
    """Shape of a model with linear attention.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens the model knows."""
    max_length: int
    """Most tokens of a text, prompt and continuation together."""
    window: int = 0
    """Tokens of a window that is trained on; 0: `max_length`. The state takes no more memory for longer texts."""
    num_layers: int
    """Number of layers."""
    tie_embeddings: bool = True
    """The token embedding is also the output projection."""
    positions: PositionKind = "none"
    """`none`: the order of tokens comes from decays and convolutions."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "max_length", "num_layers")
        self._check_integers("window", minimum=0)
        self._check_flags("tie_embeddings")
        if self.positions != "none":
            raise ValueError(f"positions must be 'none' in a model with linear attention, and is {self.positions!r}")
        if self.num_kv_heads:
            raise ValueError(f"num_kv_heads must be 0 in a model with linear attention, and is {self.num_kv_heads}")
        if self.window > self.max_length:
            raise ValueError(f"window must be at most max_length ({self.max_length}), and is {self.window}")


class LinearLayer(nn.Module):
    """Linear attention and a feed-forward network, each in a residual connection."""

    def __init__(self, configuration: LinearConfig) -> None:
        super().__init__()
        self.attention = LinearAttention(configuration)
        self.attention_residual = Residual(configuration)
        self.feed_forward = FeedForward(configuration)
        self.feed_forward_residual = Residual(configuration)

    def forward(
        self, hidden_states: Tensor, earlier: Tensor, memory: Tensor, block: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments and results of `LinearAttention`, with (B, T, D) -> (B, T, D) of the whole layer."""

        def attend(inputs: Tensor) -> Tensor:
            nonlocal earlier, memory
            context: Tensor
            context, earlier, memory = self.attention(inputs, earlier, memory, block)
            return context

        hidden_states = self.attention_residual(hidden_states, attend)
        result: Tensor = self.feed_forward_residual(hidden_states, self.feed_forward)
        return result, earlier, memory


@architecture("linear", LinearConfig, "generation", shows_attention=False)
class LinearDecoder(Model):
    """Predicts the next token at every position, from a state of fixed size.

    Starts from N(0, 0.02^2), with the matrices that write into the residual stream divided by the square root of the
    number of residual connections.
    """

    def __init__(self, configuration: LinearConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_length = configuration.max_length
        self.tokens = TokenEmbedding(configuration.vocabulary_size, configuration.d_model)
        self.dropout = nn.Dropout(configuration.dropout)
        self.layers = nn.ModuleList(LinearLayer(configuration) for _ in range(configuration.num_layers))
        self.norm = make_norm(configuration) if configuration.norm == "pre" else nn.Identity()
        self.output = (
            None
            if configuration.tie_embeddings
            else nn.Linear(configuration.d_model, configuration.vocabulary_size, bias=False)
        )
        initialise_normal(self)
        scale_residual_outputs(self, num_residuals=2 * configuration.num_layers)
        for module in self.modules():
            if isinstance(module, LinearAttention):
                module.reset_decays()

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a row's state: of each layer in turn (W - 1, D), the hidden states before, and (H, K, K)."""
        one = self.configuration
        of_layer = [(CONVOLUTION_WIDTH - 1, one.d_model), (one.num_heads, one.head_dim, one.head_dim)]
        return of_layer * one.num_layers

    def first_states(self, rows: int) -> list[Tensor]:
        """The state at the beginning of a text: zeros, float32 (B, ...) of each of `state_shapes`."""
        device = self.tokens.weight.device
        return [torch.zeros(rows, *shape, device=device) for shape in self.state_shapes]

    def read(self, input_ids: Tensor, states: list[Tensor], *, block: int | None = None) -> tuple[Tensor, list[Tensor]]:
        """Reads tokens after those that made the state.

        Args:
            input_ids: int64 (B, T).
            states: float32, as `first_states` or an earlier `read` gave them.
            block: Tokens that are computed together; None: all.

        Returns:
            The last layer's states (B, T, D), and the state for the tokens that follow.
        """
        hidden_states = self.dropout(self.tokens(input_ids))  # (B, T, D)
        following: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            hidden_states, *present = layer(hidden_states, *states[2 * number : 2 * number + 2], block)
            following += present
        return self.norm(hidden_states), following

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
        hidden_states, _ = self.read(input_ids, self.first_states(len(input_ids)), block=BLOCK)
        return self.logits(hidden_states)
