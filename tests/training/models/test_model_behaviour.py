"""What every model must do whatever its weights: ignore padding and the future, answer alike by either kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import LLAMA_PARTS
from torch import Tensor

from headway_training.models import GPT, Encoder, Model, Transformer, ViT
from headway_training.models.parts.attention import causal_attention

BuildTiny = Callable[..., Model]
parts = pytest.mark.parametrize(
    "parts",
    [{}, {"norm": "post"}, LLAMA_PARTS, LLAMA_PARTS | {"norm": "post"}],
    ids=["pre", "post", "llama", "llama-post"],
)
kernels = pytest.mark.parametrize("attention", ["plain", "fused"])

EXACTLY = {"atol": 1e-13, "rtol": 1e-12}
"""In double precision: a product of another shape may add in another order, and nothing else may differ."""


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, 23, (rows, length))


def mask(*lengths: int) -> Tensor:
    """One row a length, padded to the longest."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


@torch.inference_mode()
@parts
@kernels
@pytest.mark.parametrize("position", [0, 4, 10])
def test_a_gpts_logits_ignore_later_tokens(
    tiny_model: BuildTiny, parts: dict[str, object], attention: str, position: int
) -> None:
    model = tiny_model("gpt", **parts).use_attention(attention)
    text = ids(2, 12)
    changed = text.clone()
    changed[:, position + 1 :] = (changed[:, position + 1 :] + 1) % 23
    before, after = model(text), model(changed)
    assert torch.equal(before[:, : position + 1], after[:, : position + 1])
    assert not torch.isclose(before[:, position + 1 :], after[:, position + 1 :]).all(dim=-1).any()


@torch.inference_mode()
@kernels
@pytest.mark.parametrize("position", [0, 5])
def test_a_transformers_logits_ignore_later_target_tokens(tiny_model: BuildTiny, attention: str, position: int) -> None:
    model = tiny_model("transformer").use_attention(attention)
    source, target = ids(2, 9), ids(2, 8)
    changed = target.clone()
    changed[:, position + 1 :] = (changed[:, position + 1 :] + 1) % 23
    before, after = (model(source, torch.ones_like(source), x) for x in (target, changed))
    assert torch.equal(before[:, : position + 1], after[:, : position + 1])
    assert not torch.isclose(before[:, position + 1 :], after[:, position + 1 :]).all(dim=-1).any()


@torch.inference_mode()
@parts
@pytest.mark.parametrize(
    "head",
    [
        {"pooling": "first"},
        {"pooling": "mean"},
        {"pooling": "max"},
        {"head": "token"},
    ],
    ids=["first", "mean", "max", "token"],
)
def test_an_encoders_padded_row_answers_as_alone(
    tiny_model: BuildTiny, parts: dict[str, object], head: dict[str, object]
) -> None:
    model = tiny_model("encoder", **parts, **head).double()
    texts, lengths = ids(3, 11), (11, 6, 1)
    together = model(texts, mask(*lengths))
    for row, length in enumerate(lengths):
        alone = model(texts[row : row + 1, :length], mask(length))[0]
        own = together[row] if alone.ndim == 1 else together[row, :length]
        torch.testing.assert_close(own, alone, **EXACTLY)


@torch.inference_mode()
@kernels
def test_what_stands_in_an_encoders_padding_changes_no_bit(tiny_model: BuildTiny, attention: str) -> None:
    model = tiny_model("encoder").use_attention(attention)
    texts, attention_mask = ids(3, 11), mask(11, 6, 1)
    changed = torch.where(attention_mask.bool(), texts, (texts + 1) % 23)
    assert torch.equal(model(texts, attention_mask), model(changed, attention_mask))


@torch.inference_mode()
def test_a_gpts_padded_row_answers_as_alone(tiny_model: BuildTiny) -> None:
    model, texts = tiny_model("gpt").double(), ids(2, 12)
    alone = model(texts[:1, :5])
    torch.testing.assert_close(model(texts)[:1, :5], alone, **EXACTLY)


@torch.inference_mode()
@parts
def test_a_transformers_padded_row_answers_as_alone(tiny_model: BuildTiny, parts: dict[str, object]) -> None:
    model = tiny_model("transformer", **parts).double()
    sources, targets, source_mask = ids(2, 10), ids(2, 7), mask(10, 4)
    together = model(sources, source_mask, targets)[1:, :3]
    alone = model(sources[1:, :4], mask(4), targets[1:, :3])
    torch.testing.assert_close(together, alone, **EXACTLY)
    changed = torch.where(source_mask.bool(), sources, (sources + 1) % 23)
    assert torch.equal(model(changed, source_mask, targets)[1:, :3], together)


