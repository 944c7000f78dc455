"""Cached greedy decoding equals recomputing everything at each step, on models trained to say varied things."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from headway_training.models import GPT, GPTConfig, Transformer, TransformerConfig
from headway_training.models.decoding import generate_greedily, translate_greedily
from headway_training.models.parts.attention import causal_attention, cross_attention, fused_attention
from headway_training.models.parts.cache import CachedAttention

VOCABULARY, BOS, EOS = 13, 11, 12  # digits 0 to 10, and the two
LENGTH = 20


def recurrence(rows: int, length: int = LENGTH) -> Tensor:
    """Digits where each is three more than the last but one, modulo 11: (rows, length)."""
    digits = list(torch.randint(0, 11, (2, rows)))
    for _ in range(length - 2):
        digits.append((digits[-2] + 3) % 11)
    return torch.stack(digits, dim=1)


@pytest.fixture(scope="module")
def gpt() -> GPT:
    """Learned the recurrence, more or less."""
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 64}
    model = GPT(GPTConfig(vocabulary_size=VOCABULARY, max_length=LENGTH, **sizes)).use_attention("fused")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        text = recurrence(32)
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().use_attention("plain")


def reversals(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources of 3 to 8 digits, their mask, and targets: BOS, the source reversed, EOS up to the end."""
    lengths = torch.randint(3, 9, (rows,))
    source = torch.randint(0, 11, (rows, 8))
    source_mask = (torch.arange(8) < lengths[:, None]).long()
    target = torch.full((rows, 10), EOS)
    target[:, 0] = BOS
    for row, length in enumerate(lengths.tolist()):
        target[row, 1 : length + 1] = source[row, :length].flip(0)
    return source, source_mask, target


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    """Learned to reverse, more or less."""
    torch.manual_seed(2)
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 64}
    limits = {"vocabulary_size": VOCABULARY, "max_source_length": 12, "max_target_length": 12}
    model = Transformer(TransformerConfig(**sizes, **limits, positions="sinusoidal")).use_attention("fused")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        source, source_mask, target = reversals(32)
        logits = model(source, source_mask, target[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().use_attention("plain")


def generate_naively(model: GPT, prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_new_tokens, model.max_length):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def translate_naively(model: Transformer, source: Tensor, max_new_tokens: int) -> list[int]:
    target = [BOS]
    for _ in range(max_new_tokens):
        token = int(model(source[None], torch.ones_like(source)[None], torch.tensor([target]))[0, -1].argmax())
        if token == EOS:
            break
        target.append(token)
    return target[1:]


def assert_varied(outputs: list[list[int]]) -> None:
    """A model that repeats itself would prove nothing about a cache."""
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert len(set(itertools.chain(*outputs))) >= 8
    assert min(len(set(output)) for output in outputs) >= 3


def test_cached_generation_of_ragged_prompts_is_full_recomputation(gpt: GPT) -> None:
    prompts = [text[:length].tolist() for text, length in zip(recurrence(6), [2, 9, 3, 19, 5, 2], strict=True)]
    with torch.inference_mode():
        expected = [generate_naively(gpt, prompt, 12) for prompt in prompts]
    assert [len(output) for output in expected] == [12, 11, 12, 1, 12, 12]
    assert_varied([output for output in expected if len(output) > 1])
    assert generate_greedily(gpt, prompts, max_new_tokens=12) == expected
    assert generate_greedily(gpt, prompts, max_new_tokens=12, kernel=fused_attention) == expected


def test_generation_stops_at_the_end_token(gpt: GPT) -> None:
    prompts = [[1, 1], [1, 2, 3]]
    whole = generate_greedily(gpt, prompts, max_new_tokens=10)
    end = whole[0][3]
    expected = [output[: output.index(end)] if end in output else output for output in whole]
    assert generate_greedily(gpt, prompts, max_new_tokens=10, eos_id=end) == expected
    assert len(expected[0]) <= 3


def test_cached_translation_is_full_recomputation(transformer: Transformer) -> None:
    sources, source_mask, _ = reversals(8)
    with torch.inference_mode():
        expected = [
            translate_naively(transformer, source[: int(row_mask.sum())], 9)
            for source, row_mask in zip(sources, source_mask, strict=True)
        ]
    assert_varied(expected)
    outputs = translate_greedily(transformer, sources, source_mask, bos_id=BOS, eos_id=EOS, max_new_tokens=9)
    assert outputs == expected


@torch.inference_mode()
def test_cached_logits_are_those_of_full_recomputation_however_the_text_is_cut(gpt: GPT) -> None:
    text = recurrence(3)
    full = gpt(text)
    for cuts in ([1] * LENGTH, [7, 1, 1, 4, 7], [LENGTH]):
        cache, pieces, start = CachedAttention(gpt.max_length), [], 0
        for cut in cuts:
            position_ids = torch.arange(start, start + cut).expand(3, cut)
            piece = text[:, start : start + cut]
            pieces.append(gpt.logits(gpt.hidden_states(piece, position_ids, cache.at(position_ids))))
            start += cut
        torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-4, rtol=1e-5)


@torch.inference_mode()
def test_cached_target_logits_are_those_of_full_recomputation(transformer: Transformer) -> None:
    source, source_mask, target = reversals(4)
    full = transformer(source, source_mask, target)
    cache = CachedAttention(transformer.max_target_length)
    keys_values = transformer.cross_keys_values(transformer.encode(source, source_mask))
    attend_cross = cross_attention(keys_values, source_mask)
    for position in range(target.shape[1]):
        position_ids = torch.full((4, 1), position)
        hidden_states = transformer.decode(
            target[:, position : position + 1], position_ids, cache.at(position_ids), attend_cross
        )
        torch.testing.assert_close(transformer.logits(hidden_states)[:, 0], full[:, position], atol=1e-4, rtol=1e-5)


def test_a_whole_text_through_the_cache_is_causal_attention() -> None:
    query, key, value = (torch.randn(2, 6, 2, 8) for _ in range(3))
    cached = CachedAttention(9).at(torch.arange(6).expand(2, 6))(query, key, value)
    torch.testing.assert_close(cached, causal_attention()(query, key, value))


def test_a_position_past_the_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 9 is past the cache, which holds positions 0 to 8"):
        CachedAttention(9).at(torch.tensor([[9]]))


def test_a_prompt_that_is_empty_or_too_long_is_an_error(gpt: GPT) -> None:
    for prompt in ([], [1] * 21):
        with pytest.raises(ValueError, match=f"must have 1 to 20 tokens, and has {len(prompt)}"):
            generate_greedily(gpt, [[1, 2], prompt], max_new_tokens=1)


def test_the_cache_tells_its_state() -> None:
    cache = CachedAttention(9)
    cache.at(torch.tensor([[0]]))(*(torch.randn(1, 1, 2, 8) for _ in range(3)))
    assert repr(cache) == "CachedAttention(max_length=9, layers=1)"
