"""What is refused of folders whose models read words with their boxes, and what is read of them."""

import pytest
import tiny_pages
import transformers

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (
            {"aggregation": "simple"},
            {},
            "--aggregation simple: labels parts of words.*; give one of average",
        ),
        ({"evaluation_file": "spans.jsonl"}, {}, "--evaluation spans.jsonl: has texts without boxes"),
        ({}, {"max_2d_position_embeddings": 1000}, "have 1000 rows for sides of boxes .* these are from 0 to 1000"),
        ({"task": "text_classification"}, {}, "reads bbox beside tokens, which no call gives for text_classification"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path, options, changes, says):
    folder = tiny_pages.write_model(tmp_path / "layoutlm", "layoutlm", **changes)
    with pytest.raises(SourceError, match=says):
        from_folder(folder, FolderOptions(**options))


def test_a_tokenizer_that_reads_the_first_word_otherwise_is_refused(tmp_path):
    folder = tiny_pages.write_model(tmp_path / "lilt", "lilt")
    tiny_pages.own_tokenizer("lilt", kind=transformers.RobertaTokenizer).save_pretrained(folder)
    with pytest.raises(SourceError, match=r"reads a word otherwise at the beginning of a text \(add_prefix_space is"):
        from_folder(folder, FolderOptions())


def test_boxes_of_special_tokens_are_those_of_the_tokenizer_or_of_the_family(tmp_path):
    folder = tiny_pages.write_model(tmp_path / "lilt", "lilt")
    source, notes = from_folder(folder, FolderOptions())
    assert (source.word_boxes.before, source.word_boxes.after) == ((0,) * 4, (0,) * 4)
    assert any("as its tokenizer says" in note for note in notes)
    tiny_pages.own_tokenizer("lilt", sep_token_box=[1000] * 4).save_pretrained(folder)
    source, _ = from_folder(folder, FolderOptions())
    assert source.word_boxes.after == (1000,) * 4
    tiny_pages.own_tokenizer("lilt", kind=transformers.RobertaTokenizer, add_prefix_space=True).save_pretrained(folder)
    source, notes = from_folder(folder, FolderOptions())
    assert source.word_boxes.after == (0,) * 4
    assert any("as lilt was trained with first" in note for note in notes)
