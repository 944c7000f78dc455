"""Position embeddings: sinusoidal, learned, or none.

B rows, T tokens, L the longest length, D model width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

PositionKind = Literal["learned", "sinusoidal", "none"]


def sinusoid_table(max_length: int, d_model: int) -> Tensor:
    """Computes PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same (Vaswani et al. 2017, section 3.5).

    Args:
        max_length: positions.
        d_model: width, even.

    Returns:
        float32 (max_length, d_model).
    """
    positions = torch.arange(max_length, dtype=torch.float64)[:, None]  # (L, 1)
    even = torch.arange(0, d_model, 2, dtype=torch.float64)  # (D / 2): 2i
    angles = positions * torch.exp(even * (-math.log(10_000) / d_model))  # (L, D / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()  # (L, D)


class SinusoidalPositions(nn.Module):
    """Looks positions up in the fixed table; the table is no parameter and is not saved."""

    table: Tensor

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoid_table(max_length, d_model), persistent=False)

    def forward(self, position_ids: Tensor) -> Tensor:
        """int64 (...) -> (..., D)."""
        return F.embedding(position_ids, self.table)


def make_positions(kind: PositionKind, max_length: int, d_model: int) -> nn.Module | None:
    """Makes the module that maps position ids (...) to embeddings (..., D); None where there is none."""
    if kind == "learned":
        return nn.Embedding(max_length, d_model)
    if kind == "sinusoidal":
        return SinusoidalPositions(max_length, d_model)
    return None
