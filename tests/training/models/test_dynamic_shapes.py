"""Stateless models are traced once for all batch sizes and lengths: nothing in them is fixed to an example's shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import LLAMA_PARTS
from torch import Tensor, nn

from headway_training.models import Model, Transformer

BuildTiny = Callable[..., Model]

parts = pytest.mark.parametrize("parts", [{}, LLAMA_PARTS], ids=["usual", "llama"])
ROWS_AND_LENGTH = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=24)}


class SourceEncoder(nn.Module):
    """The part of a Transformer that is exported as a graph of its own."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        return self.model.cross_keys_values(self.model.encode(input_ids, attention_mask))


def texts(rows: int, length: int) -> tuple[Tensor, Tensor]:
    attention_mask = torch.ones(rows, length, dtype=torch.int64)
    attention_mask[-1, length // 2 + 1 :] = 0
    return torch.randint(0, 23, (rows, length)), attention_mask


@parts
@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
def test_an_encoder_takes_batches_and_lengths_it_was_not_traced_with(
    tiny_model: BuildTiny, pooling: str, parts: dict[str, object]
) -> None:
    model = tiny_model("encoder", pooling=pooling, num_token_types=2, **parts)
    check_text_model(model)


@parts
def test_a_transformers_encoder_takes_batches_and_lengths_it_was_not_traced_with(
    tiny_model: BuildTiny, parts: dict[str, object]
) -> None:
    model = tiny_model("transformer", **parts)
    assert isinstance(model, Transformer)
    check_text_model(SourceEncoder(model).eval())


@parts
def test_a_vit_takes_batches_it_was_not_traced_with(tiny_model: BuildTiny, parts: dict[str, object]) -> None:
    model = tiny_model("vit", **parts)
    program = torch.export.export(
        model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
    )
    for rows in (1, 5):
        images = torch.randn(rows, 3, 16, 16)
        torch.testing.assert_close(program.module()(images), model(images))


def check_text_model(model: nn.Module) -> None:
    program = torch.export.export(model, texts(2, 7), dynamic_shapes=(ROWS_AND_LENGTH,) * 2, strict=False)
    for rows, length in ((1, 1), (1, 24), (5, 3)):
        arguments = texts(rows, length)
        torch.testing.assert_close(program.module()(*arguments), model(*arguments))
