"""Embeddings of tokens and of where they stand.

B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.positions import make_positions


class TokenEmbedding(nn.Embedding):
    """An embedding whose matrix can also be the output projection of a model that ties the two."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V): the inner product with every token's embedding."""
        # A product with the transposed matrix, not `linear`: of what they export to, only the former is quantized.
        return hidden_states @ self.weight.transpose(0, 1)


class PositionedEmbedding(nn.Module):
    """Adds the embeddings of positions to those of tokens or patches, which the model itself owns.

    Args:
        configuration: width, dropout and kind of the position embeddings.
        max_length: the longest row, in tokens.
        scaled: multiply tokens by sqrt(D) before the sum (Vaswani et al. 2017, section 3.4).
        normalised: normalise the sum (BERT).
    """

    def __init__(
        self, configuration: LayerConfig, max_length: int, *, scaled: bool = False, normalised: bool = False
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(configuration.d_model) if scaled else 1.0
        self.positions = make_positions(configuration.positions, max_length, configuration.d_model)
        self.norm = nn.LayerNorm(configuration.d_model) if normalised else nn.Identity()
        self.dropout = nn.Dropout(configuration.dropout)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embedded tokens (B, T, D) and int64 positions (B, T) or (T) -> (B, T, D)."""
        hidden_states = tokens * self.scale
        if self.positions is not None:
            hidden_states = hidden_states + self.positions(position_ids)
        positioned: Tensor = self.dropout(self.norm(hidden_states))
        return positioned
