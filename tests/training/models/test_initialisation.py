"""Fresh weights are distributed as their papers say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import LLAMA_PARTS

from headway_training.models import (
    GPT,
    Encoder,
    EncoderConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

LAYER = {"d_model": 128, "num_heads": 4, "d_ff": 512}
LLAMA = LAYER | LLAMA_PARTS


@pytest.mark.parametrize("fields", [LAYER, LLAMA], ids=["usual", "llama"])
def test_gpt_is_normal_with_smaller_matrices_into_the_residual_stream(fields: dict[str, Any]) -> None:
    model = GPT(GPTConfig(vocabulary_size=500, max_length=64, num_layers=8, **fields))
    layer = model.stack.layers[3]
    for weight in (model.tokens.weight, layer.attention.query_key_value.weight, layer.feed_forward.input.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    for weight in (layer.attention.output.weight, layer.feed_forward.output.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.03)
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))


def test_transformer_is_xavier_by_projection_and_its_scaled_embeddings_have_unit_variance() -> None:
    sizes = {"vocabulary_size": 500, "max_source_length": 64, "max_target_length": 64}
    model = Transformer(TransformerConfig(**sizes, num_encoder_layers=1, num_decoder_layers=1, **LAYER))
    layer = model.decoder.layers[0]
    square = math.sqrt(6 / (128 + 128))
    parts = [*layer.attention.query_key_value.weight.chunk(3), *layer.cross_attention.key_value.weight.chunk(2)]
    for weight in [*parts, layer.cross_attention.query.weight, layer.cross_attention.output.weight]:
        assert square * 0.99 < weight.abs().max().item() <= square
    assert layer.feed_forward.input.weight.abs().max().item() <= math.sqrt(6 / (128 + 512))
    assert (model.tokens.weight * math.sqrt(128)).std().item() == pytest.approx(1, rel=0.03)


def test_maps_that_share_a_matrix_are_xavier_one_by_one_whatever_their_sizes() -> None:
    sizes = {"vocabulary_size": 500, "max_source_length": 64, "max_target_length": 64}
    model = Transformer(TransformerConfig(**sizes, num_encoder_layers=1, num_decoder_layers=1, **LLAMA))
    layer = model.decoder.layers[0]
    for part in layer.attention.query_key_value.weight.split([128, 32, 32]):
        bound = math.sqrt(6 / (128 + len(part)))
        assert bound * 0.99 < part.abs().max().item() <= bound
    for part in layer.feed_forward.input.weight.chunk(2):
        bound = math.sqrt(6 / (128 + 512))
        assert bound * 0.99 < part.abs().max().item() <= bound


@pytest.mark.parametrize(
    "model_class",
    [
        lambda: Encoder(EncoderConfig(vocabulary_size=500, max_length=64, num_layers=1, num_classes=2, **LAYER)),
        lambda: ViT(ViTConfig(image_size=32, patch_size=4, num_layers=1, num_classes=2, **LAYER)),
    ],
    ids=["encoder", "vit"],
)
def test_encoder_and_vit_are_normal_cut_off_at_two_standard_deviations(model_class: type) -> None:
    layer = model_class().stack.layers[0]
    for weight in (layer.attention.query_key_value.weight, layer.feed_forward.output.weight):
        assert weight.abs().max().item() <= 0.04
        assert weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.03)  # what the cut leaves of 0.02


def test_the_patches_of_a_vit_start_at_unit_scale() -> None:
    model = ViT(ViTConfig(image_size=32, patch_size=4, num_layers=1, num_classes=2, **LAYER))
    tokens = model.patches(torch.randn(64, 3, 32, 32))
    assert tokens.std().item() == pytest.approx(0.88, rel=0.05)
