"""Decoding with a key/value cache gives the logits of recomputing everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import LLAMA_PARTS

from headway_training.models import GPT, Model, Transformer
from headway_training.models.parts.attention import CachedAttention, causal_attention, cross_attention, fused_attention

BuildTiny = Callable[..., Model]
LENGTH = 20

parts = pytest.mark.parametrize("parts", [{}, LLAMA_PARTS], ids=["usual", "llama"])


@torch.inference_mode()
@parts
@pytest.mark.parametrize("cuts", [[1] * LENGTH, [7, 1, 1, 4, 7], [LENGTH]], ids=str)
def test_a_text_may_be_cut_anywhere(tiny_model: BuildTiny, parts: dict[str, object], cuts: list[int]) -> None:
    model, text = tiny_model("gpt", **parts), torch.randint(0, 23, (3, LENGTH))
    assert isinstance(model, GPT)
    cache, chunks, start = CachedAttention(model.max_length), [], 0
    for cut in cuts:
        position_ids = torch.arange(start, start + cut).expand(3, cut)
        chunk = text[:, start : start + cut]
        chunks.append(model.logits(model.hidden_states(chunk, position_ids, cache.at(position_ids))))
        start += cut
    torch.testing.assert_close(torch.cat(chunks, dim=1), model(text), atol=1e-4, rtol=1e-5)


@torch.inference_mode()
@parts
def test_rows_may_be_padded_and_go_on_at_positions_of_their_own(
    tiny_model: BuildTiny, parts: dict[str, object]
) -> None:
    model, text = tiny_model("gpt", **parts), torch.randint(0, 23, (4, LENGTH))
    assert isinstance(model, GPT)
    lengths = torch.tensor([2, 9, 1, 12])  # of the prompts, whose padding is the text itself
    cache = CachedAttention(model.max_length, fused_attention)
    prompt_positions = torch.arange(12).expand(4, 12)
    model.hidden_states(text[:, :12], prompt_positions, cache.at(prompt_positions))
    full = model(text)
    for step in range(8):
        positions = (lengths + step)[:, None]
        hidden_states = model.hidden_states(text.gather(1, positions), positions, cache.at(positions))
        expected = full[torch.arange(4), positions[:, 0]]
        torch.testing.assert_close(model.logits(hidden_states)[:, 0], expected, atol=1e-4, rtol=1e-5)


@torch.inference_mode()
@parts
def test_target_tokens_may_be_read_one_by_one(tiny_model: BuildTiny, parts: dict[str, object]) -> None:
    model = tiny_model("transformer", **parts)
    assert isinstance(model, Transformer)
    source, target = torch.randint(0, 23, (4, 9)), torch.randint(0, 23, (4, 10))
    source_mask = (torch.arange(9) < torch.tensor([9, 3, 1, 6])[:, None]).long()
    full = model(source, source_mask, target)
    cache = CachedAttention(model.max_target_length)
    attend_cross = cross_attention(model.cross_keys_values(model.encode(source, source_mask)), source_mask)
    for position in range(10):
        position_ids = torch.full((4, 1), position)
        hidden_states = model.decode(target[:, position, None], position_ids, cache.at(position_ids), attend_cross)
        torch.testing.assert_close(model.logits(hidden_states)[:, 0], full[:, position], atol=1e-4, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [[1] * LENGTH, [7, 1, 5, 7], [LENGTH]], ids=str)
def test_a_window_is_the_same_of_a_cache_and_of_a_whole_text(cuts: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, LENGTH, 2, 8)
    bounded = {"window": 5, "softcap": 2.0, "sinks": torch.randn(2)}
    whole = causal_attention()(query, key, value, layer=0, **bounded)
    cache, chunks = CachedAttention(LENGTH + 3), []
    for position_ids in torch.arange(LENGTH).split(cuts):
        chunk = (tensor[:, position_ids] for tensor in (query, key, value))
        chunks.append(cache.at(position_ids.expand(2, -1))(*chunk, layer=0, **bounded))
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_each_layer_has_a_cache_of_its_own_whatever_the_order_of_calls() -> None:
    query, key, value = (torch.randn(3, 2, 6, 2, 8) for _ in range(3))  # of three layers
    attend = CachedAttention(9).at(torch.arange(6).expand(2, 6))
    for layer in (2, 0, 1, 0):
        found = attend(query[layer], key[layer], value[layer], layer=layer)
        expected = causal_attention()(query[layer], key[layer], value[layer], layer=layer)
        torch.testing.assert_close(found, expected)


def test_a_position_past_the_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 9 is past the cache, which holds positions 0 to 8"):
        CachedAttention(9).at(torch.tensor([[9]]))


def test_its_repr_gives_its_size() -> None:
    cache = CachedAttention(9)
    cache.at(torch.tensor([[0]]))(*(torch.randn(1, 1, 2, 8) for _ in range(3)), layer=0)
    assert repr(cache) == "CachedAttention(max_length=9, num_layers=1)"
