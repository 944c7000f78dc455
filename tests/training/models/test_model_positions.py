"""Position embeddings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headway_training.models.parts.positions import SinusoidalPositions, make_positions, sinusoid_table

# Positions 0 to 2 at d_model = 10, rounded to two decimals, from the same source as the worked example of attention.
WORKED_ROWS = [
    [0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    [0.84, 0.54, 0.16, 0.99, 0.03, 1.0, 0.0, 1.0, 0.0, 1.0],
    [0.91, -0.42, 0.31, 0.95, 0.05, 1.0, 0.01, 1.0, 0.0, 1.0],
]


def test_the_sinusoid_table_is_the_worked_example() -> None:
    torch.testing.assert_close(sinusoid_table(3, 10), torch.tensor(WORKED_ROWS), atol=0.015, rtol=0)


@pytest.mark.parametrize(("max_length", "d_model"), [(1, 2), (50, 10), (2048, 64)])
def test_the_sinusoid_table_is_the_papers_formula(max_length: int, d_model: int) -> None:
    table = sinusoid_table(max_length, d_model)
    assert table.shape == (max_length, d_model)
    for position in {0, max_length // 3, max_length // 2, max_length - 1}:
        for i in range(d_model // 2):
            angle = position / 10_000 ** (2 * i / d_model)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_positions_are_looked_up_one_by_one() -> None:
    position_ids = torch.tensor([[3, 0], [1, 1]])
    assert torch.equal(SinusoidalPositions(5, 8)(position_ids), sinusoid_table(5, 8)[position_ids])


def test_learned_positions_are_parameters_and_sinusoids_are_not() -> None:
    assert isinstance(make_positions("learned", 5, 8), nn.Embedding)
    sinusoidal = make_positions("sinusoidal", 5, 8)
    assert isinstance(sinusoidal, SinusoidalPositions)
    assert not sinusoidal.state_dict()
    assert make_positions("none", 5, 8) is None
