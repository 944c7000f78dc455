"""Encoder-decoders of `transformers`, exported by one command and served, against its `generate`."""

import warnings

import pytest
import tiny_sequences as tiny
import transformers
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app

from .conftest import serve

TEXTS = [
    "the old fire",
    "rain",
    "an answer is not in the rain, the big house",
    "der Mann, über die école été!",
    "a red bicycle and the dog's small 你好 house in the rain " * 2,
]
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("translators")
    return {"marian": tiny.write_marian(root / "marian")}


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(path)])
        assert result.exit_code == 0, f"{name}: {result.output}"
    return path


@pytest.fixture(scope="module")
def client(store, tmp_path_factory):
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def generate(folder, text, *, tokenizer=None, **options):
    """Returns what `generate` writes, and the number of its new tokens."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Marian's recommends a library that it does not use here
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(text, return_tensors="pt")
    settings = {"max_new_tokens": NEW_TOKENS, "forced_eos_token_id": None, "num_beams": 1, **options}
    ids = model.generate(**encoded, do_sample=False, **settings)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    ends = [int((row == model.generation_config.eos_token_id).int().argmax()) or NEW_TOKENS for row in ids[:, 1:]]
    return texts, encoded.input_ids.shape[1], ends


def test_greedy_translations_are_those_of_generate(folders, client):
    results = client.translate_text(TEXTS, model="marian", max_new_tokens=NEW_TOKENS).results
    for text, result in zip(TEXTS, results, strict=True):
        (expected,), source_length, _ = generate(folders["marian"], text)
        assert result.text.strip() == expected.strip()
        assert result.source_token_count == source_length


@pytest.mark.parametrize("length_penalty", [1.0, 0.6])
def test_translations_of_a_beam_search_are_those_of_generate(folders, client, length_penalty):
    options = {"beam_size": 4, "hypothesis_count": 3, "length_penalty": length_penalty}
    results = client.translate_text(TEXTS, model="marian", max_new_tokens=NEW_TOKENS, **options).results
    for text, result in zip(TEXTS, results, strict=True):
        expected, _, _ = generate(
            folders["marian"], text, num_beams=4, num_return_sequences=3, length_penalty=length_penalty
        )
        assert [hypothesis.text.strip() for hypothesis in result.hypotheses] == [one.strip() for one in expected]


def test_the_languages_are_those_of_the_folder(client):
    (model,) = [model for model in client.list_models().models if model.name == "marian"]
    assert (model.source_language, model.target_language) == ("en", "de")
