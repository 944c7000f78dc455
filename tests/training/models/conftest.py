"""Tiny models of every architecture, with every sequence-mixing choice left to the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from headway_training.models import Model, build_model

TINY: dict[str, dict[str, object]] = {
    "gpt": {
        "vocabulary_size": 23,
        "max_length": 24,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
    },
    "transformer": {
        "vocabulary_size": 23,
        "max_source_length": 24,
        "max_target_length": 20,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "positions": "sinusoidal",
    },
    "encoder": {
        "vocabulary_size": 23,
        "max_length": 24,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "num_classes": 5,
    },
    "vit": {
        "image_size": 16,
        "patch_size": 4,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 2,
        "d_ff": 64,
        "num_classes": 5,
    },
}


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(20240607)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_model() -> Callable[..., Model]:
    """Builds a tiny model in evaluation mode; keywords replace fields of its configuration.

    Its matrices are larger than fresh ones, so that what attention does shows in the logits.
    """

    def build(architecture: str, **fields: object) -> Model:
        model = build_model(architecture, TINY[architecture] | fields).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        return model

    return build
