"""Positions: sinusoidal, learned, rotary or none."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway_training.models import GPT, Model
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import causal_attention
from headway_training.models.parts.embeddings import (
    PositionedEmbedding,
    RotaryPositions,
    SinusoidalPositions,
    sinusoid_table,
)

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


def test_learned_positions_are_parameters_and_the_others_are_not() -> None:
    embeddings = {
        kind: PositionedEmbedding(LayerConfig(d_model=16, num_heads=2, d_ff=8, positions=kind), 5)
        for kind in ("learned", "sinusoidal", "rotary", "none")
    }
    assert isinstance(embeddings["learned"].positions, nn.Embedding)
    assert list(embeddings["learned"].state_dict()) == ["positions.weight"]
    assert isinstance(embeddings["sinusoidal"].positions, SinusoidalPositions)
    assert [kind for kind, embedding in embeddings.items() if embedding.rotary is not None] == ["rotary"]
    assert not any(embeddings[kind].state_dict() for kind in ("sinusoidal", "rotary", "none"))


def rotated(query: Tensor, key: Tensor, position_ids: Tensor, max_length: int = 600) -> tuple[Tensor, Tensor]:
    """Query and key as they reach attention behind rotary positions."""
    reached: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        reached.extend((query, key))
        return value

    value = torch.randn_like(key)
    context = RotaryPositions(max_length, query.shape[-1])(attend, position_ids)(query, key, value, layer=0)
    assert context is value, "values are not turned"
    return reached[0], reached[1]


def test_rotary_positions_turn_pairs_as_complex_numbers() -> None:
    """Su et al. 2021, equation 12, for the pairs (i, i + K/2): (a + b i) e^(i m theta_i)."""
    heads, position_ids = torch.randn(1, 3, 2, 8), torch.tensor([[0, 7, 599]])
    turned, _ = rotated(heads, heads, position_ids)
    for at, position in enumerate(position_ids[0].tolist()):
        for head in range(2):
            for i in range(4):
                pair = complex(heads[0, at, head, i], heads[0, at, head, i + 4])
                expected = pair * cmath.exp(1j * position / 10_000 ** (2 * i / 8))
                assert turned[0, at, head, i].item() == pytest.approx(expected.real, abs=1e-6)
                assert turned[0, at, head, i + 4].item() == pytest.approx(expected.imag, abs=1e-6)


def test_the_product_of_a_turned_query_and_key_depends_on_their_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    products = {
        (first, second): (
            rotated(query, key, torch.tensor([first]))[0] * rotated(query, key, torch.tensor([second]))[1]
        ).sum()
        for first, second in ((9, 4), (505, 500), (14, 9), (9, 9))
    }
    for same in ((505, 500), (14, 9)):
        torch.testing.assert_close(products[same], products[9, 4], atol=1e-5, rtol=1e-5)
    assert not torch.isclose(products[9, 9], products[9, 4], atol=1e-2)


def test_rotation_keeps_the_dtype_of_heads() -> None:
    turned = rotated(torch.randn(1, 2, 1, 8).bfloat16(), torch.randn(1, 2, 1, 8).bfloat16(), torch.arange(2))
    assert [tensor.dtype for tensor in turned] == [torch.bfloat16] * 2


@torch.inference_mode()
def test_a_gpt_with_rotary_positions_answers_alike_wherever_its_text_begins(tiny_model: Callable[..., Model]) -> None:
    model, text = tiny_model("gpt", positions="rotary"), torch.randint(0, 23, (2, 8))
    assert isinstance(model, GPT)
    states = [
        model.hidden_states(text, torch.arange(start, start + 8), causal_attention(model.kernel)) for start in (0, 15)
    ]
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    changed = model.hidden_states(text, torch.arange(8).flip(0), causal_attention(model.kernel))
    assert not torch.isclose(changed, states[0], atol=1e-3).all()
