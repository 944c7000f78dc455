"""Evaluation: windows, batches and the cache change nothing against the plain way to compute the same."""

import math

import numpy as np
import pytest
import torch

from headway_training.evaluation import (
    evaluation_windows,
    nats_per_character,
    pad,
    text_logits,
    token_mask,
    translate_greedily,
)
from headway_training.models import build_model
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import train_tokenizer

LAYER = {"d_model": 16, "num_heads": 2, "d_ff": 32}


@pytest.mark.parametrize(("num_tokens", "window"), [(2, 8), (8, 8), (9, 8), (37, 8), (64, 8), (5, 2)])
def test_windows_predict_every_token_but_the_first_once_with_half_a_window_before_it(num_tokens, window):
    predicted: list[int] = []
    for start, end, first in evaluation_windows(num_tokens, window):
        assert end - start <= window
        assert start < first
        assert start == 0 or first - start >= window // 2
        predicted += range(first, end)
    assert predicted == list(range(1, num_tokens))


@torch.inference_mode()
def test_nats_per_character_equal_a_sum_over_tokens_one_by_one():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["to be or not to be"] * 3, TokenizerSettings(vocabulary_size=270), "generation")
    model = build_model("gpt", {**LAYER, "vocabulary_size": 270, "max_length": 8, "num_layers": 1}).eval()
    text = "to be, or not to be: that is the questiön"
    encoding = tokenizer.encode(text)
    total = 0.0
    for position in range(1, len(encoding.ids)):
        start = 0 if position < 8 else 4 * math.ceil((position - 7) / 4)  # the first window of stride 4 that holds it
        logits = model(torch.tensor([encoding.ids[start:position]]))[0, -1].double()
        total -= float(logits.log_softmax(-1)[encoding.ids[position]])
    expected = total / (len(text) - encoding.offsets[0][1])
    for batch_size in (1, 3, 16):
        assert nats_per_character(model, tokenizer, text, batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary():
    tokenizer = train_tokenizer(["abc"], TokenizerSettings(vocabulary_size=260), "generation")
    model = build_model("gpt", {**LAYER, "vocabulary_size": 256, "max_length": 8, "num_layers": 1}).eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert tokenizer.get_vocab_size() == 256  # bytes alone: one token a character
    assert nats_per_character(model, tokenizer, "some text of bytes") == pytest.approx(math.log(256), rel=1e-5)


def test_one_token_is_too_little():
    tokenizer = train_tokenizer(["abc"], TokenizerSettings(vocabulary_size=260), "generation")
    model = build_model("gpt", {**LAYER, "vocabulary_size": 256, "max_length": 8, "num_layers": 1})
    with pytest.raises(ValueError, match="the text has 1 tokens; nats per character need at least 2"):
        nats_per_character(model, tokenizer, "a")


def test_cached_greedy_decoding_equals_decoding_from_the_start_every_time():
    torch.manual_seed(3)
    fields = {
        **LAYER,
        "vocabulary_size": 20,
        "max_source_length": 10,
        "max_target_length": 9,
        "num_encoder_layers": 1,
        "num_decoder_layers": 2,
    }
    model = build_model("transformer", fields).eval()
    sources = [[5, 6, 7, 2], [8, 2], [9, 10, 11, 12, 13, 2]]
    fast = translate_greedily(model, pad(sources, 0), token_mask(sources), bos=1, eos=2)
    for source, tokens in zip(sources, fast, strict=True):
        expected = [1]
        while len(expected) <= 9:
            ids, mask = torch.tensor([source]), torch.ones(1, len(source), dtype=torch.long)
            chosen = int(model(ids, mask, torch.tensor([expected]))[0, -1].argmax())
            if chosen == 2:
                break
            expected.append(chosen)
            if len(expected) > 9:
                break
        assert tokens == expected[1:]
    assert len({tuple(tokens) for tokens in fast}) > 1


def test_texts_are_classified_in_batches_as_they_are_alone():
    torch.manual_seed(0)
    model = build_model(
        "encoder", {**LAYER, "vocabulary_size": 50, "max_length": 300, "num_layers": 1, "num_classes": 7}
    ).eval()
    torch.nn.init.normal_(model.tokens.weight, std=1.0)
    generator = np.random.default_rng(0)
    ids = [generator.integers(1, 50, size=generator.integers(1, 300)).tolist() for _ in range(60)]
    together = np.stack(text_logits(model, ids, 0))
    alone = [model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))[0].tolist() for row in ids]
    assert together == pytest.approx(np.array(alone), abs=1e-5)
    assert len(set(together.argmax(axis=-1))) > 1
