"""Encoder-decoders of `transformers`, exported by one command and served, against its `generate`."""

import shutil

import pytest
import tiny_sequences as tiny
from served_sequences import TEXTS, export, find_best, generate, shown

from headway_client import Client, InvalidArgumentError

from .conftest import serve

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folders(nllb, tmp_path_factory):
    root = tmp_path_factory.mktemp("translators")
    return {
        "marian": tiny.write_marian(root / "marian"),
        "marian-many": tiny.write_marian(root / "marian-many", marks=(">>de<<", ">>fra<<")),
        "m2m": tiny.write_m2m(root / "m2m"),
        "nllb": nllb / "model",
        "mbart50": tiny.write_mbart50(root / "mbart50"),
    }


@pytest.fixture(scope="module")
def client(folders, nllb, tmp_path_factory):
    others = {name: folder for name, folder in folders.items() if name != "nllb"}
    store = export(others, tmp_path_factory.mktemp("store"))
    shutil.copytree(nllb / "store", store, dirs_exist_ok=True)
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def test_greedy_translations_are_those_of_generate(folders, client):
    results = client.translate_text(TEXTS, model="marian", max_new_tokens=NEW_TOKENS).results
    for text, result in zip(TEXTS, results, strict=True):
        expected = generate(folders["marian"], text, NEW_TOKENS)
        assert shown(result.text) == expected.texts[0]
        assert result.source_token_count == expected.source_length


@pytest.mark.parametrize("length_penalty", [1.0, 0.6])
def test_translations_of_a_beam_search_are_those_of_generate(folders, client, length_penalty):
    options = {"beam_size": 4, "hypothesis_count": 3, "length_penalty": length_penalty}
    results = client.translate_text(TEXTS, model="marian", max_new_tokens=NEW_TOKENS, **options).results
    for text, result in zip(TEXTS, results, strict=True):
        expected = find_best(folders["marian"], text, NEW_TOKENS, 3, length_penalty=length_penalty)
        assert [shown(one.text) for one in result.hypotheses] == expected


def test_the_languages_are_those_of_the_folder(client):
    (model,) = [model for model in client.list_models().models if model.name == "marian"]
    assert (model.source_language, model.target_language) == ("en", "de")


MANY = {
    "m2m": [("en", "de"), ("fr", "zh")],
    "nllb": [("eng_Latn", "deu_Latn"), ("fra_Latn", "eng_Latn")],
    "mbart50": [("en_XX", "de_DE"), ("de_DE", "fr_XX")],
}
"""Languages as the folders' tokenizers name them."""


def code(language):
    """Returns a language as the bundle names it."""
    return language.removesuffix("_XX").replace("_", "-")


@pytest.mark.parametrize(("family", "pair"), [(family, pair) for family, pairs in MANY.items() for pair in pairs])
def test_a_model_of_many_languages_translates_as_generate_does(folders, client, family, pair):
    named = {"model": family, "source_language": code(pair[0]), "target_language": code(pair[1])}
    greedy = client.translate_text(TEXTS, max_new_tokens=NEW_TOKENS, **named).results
    searched = client.translate_text(
        TEXTS, max_new_tokens=NEW_TOKENS, beam_size=4, hypothesis_count=3, length_penalty=0.6, **named
    ).results
    for text, one, several in zip(TEXTS, greedy, searched, strict=True):
        expected = generate(folders[family], text, NEW_TOKENS, languages=pair)
        assert shown(one.text) == expected.texts[0]
        assert one.source_token_count == expected.source_length
        best = find_best(folders[family], text, NEW_TOKENS, 3, languages=pair, length_penalty=0.6)
        assert [shown(each.text) for each in several.hypotheses] == best


@pytest.mark.parametrize("target", ["de", "fra"])
def test_a_marian_model_of_several_targets_is_told_which(folders, client, target):
    results = client.translate_text(TEXTS, model="marian-many", target_language=target, max_new_tokens=NEW_TOKENS)
    for text, result in zip(TEXTS, results, strict=True):
        expected = generate(folders["marian-many"], f">>{target}<< {text}", NEW_TOKENS)
        assert shown(result.text) == expected.texts[0]
        assert result.source_token_count == expected.source_length


def test_a_model_lists_its_languages(client):
    models = {model.name: model for model in client.list_models()}
    assert (models["marian"].source_languages, models["marian"].target_languages) == (("en",), ("de",))
    assert models["marian-many"].target_languages == ("de", "fra")
    assert (models["m2m"].source_language, len(models["m2m"].source_languages)) == ("", 100)
    assert models["nllb"].target_languages == ("deu-Latn", "eng-Latn", "fra-Latn")


def test_languages_that_are_missing_or_unknown_are_asked_for(client):
    for options, words in (
        ({"target_language": "eng-Latn"}, r"source_language: is empty; nllb has 3 languages, name one: deu-Latn, "),
        ({"source_language": "eng"}, "target_language: is empty; nllb has 3 languages"),
        (
            {"source_language": "eng", "target_language": "xx"},
            r"target_language: is 'xx', .* nllb \(deu-Latn, eng-Latn, fra-Latn to deu-",
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            client.translate_text("rain", model="nllb", **options)


def test_a_translation_from_one_of_many_languages_is_streamed(client):
    options = {"model": "nllb", "source_language": "ENG_Latn", "target_language": "fra", "max_new_tokens": NEW_TOKENS}
    expected = client.translate_text(TEXTS[2], **options)[0]
    with client.stream_translate_text(TEXTS[2], **options) as stream:
        assert "".join(delta.text for delta in stream) == expected.text
        assert stream.answer[0] == expected
