"""Encoder-decoders that make texts of texts, exported by one command and served, against `generate`."""

import pytest
import tiny_sequences as tiny
from served_sequences import TEXTS, export, find_best, generate, shown

from headway_client import Client

from .conftest import serve

NEW_TOKENS = 20
FAMILIES = ("bart", "pegasus", "t5", "flan-t5")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("rewriters")
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {
        "bart": tiny.write_bart(root / "bart"),
        "pegasus": tiny.write_pegasus(root / "pegasus"),
        "t5": tiny.write_t5(root / "t5"),
        "flan-t5": tiny.write_t5(root / "flan-t5", **gated),
        "led": tiny.write_led(root / "led"),
        "mvp": tiny.write_bart(root / "mvp", "Mvp"),
    }


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"))
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


@pytest.mark.parametrize("family", [*FAMILIES, "led", "mvp"])
def test_greedy_texts_are_those_of_generate(folders, client, family):
    results = client.rewrite_text(TEXTS, model=family, max_new_tokens=NEW_TOKENS).results
    for text, result in zip(TEXTS, results, strict=True):
        expected = generate(folders[family], text, NEW_TOKENS)
        assert shown(result.text) == expected.texts[0]
        assert result.source_token_count == expected.source_length


@pytest.mark.parametrize("length_penalty", [1.0, 0.4])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_a_beam_search_are_those_of_generate(folders, client, family, length_penalty):
    options = {"beam_size": 4, "hypothesis_count": 3, "length_penalty": length_penalty}
    results = client.rewrite_text(TEXTS, model=family, max_new_tokens=NEW_TOKENS, **options).results
    for text, result in zip(TEXTS, results, strict=True):
        expected = find_best(folders[family], text, NEW_TOKENS, 3, length_penalty=length_penalty)
        assert [shown(one.text) for one in result.hypotheses] == expected


@pytest.mark.parametrize("beam_size", [1, 3])
def test_texts_that_must_be_long_and_without_repetition_are_those_of_generate(folders, client, beam_size):
    options = {"beam_size": beam_size, "min_new_tokens": 12, "no_repeat_ngram_size": 3}
    results = client.rewrite_text(TEXTS, model="t5", max_new_tokens=NEW_TOKENS, **options).results
    for text, result in zip(TEXTS, results, strict=True):
        expected = generate(
            folders["t5"], text, NEW_TOKENS, num_beams=beam_size, min_new_tokens=12, no_repeat_ngram_size=3
        )
        assert shown(result.text) == expected.texts[0]
        assert result.new_token_count > 12 or result.finish_reason == "length"


def test_a_streamed_text_is_that_of_the_unary_call(client):
    expected = client.rewrite_text(TEXTS[2], model="t5", max_new_tokens=NEW_TOKENS)[0]
    with client.stream_rewrite_text(TEXTS[2], model="t5", max_new_tokens=NEW_TOKENS) as stream:
        assert "".join(delta.text for delta in stream) == expected.text
        assert stream.answer[0] == expected
