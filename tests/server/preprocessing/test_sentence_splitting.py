"""Texts to sentences and back: borders, spacing, positions."""

import re

import pytest
import sentencex
from hypothesis import given
from hypothesis import strategies as st

from headway_server.preprocessing import sentences, split_sentences

CASES = {
    "abbreviations and decimals": ("en", "Dr. Smith paid 3.50 dollars, e.g. in coins.| He left at 5 p.m. on Monday."),
    "a quotation": ("en", 'He said, "Stop! Wait for me." and ran away.| Nobody stopped.'),
    "ellipses": ("en", "Well... I do not know.| Perhaps..."),
    "paragraphs without stops": ("en", "A heading\n\n|Then a paragraph begins.| It ends"),
    "a list": ("en", "1. Buy milk.\n|2. Buy bread.\n|3. Go home."),
    "a blank line of spaces": ("en", "no stop here\n \t\n|and none here"),
    "Windows line ends": ("en", "no stop here\r\n\r\n|and none here"),
    "German dates and times": ("de", "Wir treffen uns am 3. Mai um 14.30 Uhr.| Bis dann!"),
    "German abbreviations": ("de", "Das ist z. B. gut, d. h. besser als Nr. 5.| Ja."),
    "German quotation marks": ("de", "„Komm!“, rief sie.| „Nein.“| Er blieb."),
    "no space": ("en", "No space here.|Another sentence begins."),
    "emoji": ("en", "I love it 😀!| Do you?"),
    "Chinese": ("zh", "今天天气很好。|我们去公园吧！|你来吗？"),  # noqa: RUF001 (these are its marks)
    "a language with a region": ("de-DE", "Wir treffen uns am 3. Mai.| Bis dann!"),
    "an unknown language": ("tlh", "One.| Two."),
}


@pytest.mark.parametrize(("language", "marked"), CASES.values(), ids=CASES.keys())
def test_borders(language: str, marked: str) -> None:
    split = split_sentences(marked.replace("|", ""), language)
    assert [sentence.text for sentence in split.sentences] == [part.strip() for part in marked.split("|")]


def test_a_line_break_within_a_sentence_is_read_as_a_space_and_moves_nothing() -> None:
    text = "  A hard\nline break. \r\n And\r\nmore."
    split = split_sentences(text, "en")
    assert [sentence.text for sentence in split.sentences] == ["A hard line break.", "And  more."]
    for sentence in split.sentences:
        assert text[sentence.start : sentence.end].split() == sentence.text.split()


@pytest.mark.parametrize("space", "\x85\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000")
@pytest.mark.parametrize("text", ["I_. X", "B_.AB\t!'", "A dog runs._It_barks. End_"])
def test_white_space_of_any_kind_after_a_letter_is_taken(space: str, text: str) -> None:
    split, plain = split_sentences(text.replace("_", space), "en"), split_sentences(text.replace("_", " "), "en")
    assert [sentence.start for sentence in split.sentences] == [sentence.start for sentence in plain.sentences]


@given(text=st.text(alphabet=st.sampled_from("ab AB.?!\n\r\t\u00a0\u2028\u3000,\"'(1。é😀-"), max_size=60))
def test_sentences_and_gaps_are_the_text(text: str) -> None:
    split = split_sentences(text, "en")
    assert len(split.gaps) == len(split.sentences) + 1
    assert all(not gap.strip() for gap in split.gaps)
    originals = [text[sentence.start : sentence.end] for sentence in split.sentences]
    assert all(original and original == original.strip() for original in originals)
    assert [len(original) for original in originals] == [len(sentence.text) for sentence in split.sentences]
    parts = [split.gaps[0]]
    for original, gap in zip(originals, split.gaps[1:], strict=True):
        parts += [original, gap]
    assert "".join(parts) == text


@pytest.mark.parametrize(
    "text",
    [
        "A dog runs. " * 4000,
        "A dog runs, he said. " * 900 + "\n\n" + "It ends. " * 900,
        "word " * 3000 + "end. And another sentence. It is seen in the next window." + " word" * 3000,
    ],
    ids=["one paragraph", "two", "long sentences"],
)
def test_a_long_text_has_the_borders_of_the_whole(text: str) -> None:
    paragraphs = [sentencex.segment("en", paragraph) for paragraph in text.split("\n\n")]
    expected = [part.strip() for parts in paragraphs for part in parts]
    assert [sentence.text for sentence in split_sentences(text, "en").sentences] == expected


def test_a_sentence_without_an_end_is_cut_at_spaces() -> None:
    sentences = split_sentences("word " * 9000 + "x" * 20_000, "en").sentences
    assert max(len(sentence.text) for sentence in sentences) <= 2**14
    assert {word for sentence in sentences[:-2] for word in sentence.text.split()} == {"word"}
    assert sum(len(sentence.text) - sentence.text.count(" ") for sentence in sentences) == 4 * 9000 + 20_000


@pytest.mark.parametrize(
    "text",
    [
        "a" + " " * 250_000 + "b",
        "a" + " " * 125_000 + "\n" + " " * 125_000 + "b",
        "a" + "\r" * 250_000 + "b",
        "a" + "\n \r" * 80_000 + "b",
        "«a. " * 60_000,
        "“a " * 60_000,
    ],
    ids=["spaces", "spaces around a line break", "carriage returns", "blank lines", "open quotations", "open and long"],
)
def test_no_text_of_the_greatest_length_takes_minutes(text: str) -> None:
    """These took from 10 s to four minutes, in which nothing else of the process ran; the tests' time limit is less."""
    split = split_sentences(text, "fr")
    assert sum(map(len, split.gaps)) + sum(len(sentence.text) for sentence in split.sentences) == len(text)


@given(
    text=st.text(alphabet=st.sampled_from("ab AB.?!\n,"), max_size=60),
    words=st.lists(st.text(alphabet="xyz ", max_size=5), min_size=60, max_size=60),
)
def test_joined_translations_have_the_spacing_of_the_text_and_stand_where_it_is_said(
    text: str, words: list[str]
) -> None:
    split = split_sentences(text, "en")
    translations = words[: len(split.sentences)]
    joined, starts = split.join(translations)
    for start, translated in zip(starts, translations, strict=True):
        assert joined[start : start + len(translated)] == translated
    assert len(joined) == sum(map(len, translations)) + sum(map(len, split.gaps))


def test_sentences_that_nothing_separates_get_a_space_where_the_translation_needs_one() -> None:
    split = split_sentences("你好。我很好。", "zh")
    assert split.join(["Hello.", "I am fine."])[0] == "Hello. I am fine."
    assert split.join(["こんにちは。", "元気です。"])[0] == "こんにちは。元気です。"
    assert split_sentences("No space.Here.", "en").join(["A.", "B."])[0] == "A.B."


def test_where_the_library_panics_the_window_is_one_sentence(monkeypatch):
    text = "I\u00a0. And I."
    assert len(split_sentences(text, "en").sentences) == 2
    monkeypatch.setattr(sentences, "_WIDE_SPACE", re.compile("(?!)"))  # so that the library sees what it panics at
    with pytest.raises(BaseException, match="char boundary"):
        sentencex.segment("en", text)
    assert [sentence.text for sentence in split_sentences(text, "en").sentences] == [text]
