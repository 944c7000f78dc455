"""Subwords of a text: where tokens stand in what the caller sent, whatever Unicode has in store."""

import time

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from headway_server.preprocessing.subwords import Subwords
from headway_training.tagging import find_subwords

E_ACUTE, E_COMBINING = "é", "e\u0301"
GRAPHEMES = [
    [E_COMBINING],
    ["👍🏽"],
    ["👩\u200d🚀"],
    ["❤\ufe0f", "1\ufe0f\u20e3"],
    ["🇩🇪"],
    ["🇩🇪", "🇫🇷", "🇺"],
    ["🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"],
    ["\u1112\u1161\u11ab", "각", "가\u11a8"],
    ["न", "म", "स्ते"],
    ["क़्षि", "ক্ষ"],
    ["ப்", "போ"],
    ["ก็ำ", "แ"],
    ["မြ", "န်", "မာ", "က္က"],
    ["\u06001"],
    ["क्\u20e3ष", "क्\uff9eष", "क्\U000e0061ष"],
    ["\U00011f04\U00011f42\U00011f05"],
]
"""Of emoji, flags, Hangul, Devanagari, Bengali, Tamil, Thai, Myanmar, an Arabic sign of numbers, marks of other scripts
within a conjunct, and Kawi, which Python's own tables do not know yet."""


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A tokenizer with a token for every byte, and a frame of special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    return tokenizer


def find(text: str, normalizer: normalizers.Normalizer | None = None) -> list[tuple[str, bool]]:
    """The characters of each subword, and whether nothing can begin there."""
    subwords = Subwords.find(text, byte_level(normalizer).encode(text).offsets)
    ends = zip(subwords.starts.tolist(), subwords.ends.tolist(), subwords.joined.tolist(), strict=True)
    return [(text[start:end], joined) for start, end, joined in ends]


def test_special_tokens_and_white_space_are_no_subwords():
    subwords = Subwords.find(" a \t b", byte_level().encode(" a \t b").offsets)
    assert subwords.tokens.tolist() == [2, 6]  # after the special token and the space
    assert (subwords.starts.tolist(), subwords.ends.tolist()) == ([1, 5], [2, 6])


def test_white_space_around_a_token_is_cut_off():
    subwords = Subwords.find("to  be or", [(0, 0), (0, 2), (2, 4), (3, 7), (6, 9)])
    assert (subwords.tokens.tolist(), subwords.starts.tolist(), subwords.ends.tolist()) == (
        [1, 3, 4],
        [0, 4, 7],
        [2, 6, 9],
    )


@pytest.mark.parametrize("text", ["🙂", "ü", "中"])
def test_a_character_of_several_tokens_cannot_be_taken_apart(text):
    found = find(f"a{text}b")
    assert found[0] == ("a", False)
    assert found[-1] == ("b", False)
    assert [characters for characters, _ in found[1:-1]] == [text] * len(text.encode())
    assert [joined for _, joined in found[1:-1]] == [False, *[True] * (len(text.encode()) - 1)]


@pytest.mark.parametrize("graphemes", GRAPHEMES)
def test_what_belongs_to_a_grapheme_cannot_begin_anything(graphemes):
    found = find(f"x{''.join(graphemes)}y")
    begins = [characters for characters, joined in found if not joined]
    assert begins == ["x", *(grapheme[0] for grapheme in graphemes), "y"]


@pytest.mark.parametrize("graphemes", GRAPHEMES)
def test_training_and_the_server_find_the_same_subwords(graphemes):
    text = f"x{''.join(graphemes)}y {''.join(graphemes[::-1])}"
    encoding = byte_level().encode(text)
    found = Subwords.find(text, encoding.offsets)
    expected = find_subwords(text, encoding.offsets)
    columns = (found.tokens, found.starts, found.ends, found.joined)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [tuple(one) for one in expected]


@pytest.mark.parametrize("follower", ["a", ".", "क"])
def test_what_a_joiner_stands_before_is_joined_whatever_it_is(follower):
    assert [characters for characters, joined in find(f"क\u200d{follower}z") if not joined] == ["क", "z"]


def test_the_end_of_a_long_text_of_flags_takes_no_longer_than_its_beginning():
    text = "a" + "🇩" * 250_000
    offsets = [(index, index + 1) for index in range(len(text) - 500, len(text))]
    began = time.process_time()
    found = Subwords.find(text, offsets)
    assert time.process_time() - began < 1.0  # a walk back from each took 30 s
    assert found.joined.tolist()[1:] == [(start - 1) % 2 == 1 for start, _ in offsets][1:]


def test_a_text_that_begins_with_a_mark_has_a_beginning():
    assert [joined for _, joined in find("\u0301a")] == [False, True, False]


@pytest.mark.parametrize("form", [normalizers.NFC(), normalizers.NFKC()])
def test_offsets_of_composed_accents_are_those_of_the_callers_text(form):
    text = f"caf{E_COMBINING} b{E_ACUTE}"
    subwords = Subwords.find(text, byte_level(form).encode(text).offsets)
    covered = set()
    for start, end in zip(subwords.starts.tolist(), subwords.ends.tolist(), strict=True):
        covered |= set(range(start, end))
    assert {3, 6, 7} <= covered
    assert max(subwords.ends.tolist()) == len(text)


def test_a_ligature_that_normalisation_takes_apart_stays_whole():
    found = find("oﬃce", normalizers.NFKC())
    assert [(characters, joined) for characters, joined in found if not joined] == [
        ("o", False),
        ("ﬃ", False),
        ("c", False),
        ("e", False),
    ]
    assert sum(characters == "ﬃ" for characters, _ in found) == 3


def test_no_text_has_no_subwords():
    assert len(Subwords.find("", []).tokens) == 0
    assert len(Subwords.find(" \n", [(0, 1), (1, 2)]).joined) == 0
