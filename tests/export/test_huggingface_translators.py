"""Folders of encoder-decoders: tokenizers made of SentencePiece models, languages, and what is refused."""

import json

import numpy as np
import pytest
import sentencepiece
import tiny_sequences as tiny
import torch
import transformers
from served_sequences import TEXTS, generate
from tokenizers import normalizers
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.huggingface.encoder_decoders import OwnEncoderDecoder, adapt
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.tokenizers import check_tokenizer, convert_pieces, read_pieces, sample_lines
from headway_server.bundles import Languages, Precision, Task

FURTHER = ("Blenderbot", "PLBart", "BigBirdPegasus", "MT5", "UMT5")
"""Families that no test serves."""


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


def test_a_model_that_normalises_nothing_is_read_as_sentencepiece_reads_it(tmp_path):
    file = tmp_path / "source.spm"
    tiny.write_pieces(file, seed=1, normalization_rule_name="identity")
    ids = {piece.piece: index for index, piece in enumerate(read_pieces(file).pieces)}
    tokenizer = convert_pieces(file, ids, unknown="<unk>", end="</s>", special=["<unk>", "<s>", "</s>"])
    original = sentencepiece.SentencePieceProcessor(model_file=str(file))
    lines = ["one\n two \n", *sample_lines(2000, seed=1)]
    check_tokenizer(file, tokenizer, lambda line: [*original.encode(line), 2], lines=lines)


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


@pytest.mark.parametrize("kind", ["Bart", "M2M100", "MBart", "Marian", "Pegasus", "T5", *FURTHER, "Whisper"])
def test_a_reference_answers_alike_of_a_source_and_of_what_its_encoder_makes(kind):
    name = {"Marian": "MarianMTModel"}.get(kind, f"{kind}ForConditionalGeneration")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4} if "T5" in kind else tiny.SIZES
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = getattr(transformers, f"{kind}Config")(**sizes, **ids, vocab_size=90)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager")
    source, name = torch.arange(4, 34)[None], "input_ids"
    if kind == "Whisper":
        source, name = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions), "input_features"
    reference = OwnEncoderDecoder(tiny.widen(model).eval(), source=name)
    asked = source, torch.arange(3, 15)[None], torch.tensor([0, 5, 11])
    with torch.inference_mode():
        logits, weights = reference.target_logits(*asked)
        found, of_memory = reference.target_logits(*asked, reference.encode_source(source))
    torch.testing.assert_close(found, logits, rtol=0, atol=0)
    torch.testing.assert_close(of_memory, weights, rtol=0, atol=0)
    assert found.std() > 0


@pytest.mark.parametrize("kind", FURTHER)
def test_further_families_attend_as_they_do_by_themselves(kind, tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4} if "T5" in kind else tiny.SIZES
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=90)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    folder = ModelFolder(path=tmp_path, task=Task.TEXT_TO_TEXT, config=config, options=FolderOptions())
    adapt(folder, tiny.widen(model).eval(), max_source_length=40, max_target_length=40)  # or else it refuses


def test_a_model_that_hears_is_no_model_of_texts(tmp_path):
    config = transformers.Speech2TextConfig(**tiny.SIZES, vocab_size=90, pad_token_id=0)
    transformers.Speech2TextForConditionalGeneration(config).save_pretrained(tmp_path / "hears")
    refused = refusal(tmp_path / "hears", "--task", "text_to_text")
    assert "speech_to_text does not make texts of texts alone, and is not supported" in refused


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    return tiny.write_nllb(tmp_path_factory.mktemp("many") / "nllb")


def test_a_bundle_may_be_limited_to_a_pair_of_many_languages(nllb):
    options = FolderOptions(languages=Languages(source="eng_Latn", target="fra"))
    languages = from_folder(nllb, options)[0].languages
    assert (languages.sources, languages.targets) == (("eng-Latn",), ("fra-Latn",))
    assert "has no language spa; it has deu-Latn, eng-Latn, fra-Latn" in refusal(nllb, "--languages", "eng-spa")


def test_a_forced_first_token_that_is_a_language_is_the_only_target(tmp_path):
    folder = tiny.write_mbart50(tmp_path / "mbart")
    english = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("en_XX")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forced_bos_token_id": english}))
    languages = from_folder(folder, FolderOptions())[0].languages
    assert (len(languages.sources), languages.targets) == (52, ("en",))


def test_examples_of_a_model_of_many_languages_name_theirs(nllb, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"source": "rain", "target": "Regen"}\n')
    says = "has several languages, and an example names none; it has deu-Latn, eng-Latn, fra-Latn"
    assert says in refusal(nllb, "--evaluation", str(file))
    file.write_text('{"source": "rain", "target": "lluvia", "source_language": "eng", "target_language": "spa"}\n')
    assert "has no language spa; it has" in refusal(nllb, "--evaluation", str(file))


def test_an_example_is_read_with_the_tokens_of_its_languages(nllb, tmp_path):
    rows = [("fra", "eng_Latn"), ("deu", "fra")]
    examples = [{"source": "a b", "target": "c", "source_language": s, "target_language": t} for s, t in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, examples)))
    source, _ = from_folder(nllb, FolderOptions(evaluation_file=tmp_path / "pairs.jsonl"))
    own = transformers.AutoTokenizer.from_pretrained(nllb)
    read = source.encode_sources(source.evaluation.texts, source.evaluation.languages)
    for (ids, start), codes in zip(read, [("fra_Latn", "eng_Latn"), ("deu_Latn", "fra_Latn")], strict=True):
        own.src_lang = codes[0]
        assert ids.tolist() == own("a b").input_ids
        assert start.tolist() == [source.special_tokens.bos, own.convert_tokens_to_ids(codes[1])]


def test_many_languages_are_translated_for_the_proof_as_generate_translates(nllb, tmp_path):
    """The translations that are scored are those that follow the tokens of each example's languages."""
    codes = [("eng_Latn", "deu_Latn"), ("fra_Latn", "eng_Latn"), ("deu_Latn", "fra_Latn")]
    expected = [
        generate(nllb, text, tiny.LENGTH - 1, languages=pair).texts[0] for text, pair in zip(TEXTS, codes, strict=False)
    ]
    rows = [
        {"source": text, "target": shown, "source_language": pair[0], "target_language": pair[1]}
        for text, shown, pair in zip(TEXTS, expected, codes, strict=False)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source, _ = from_folder(nllb, FolderOptions(evaluation_file=tmp_path / "pairs.jsonl"))
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))
    assert bundle.manifest.variants[Precision.FP32].quality.value > 99


@pytest.mark.parametrize("family", ["bart", "t5", "nllb"])
def test_int8_without_evaluation_data_is_held_against_what_fp32_writes(family, tmp_path):
    """Weights at random, of which fp32 is unsure: rounding flips its choices, and is no fault."""
    folder = getattr(tiny, f"write_{family}")(tmp_path / family)
    source, _ = from_folder(folder, FolderOptions())
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32, Precision.INT8)))
    agreed = bundle.manifest.variants[Precision.INT8].agreement
    assert (agreed.dataset, agreed.example_count) == ("generated", 2 * 32 + 1)
    assert agreed.prediction_count > 500
    assert 0 < agreed.figures["mean_kl_divergence"] < agreed.limits["mean_kl_divergence"]
    decoder = bundle.manifest.variants[Precision.INT8].graphs["decoder"]
    assert {tensor.dtype for tensor in decoder.inputs if tensor.name.startswith("past_")} == {"int8"}
