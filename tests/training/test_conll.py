"""Files with labelled words: what is read, where words stand in the text, and that a bad line is named."""

import gzip
from pathlib import Path

import pytest

from headway_training.data.conll import join_words, read_span_labeled_texts
from headway_training.errors import DataError


def conllu(*sentences: tuple[str | None, list[tuple[str, str, str]]]) -> str:
    """Sentences of a text and words of index, form and tag."""
    lines = []
    for text, words in sentences:
        lines += ["# sent_id = x", *([f"# text = {text}"] if text is not None else [])]
        lines += ["\t".join([index, form, "_", tag, *"______"]) for index, form, tag in words]
        lines.append("")
    return "\n".join(lines)


def write(folder: Path, content: str, name: str) -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


def found(file: Path, labels: tuple[str, ...] | None = None) -> list[list[tuple[str, str]]]:
    examples, names = read_span_labeled_texts(file, labels)
    pairs = zip(examples.texts, examples.spans, strict=True)
    return [[(text[span.start : span.end], names[span.label]) for span in spans] for text, spans in pairs]


def test_words_stand_where_the_text_has_them(tmp_path):
    words = [("1", "I", "PRON"), ("2-3", "don't", "_"), ("2", "do", "AUX"), ("3", "n't", "PART"), ("4", "!", "PUNCT")]
    file = write(tmp_path, conllu(("I  don't!", words), ("né", [("1", "né", "ADJ")])), "a.conllu")
    assert found(file) == [[("I", "PRON"), ("do", "AUX"), ("n't", "PART"), ("!", "PUNCT")], [("né", "ADJ")]]
    examples, labels = read_span_labeled_texts(file)
    assert examples.covering
    assert labels == ("ADJ", "AUX", "PART", "PRON", "PUNCT")
    assert [tuple(span)[:2] for span in examples.spans[0]] == [(0, 1), (3, 5), (5, 8), (8, 9)]


def test_a_contraction_that_its_words_do_not_spell_is_one_word(tmp_path):
    words = [("1-2", "du", "_"), ("1", "de", "ADP"), ("2", "le", "DET"), ("3", "pain", "NOUN")]
    assert found(write(tmp_path, conllu(("du pain", words)), "a.conllu")) == [[("du", "ADP"), ("pain", "NOUN")]]


def test_empty_nodes_are_left_out_and_a_missing_text_is_made(tmp_path):
    words = [("1", "go", "VERB"), ("1.1", "gone", "VERB"), ("2", "home", "ADV")]
    file = tmp_path / "a.conllu.gz"
    file.write_bytes(gzip.compress(conllu((None, words)).encode()))
    examples, _ = read_span_labeled_texts(file)
    assert examples.texts == ["go home"]
    assert len(examples.spans[0]) == 2


def test_tags_make_spans_of_words(tmp_path):
    lines = "Empire\tB-place\nState\tI-place\nB-52\tB-x-y\nin\tO\nYork\tI-place\nYork\tB-place\nCity\tI-x-y\n \nno\tO\n"
    assert found(write(tmp_path, lines, "a.conll")) == [
        [("Empire State", "place"), ("B-52", "x-y"), ("York", "place"), ("York", "place"), ("City", "x-y")],
        [],
    ]


def test_words_may_be_set_apart_by_spaces(tmp_path):
    assert found(write(tmp_path, "Ada NNP B-person\nwrote VBD O\n", "a.txt")) == [[("Ada", "person")]]


def test_words_are_joined_as_english_is_written():
    words = ["She", "did", "n't", "(", "at", "3", "%", ")", "say", "'s", "...", "Go", "!", ":)", "$", "5"]
    text, starts = join_words(words)
    assert text == "She didn't (at 3%) say's... Go! :) $5"
    assert [text[start : start + len(word)] for start, word in zip(starts, words, strict=True)] == words


def test_labels_of_the_training_data_hold(tmp_path):
    file = write(tmp_path, "Ada\tB-person\n", "a.conll")
    examples, labels = read_span_labeled_texts(file, ("animal", "person"))
    assert (labels, examples.spans[0][0].label) == (("animal", "person"), 1)
    with pytest.raises(DataError, match=r"the label 'person' is not among those of the model: animal"):
        read_span_labeled_texts(file, ("animal",))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "Ada\tB-person\nwrote\n", r"a\.conll, line 2: expected a word and its tag"),
        ("a.conll", "Ada\tperson\n", "line 1: expected a word and its tag .* found 'Ada"),
        ("a.conll", "\n\n", "holds no labelled words"),
        ("a.conllu", "1\tAda\n", r"a\.conllu, line 1: 2 columns; CoNLL-U has 10"),
        ("a.conllu", conllu(("Adam", [("1", "Eve", "PROPN")])), "line 3: the text goes on with 'Adam', where 'Eve' is"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read_span_labeled_texts(write(tmp_path, content, name))
