"""Answers in a window of a context, however many pairs of tokens are the same answer, and wherever graphemes end."""

import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.tasks.question_answering.windows import Context, Window

MOST_S = 0.5
"""For a window of 4,096 tokens with 1,966,336 pairs, which take 0.1 s. Looked at one by one they took 4 s."""


def context_of_words(lengths: list[int]) -> Context:
    """A context of words of so many tokens, a letter each, without spaces."""
    words = np.repeat(np.arange(len(lengths)), lengths).tolist()
    offsets = tuple((place, place + 1) for place in range(len(words)))
    encoded = EncodedText(input_ids=np.zeros(len(words), np.int64), offsets=offsets, word_ids=tuple(words))
    return Context.of("a" * len(words), encoded, splits_words=False)


def answers_one_by_one(context: Context, logits: np.ndarray, *, max_tokens: int) -> dict[tuple[int, int], float]:
    """The best score of each answer."""
    begin, end = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found: dict[tuple[int, int], float] = {}
    for first in range(len(begin)):
        for last in range(first, min(first + max_tokens, len(end))):
            span = (int(context.starts[first]), int(context.ends[last]))
            found[span] = max(found.get(span, 0.0), begin[first] * end[last])
    return found


@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_an_answer_of_many_pairs_of_tokens_is_found_once(top_k):
    context, max_tokens = context_of_words([30, 1, 30, 2]), 40
    logits = np.random.default_rng(5).normal(size=(2, 63))
    found, null = context.read(
        logits.astype(np.float32), Window(0, 63), first=0, has_null=False, top_k=top_k, max_tokens=max_tokens
    )
    expected = answers_one_by_one(context, logits, max_tokens=max_tokens)
    best = sorted(expected.items(), key=lambda one: -one[1])[:top_k]
    assert [(one.start, one.end) for one in found] == [span for span, _ in best]
    assert [one.score for one in found] == pytest.approx([score for _, score in best], rel=1e-5)
    assert null == 0


def test_a_window_of_one_long_word_is_read_in_time():
    logits = np.random.default_rng(5).normal(size=(2, 4096)).astype(np.float32)
    context = context_of_words([4096])
    began = time.thread_time()
    found, _ = context.read(logits, Window(0, 4096), first=0, has_null=False, top_k=100, max_tokens=512)
    assert time.thread_time() - began < MOST_S
    assert [(one.start, one.end) for one in found] == [(0, 4096)]


@pytest.mark.parametrize("splits_words", [False, True])
@pytest.mark.parametrize("word", ["cafe\u0301", "\u05e9\u05c1", "cafe\u0301\u0302"])
def test_an_accent_that_the_tokenizer_leaves_out_is_of_the_answer(word, splits_words):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "cafe": 1, "##s": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = f"{word} {word}, {word}"
    encoded = TextTokenizer(tokenizer).encode_now(text, with_offsets=True)
    context = Context.of(text, encoded, splits_words=splits_words)
    read = [text[start:end] for start, end in zip(context.starts.tolist(), context.ends.tolist(), strict=True)]
    assert read == [word, word, ",", word]
