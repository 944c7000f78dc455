"""Texts are cut as the library cuts them, and nothing of what was cut off stays."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway_server.preprocessing.text import _truncated as truncated

FIELDS = ("ids", "type_ids", "tokens", "word_ids", "offsets", "special_tokens_mask", "attention_mask")


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "é😀": 3, "[UNK]": 4}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 9])
def test_what_is_kept_is_what_the_library_keeps(direction, num_tokens):
    tokenizer = make_tokenizer()
    text = "é😀 a '\"\\ a"
    expected = tokenizer.encode(text, add_special_tokens=False)
    expected.truncate(num_tokens, direction=direction)
    kept = truncated(tokenizer.encode(text, add_special_tokens=False), num_tokens, direction=direction)
    for field in FIELDS:
        assert getattr(kept, field) == getattr(expected, field), field


def test_a_pair_joined_after_the_cut_has_nothing_that_overflowed():
    tokenizer = make_tokenizer()
    first, second = (tokenizer.encode("a " * count, add_special_tokens=False) for count in (60, 40))
    assert num_overflowing_by_library(tokenizer) > 100, "the library joins every piece of one text with every other's"
    joined = tokenizer.post_process(truncated(first, 3, direction="right"), truncated(second, 2, direction="right"))
    assert joined.overflowing == []
    assert joined.ids == [0, 2, 2, 2, 1, 2, 2, 1]
    assert joined.type_ids == [0, 0, 0, 0, 0, 1, 1, 1]
    assert joined.sequence_ids == [None, 0, 0, 0, None, 1, 1, None]


def num_overflowing_by_library(tokenizer: Tokenizer) -> int:
    """Returns how many encodings hang on a pair of 60 and 40 tokens that the library cut to 3 and 2."""
    first, second = (tokenizer.encode("a " * count, add_special_tokens=False) for count in (60, 40))
    first.truncate(3)
    second.truncate(2)
    return len(tokenizer.post_process(first, second).overflowing)
