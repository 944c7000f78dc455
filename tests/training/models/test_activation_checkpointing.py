"""Activations that are recomputed in the backward pass give the gradients of those that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny_models import LLAMA_PARTS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway_training.models import Model

IDS = torch.arange(14).reshape(2, 7)
ARGUMENTS: dict[str, tuple[Tensor, ...]] = {
    "gpt": (IDS,),
    "transformer": (IDS, torch.ones_like(IDS), IDS + 1),
    "encoder": (IDS, torch.ones_like(IDS)),
    "vit": (torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16),),
}


@pytest.mark.parametrize("parts", [{}, LLAMA_PARTS], ids=["usual", "llama"])
@pytest.mark.parametrize("architecture", ARGUMENTS)
def test_recomputed_layers_give_the_same_gradients(
    tiny_model: Callable[..., Model], architecture: str, parts: dict[str, object]
) -> None:
    model = tiny_model(architecture, **parts)
    kept = gradients(model, ARGUMENTS[architecture])
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("layers"):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    recomputed = gradients(model, ARGUMENTS[architecture])
    assert kept.keys() == recomputed.keys()
    for name, gradient in kept.items():
        assert gradient.any(), name
        assert torch.equal(recomputed[name], gradient), name


def gradients(model: Model, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    model(*arguments).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
