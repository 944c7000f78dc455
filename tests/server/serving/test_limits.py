"""What the inputs of a call are held to."""

import sys
import unicodedata

import pytest

from headway_server.errors import InvalidInputError
from headway_server.serving.limits import _LONG, check_text, check_texts


def test_texts_are_named_by_their_place():
    assert check_text("prompt", "a", 1) == "prompt"
    assert check_texts("texts", ["a", "b"], 2, 1) == ["texts[0]", "texts[1]"]


def test_a_text_is_held_to_its_bytes_and_not_to_its_characters():
    assert check_text("text", "ü" * 5, 10) == "text"
    with pytest.raises(InvalidInputError, match="text: has 12 bytes, the limit is 10; split or shorten it"):
        check_text("text", "ü" * 6, 10)
    with pytest.raises(InvalidInputError, match=r"texts\[1\]: has 11 bytes, the limit is 10"):
        check_texts("texts", ["a", "b" * 11], 2, 10)


def test_the_texts_of_a_call_are_held_to_their_sum():
    assert len(check_texts("texts", ["a" * 10] * 16, 256, 10)) == 16
    with pytest.raises(InvalidInputError, match=r"texts: has 161 bytes in all, the limit of a call is 160; send"):
        check_texts("texts", [*["a" * 10] * 16, "b"], 256, 10)


@pytest.mark.parametrize("texts", [[], ["a", "", "b"], ["a"] * 4])
def test_no_text_an_empty_one_and_too_many_are_refused(texts):
    with pytest.raises(InvalidInputError):
        check_texts("texts", texts, 3, 10)


def test_a_text_that_normalization_lengthens_many_times_is_refused():
    with pytest.raises(InvalidInputError, match="has 261000 bytes, and 1566000 characters when its ligatures"):
        check_text("text", "\ufdfa" * 87_000, 2**18)
    ordinary = ("ế" * 5000, "한국어 " * 5000, "中文" * 5000, "ﬃ…" * 5000, "مرحبا ﷺ " * 1000, "½ cup " * 1000)
    for text in ordinary:
        check_text("text", text, 2**18)
    check_text("text", "\ufdfa" * 1000, 2**18)


def test_normalization_makes_seven_characters_of_three_bytes_but_for_the_ones_that_are_counted():
    growth = {
        character: len(unicodedata.normalize("NFKD", character))
        for character in map(chr, range(sys.maxunicode + 1))
        if not "\ud800" <= character <= "\udfff"
    }
    assert {c: n for c, n in growth.items() if 3 * n > 7 * len(c.encode())} == _LONG
