"""Configurations: what is refused, and how; the way to a dictionary and back; building a model from one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from headway_training.models import (
    ARCHITECTURES,
    GPT,
    NAMED_CONFIGURATIONS,
    Encoder,
    GPTConfig,
    Transformer,
    ViT,
    ViTConfig,
    build_model,
    make_configuration,
)
from headway_training.models.parts.attention import fused_attention, scaled_dot_product_attention

GPT_FIELDS: dict[str, object] = {
    "vocabulary_size": 50,
    "max_length": 16,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
}
ENCODER_FIELDS = GPT_FIELDS | {"num_classes": 3}
VIT_FIELDS: dict[str, object] = {
    "image_size": 32,
    "patch_size": 4,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
    "num_classes": 3,
}
TRANSFORMER_FIELDS: dict[str, object] = {
    "vocabulary_size": 50,
    "max_source_length": 16,
    "max_target_length": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 1,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 36, "num_heads": 3}, "head_dim must be a multiple of 8, and is 12 (d_model 36 / num_heads 3)"),
        ({"d_model": 100, "num_heads": 3}, "d_model must be a multiple of num_heads (3), and is 100"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, and is 0"),
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, and is 0"),
        ({"d_ff": -1}, "d_ff must be an integer of at least 1, and is -1"),
        ({"d_model": 32.0}, "d_model must be an integer of at least 1, and is 32.0"),
        ({"max_length": "16"}, "max_length must be an integer of at least 1, and is '16'"),
        ({"vocabulary_size": True}, "vocabulary_size must be an integer of at least 1, and is True"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, and is 1.0"),
        ({"dropout": "0.1"}, "dropout must be at least 0 and below 1, and is '0.1'"),
        ({"norm": "middle"}, "norm must be one of 'pre', 'post', and is 'middle'"),
        ({"activation": "swish"}, "activation must be one of 'relu', 'gelu', 'gelu_tanh', 'silu', and is 'swish'"),
        ({"positions": "alibi"}, "positions must be one of 'learned', 'sinusoidal', 'rotary', 'none', and is 'alibi'"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads must be a divisor of num_heads (4), and is 3"),
        ({"num_kv_heads": 4}, "num_kv_heads must be a divisor of num_heads (2), and is 4"),
        ({"num_kv_heads": -1}, "num_kv_heads must be an integer of at least 0, and is -1"),
        ({"norm_kind": "rms"}, "norm_kind must be one of 'layer_norm', 'rms_norm', and is 'rms'"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0 and below 1, and is 0.0"),
        ({"norm_eps": "1e-5"}, "norm_eps must be above 0 and below 1, and is '1e-5'"),
        ({"gated": 1}, "gated must be true or false, and is 1"),
        ({"biases": "no"}, "biases must be true or false, and is 'no'"),
        ({"tie_embeddings": "yes"}, "tie_embeddings must be true or false, and is 'yes'"),
        ({"num_layer": 3}, "GPTConfig has no field 'num_layer'; did you mean 'num_layers'?"),
    ],
)
def test_a_wrong_field_is_an_error_that_gives_limit_and_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below, as it is)
        GPTConfig.from_dict(GPT_FIELDS | fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "encoder",
            ENCODER_FIELDS | {"num_classes": 0},
            "num_classes must be an integer of at least 1, and is 0",
        ),
        ("encoder", ENCODER_FIELDS | {"head": "span"}, "head must be one of 'sequence', 'token'"),
        (
            "encoder",
            ENCODER_FIELDS | {"pooling": "last"},
            "pooling must be one of 'first', 'mean', 'max', and is 'last'",
        ),
        ("vit", VIT_FIELDS | {"patch_size": 5}, "image_size must be a multiple of patch_size (5), and is 32"),
        (
            "vit",
            VIT_FIELDS | {"stem": "convolutions", "image_size": 24, "patch_size": 6},
            "patch_size is 6; with stem 'convolutions' it must be a power of two, 2 or more",
        ),
        (
            "vit",
            VIT_FIELDS | {"stem": "resnet"},
            "stem must be one of 'patches', 'convolutions', 'strided_convolutions', and is 'resnet'",
        ),
        ("vit", VIT_FIELDS | {"pooling": "first"}, "pooling must be one of 'class_token', 'mean', and is 'first'"),
        ("transformer", TRANSFORMER_FIELDS | {"num_decoder_layers": 0}, "num_decoder_layers must be an integer of"),
        ("gtp", GPT_FIELDS, "there is no architecture 'gtp'; did you mean 'gpt'?"),
        ("gpt", {}, "GPTConfig needs d_model, num_heads, d_ff, vocabulary_size, max_length, num_layers"),
    ],
)
def test_each_architecture_checks_its_own_fields(architecture: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below, as it is)
        build_model(architecture, fields)
    assert message in str(error.value)


@pytest.mark.parametrize("name", NAMED_CONFIGURATIONS)
def test_a_configuration_survives_json(name: str) -> None:
    named = NAMED_CONFIGURATIONS[name]
    values = json.loads(json.dumps(named.configuration.to_dict()))
    assert make_configuration(named.architecture, values) == named.configuration


def test_configurations_are_immutable_and_keyword_only() -> None:
    for one in ARCHITECTURES.values():
        assert all(field.kw_only for field in dataclasses.fields(one.configuration))
    configuration = GPTConfig.from_dict(GPT_FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        configuration.num_layers = 3  # type: ignore[misc]  # the point of the test


@pytest.mark.parametrize(
    ("architecture", "fields", "model_class"),
    [
        ("gpt", GPT_FIELDS, GPT),
        ("transformer", TRANSFORMER_FIELDS, Transformer),
        ("encoder", ENCODER_FIELDS, Encoder),
        ("vit", VIT_FIELDS, ViT),
    ],
)
def test_a_model_is_built_by_the_name_of_its_architecture(
    architecture: str, fields: dict[str, object], model_class: type
) -> None:
    model = build_model(architecture, fields)
    assert isinstance(model, model_class)
    assert model.kernel is scaled_dot_product_attention
    assert build_model(architecture, fields, attention="fused").kernel is fused_attention
    assert model.state_dict().keys() == build_model(architecture, model.configuration).state_dict().keys()


def test_another_architectures_configuration_is_an_error() -> None:
    with pytest.raises(ValueError, match="EncoderConfig has no field 'image_size'"):
        build_model("encoder", ViTConfig.from_dict(VIT_FIELDS))


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match="attention must be one of plain, fused, and is 'flash'"):
        build_model("gpt", GPT_FIELDS, attention="flash")  # type: ignore[arg-type]  # the point of the test


def test_tied_weights_are_stored_once_and_untied_ones_apart() -> None:
    for model in (build_model("gpt", GPT_FIELDS), build_model("transformer", TRANSFORMER_FIELDS)):
        matrices = [tensor for tensor in model.state_dict().values() if tensor.shape == (50, 32)]
        assert len(matrices) == 1
    for architecture, fields, count in (("gpt", GPT_FIELDS, 2), ("transformer", TRANSFORMER_FIELDS, 3)):
        state = build_model(architecture, fields | {"tie_embeddings": False}).state_dict()
        matrices = [tensor for tensor in state.values() if tensor.shape == (50, 32)]
        assert len({tensor.data_ptr() for tensor in matrices}) == count


def test_a_tied_projection_is_the_inner_product_with_each_embedding() -> None:
    model = build_model("gpt", GPT_FIELDS)
    assert isinstance(model, GPT)
    hidden_states = torch.randn(2, 3, 32)
    torch.testing.assert_close(
        model.logits(hidden_states), torch.einsum("btd,vd->btv", hidden_states, model.tokens.weight)
    )
