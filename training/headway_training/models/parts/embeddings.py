"""Embeddings of tokens, and what tells a model where they stand: learned, sinusoidal or rotary positions.

B rows, T tokens, L the longest length, D model width, H heads, K head width, V vocabulary.

Deviation from Su et al. (2021), section 3.4.2: rotary positions turn the numbers i and i + K/2 of a head as one pair,
as GPT-NeoX and the published Llama weights do; the paper's pairs are neighbours. The two differ by a permutation of a
head's numbers.
"""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import Attend, TextScoring
from headway_training.models.parts.layer import make_norm


class TokenEmbedding(nn.Embedding):
    """An embedding whose matrix can also be the output projection of a model that ties the two."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V): the inner product with every token's embedding."""
        # A product with the transposed matrix, not `linear`: of what they export to, only the former is quantized.
        return hidden_states @ self.weight.transpose(0, 1)


class PositionedEmbedding(nn.Module):
    """Adds position embeddings to those of tokens or patches, which the model itself owns, or keeps rotary positions.

    Args:
        configuration: width, dropout, kind of positions and of normalisation.
        max_length: the longest row, in tokens.
        scaled: multiply tokens by sqrt(D) before the sum (Vaswani et al. 2017, section 3.4).
        normalised: normalise the sum (BERT).
    """

    def __init__(
        self, configuration: LayerConfig, max_length: int, *, scaled: bool = False, normalised: bool = False
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(configuration.d_model) if scaled else 1.0
        self.positions = _make_added_positions(configuration, max_length)
        self.rotary = (
            RotaryPositions(max_length, configuration.head_dim) if configuration.positions == "rotary" else None
        )
        self.norm = make_norm(configuration) if normalised else nn.Identity()
        self.dropout = nn.Dropout(configuration.dropout)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embedded tokens (B, T, D) and int64 positions (B, T) or (T) -> (B, T, D)."""
        return self.add(tokens, None if self.positions is None else self.positions(position_ids))

    def add(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Embedded tokens (B, T, D) and the embeddings of their positions (T, D), None for none -> (B, T, D)."""
        hidden_states = tokens * self.scale
        if positions is not None:
            hidden_states = hidden_states + positions
        positioned: Tensor = self.dropout(self.norm(hidden_states))
        return positioned

    def attention(self, attend: Attend, position_ids: Tensor) -> Attend:
        """Returns the attention function for the layers: `attend`, behind rotary positions where the model has them."""
        return attend if self.rotary is None else self.rotary(attend, position_ids)


class SinusoidalPositions(nn.Module):
    """Looks positions up in the fixed table, which is no parameter and is not saved."""

    table: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoid_table(max_length, d_model), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """int64 (...) -> (..., D)."""
        return F.embedding(position_ids, self.table)


class RotaryPositions(nn.Module):
    """Turns queries and keys by angles that grow with their positions (Su et al. 2021, equations 15 and 34).

    The inner product of a query and a key then depends on their distance and not on where they stand.

    Args:
        max_length: L.
        head_dim: K, even.
    """

    table: Tensor

    def __init__(self, max_length: int, head_dim: int) -> None:
        super().__init__()
        angles = _angles(max_length, head_dim)  # (L, K / 2)
        # One table of three axes, not two matrices: an exported int8 graph would round matrices to eight bits.
        table = torch.stack((angles.cos(), angles.sin()), dim=1).float()  # (L, 2, K / 2)
        self.register_buffer("table", table, persistent=False)

    def forward(self, attend: Attend, position_ids: Tensor) -> Attend:
        """Puts the rotation of tokens at int64 positions (B, T) or (T) in front of an attention function."""
        halves = self.table[position_ids].unbind(-2)  # (B, T, K / 2)
        # The exporter knows this form of a rotation: one operator takes its place.
        cosines, sines = (torch.cat((half, half), dim=-1).unsqueeze(-2) for half in halves)  # (B, T, 1, K)

        def rotate(heads: Tensor) -> Tensor:  # (B, T, H, K)
            first, second = heads.chunk(2, dim=-1)
            return (heads * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)

        def attend_rotated(
            query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[TextScoring]
        ) -> Tensor:
            return attend(rotate(query), rotate(key), value, layer=layer, **scoring)

        return attend_rotated


def sinusoid_table(max_length: int, d_model: int) -> Tensor:
    """Computes PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    Args:
        max_length: positions.
        d_model: width, even.

    Returns:
        float32 (max_length, d_model).
    """
    angles = _angles(max_length, d_model)  # (L, D / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()  # (L, D)


def _angles(max_length: int, width: int) -> Tensor:
    """Computes p / 10000^(2i/width) for positions p and i below width / 2: float64 (max_length, width / 2)."""
    positions = torch.arange(max_length, dtype=torch.float64)[:, None]  # (L, 1)
    even = torch.arange(0, width, 2, dtype=torch.float64)  # (width / 2): 2i
    return positions * torch.exp(even * (-math.log(10_000) / width))


def _make_added_positions(configuration: LayerConfig, max_length: int) -> nn.Module | None:
    """Makes the module that maps position ids (...) to embeddings (..., D); None where none are added."""
    if configuration.positions == "learned":
        return nn.Embedding(max_length, configuration.d_model)
    if configuration.positions == "sinusoidal":
        return SinusoidalPositions(max_length, configuration.d_model)
    return None