@torch.inference_mode()
@parts
def test_the_two_kernels_give_a_model_the_same_logits(tiny_model: BuildTiny, parts: dict[str, object]) -> None:
    text, attention_mask = ids(2, 9), mask(9, 5)
    arguments: dict[str, tuple[Tensor, ...]] = {
        "gpt": (text,),
        "transformer": (text, attention_mask, text[:, :6]),
        "encoder": (text, attention_mask),
        "vit": (torch.randn(2, 3, 16, 16),),
    }
    for architecture, tensors in arguments.items():
        model = tiny_model(architecture, **parts)
        plain = model.use_attention("plain")(*tensors)
        torch.testing.assert_close(model.use_attention("fused")(*tensors), plain, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_an_encoder_without_positions_is_permutation_equivariant(tiny_model: BuildTiny) -> None:
    model = tiny_model("encoder", positions="none")
    assert isinstance(model, Encoder)
    texts, order = ids(2, 8), torch.randperm(8)
    straight = model.hidden_states(texts, mask(8, 8))
    torch.testing.assert_close(
        model.hidden_states(texts[:, order], mask(8, 8)), straight[:, order], atol=1e-5, rtol=1e-5
    )


@torch.inference_mode()
def test_each_layer_of_a_gpt_calls_attention_once_with_its_number_and_heads_apart(tiny_model: BuildTiny) -> None:
    model, calls = tiny_model("gpt"), []
    assert isinstance(model, GPT)
    text = ids(2, 6)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, layer: int) -> Tensor:
        calls.append((layer, query.shape, key.shape, value.shape))
        return causal_attention()(query, key, value, layer=layer)

    hidden_states = model.hidden_states(text, torch.arange(6).expand(2, 6), attend)
    assert calls == [(layer, *[(2, 6, 2, 16)] * 3) for layer in (0, 1)]
    assert torch.equal(model.logits(hidden_states), model(text))
    torch.testing.assert_close(model.logits(hidden_states[:, -1]), model(text)[:, -1])


@torch.inference_mode()
def test_a_transformer_makes_a_key_and_a_value_a_decoder_layer(tiny_model: BuildTiny) -> None:
    model = tiny_model("transformer", num_decoder_layers=3)
    assert isinstance(model, Transformer)
    keys_values = model.cross_keys_values(model.encode(ids(2, 9), mask(9, 4)))
    assert [(key.shape, value.shape) for key, value in keys_values] == [((2, 9, 2, 16),) * 2] * 3


@torch.inference_mode()
def test_token_types_are_all_zero_unless_given(tiny_model: BuildTiny) -> None:
    model, texts = tiny_model("encoder", num_token_types=2), ids(2, 7)
    plain = model(texts, mask(7, 4))
    assert torch.equal(model(texts, mask(7, 4), torch.zeros_like(texts)), plain)
    assert not torch.isclose(model(texts, mask(7, 4), torch.ones_like(texts)), plain).any()


@torch.inference_mode()
@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_a_vit_reads_patches_row_by_row(tiny_model: BuildTiny, pooling: str) -> None:
    model, images = tiny_model("vit", pooling=pooling), torch.randn(2, 3, 16, 16)
    assert isinstance(model, ViT)
    patches = [images[:, :, y : y + 4, x : x + 4].flatten(1) for y in range(0, 16, 4) for x in range(0, 16, 4)]
    weight = model.patches.weight.flatten(1)  # (D, 3 * 4 * 4)
    tokens = torch.stack(patches, dim=1) @ weight.T + model.patches.bias  # (B, 16, D)
    torch.testing.assert_close(model.patches(images).flatten(2).transpose(1, 2), tokens, atol=1e-5, rtol=1e-5)
    assert model.hidden_states(images).shape == (2, 16 + (pooling == "class_token"), 32)
    assert model(images).shape == (2, 5)


@torch.inference_mode()
@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_a_stem_of_convolutions_makes_as_many_tokens_as_patches_that_see_their_neighbours(
    tiny_model: BuildTiny, patch_size: int
) -> None:
    model, images = tiny_model("vit", stem="convolutions", patch_size=patch_size), torch.randn(2, 3, 16, 16)
    assert isinstance(model, ViT)
    side = 16 // patch_size
    tokens = model.patches(images)
    assert tokens.shape == (2, 32, side, side)
    assert model(images).shape == (2, 5)
    changed = images.clone()
    changed[:, :, :, patch_size] += 1  # the first column of the second patch
    assert not torch.equal(model.patches(changed)[..., 0], tokens[..., 0])


def test_too_long_a_text_and_an_image_of_another_size_are_errors(tiny_model: BuildTiny) -> None:
    with pytest.raises(ValueError, match="at most 24 tokens, and has 25"):
        tiny_model("gpt")(ids(1, 25))
    with pytest.raises(ValueError, match="target sentence may have at most 20 tokens, and has 21"):
        tiny_model("transformer")(ids(1, 3), mask(3), ids(1, 21))
    with pytest.raises(ValueError, match=r"must be 16 x 16 pixels, and are \(16, 12\)"):
        tiny_model("vit")(torch.zeros(1, 3, 16, 12))


def test_dropout_acts_in_training_alone(tiny_model: BuildTiny) -> None:
    model, text = tiny_model("gpt", dropout=0.3), ids(1, 6)
    assert torch.equal(model(text), model(text))
    model.train()
    assert not torch.equal(model(text), model(text))
