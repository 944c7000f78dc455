"""Folders of encoder-decoders: tokenizers made of SentencePiece models, and what is refused in a sentence."""

import json

import numpy as np
import pytest
import sentencepiece
import tiny_sequences as tiny
from tokenizers import normalizers
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.huggingface.tokenizers import check_tokenizer, convert_pieces, read_pieces, sample_lines


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def pieces(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("pieces") / "source.spm"
    tiny.write_pieces(file, seed=1, model_type=request.param)
    return file


@pytest.fixture(scope="module")
def converted(pieces):
    ids = {piece.piece: index for index, piece in enumerate(read_pieces(pieces).pieces)}
    return convert_pieces(pieces, ids, unknown="<unk>", end="</s>", special=["<unk>", "<s>", "</s>"])


def test_a_converted_tokenizer_reads_as_sentencepiece_does(pieces, converted):
    original = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    for seed in (1, 2):
        lines = list(sample_lines(5000, seed=seed))
        check_tokenizer(pieces, converted, lambda line: [*original.encode(line), 2], lines=lines)


def test_the_librarys_own_normalisation_would_drop_combining_marks(pieces, converted):
    table = bytes(read_pieces(pieces).normalizer_spec.precompiled_charsmap)
    text = "\u2460\u0301"  # a digit in a circle, with an accent
    assert normalizers.Precompiled(table).normalize_str(text) == "1"
    assert converted.normalizer.normalize_str(text) == "▁1\u0301"


def test_a_difference_is_refused_with_the_text(pieces, converted):
    with pytest.raises(SourceError, match=r"reads 'gr\\xfc\\xdfe' otherwise than the folder's own: from token 0 on"):
        check_tokenizer(pieces, converted, lambda _line: [0], lines=["grüße"])


def test_lines_are_of_many_scripts_and_the_same_for_a_seed():
    lines = list(sample_lines(2000, seed=3, pieces=["</s>"]))
    assert lines == list(sample_lines(2000, seed=3, pieces=["</s>"]))
    characters = set("".join(lines))
    assert len(characters) > 10_000
    assert sum("</s>" in line for line in lines) > 100
    assert np.mean([any("\u0300" <= c <= "\u036f" for c in line) for line in lines]) > 0.2


def refusal(folder, *flags):
    """Returns the sentence that a folder is refused with."""
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(folder.parent / "store"), *flags])
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output.strip()


@pytest.fixture
def marian(tmp_path):
    return tiny.write_marian(tmp_path / "model")


def test_languages_that_cannot_be_told_are_asked_for(marian):
    (marian / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    assert "its languages cannot be told; give them with --languages, such as en-de" in refusal(marian)


def test_a_marian_model_without_its_sentencepiece_model_is_refused(marian):
    (marian / "source.spm").unlink()
    assert "has no tokenizer; a Marian model needs source.spm and vocab.json" in refusal(marian)


def test_a_piece_without_an_id_is_refused(marian):
    ids = json.loads((marian / "vocab.json").read_text())
    ids["<other>"] = ids.pop("▁the")
    (marian / "vocab.json").write_text(json.dumps(ids))
    assert "1 of its pieces have no id in the vocabulary ('▁the' is the first)" in refusal(marian)


def test_an_encoder_decoder_is_not_exported_for_another_task(marian):
    assert "is an encoder-decoder (marian), and is not exported for generation" in refusal(
        marian, "--task", "generation"
    )
