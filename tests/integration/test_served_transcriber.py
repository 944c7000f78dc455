"""A model of speech that this project has trained: exported with proof, served, and measured through the server."""

import json
import re

import numpy as np
import pytest
from tiny_transcriber import tones, write_tones, write_wav
from typer.testing import CliRunner

from headway_client import Client
from headway_export.candidate import features_of
from headway_export.errors import SourceError
from headway_export.source import from_checkpoint, from_factory
from headway_server.bundles import Precision, open_bundle
from headway_training.cli import app

from .conftest import serve


@pytest.fixture(scope="module")
def bundle(transcriber_store):
    return open_bundle(transcriber_store / "listener" / "1")


@pytest.fixture(scope="module")
def address(bundle, tmp_path_factory):
    yield from serve(bundle.path.parent.parent, "int8", tmp_path_factory.mktemp("log") / "server.log")


def test_both_precisions_are_judged_by_their_word_error_rate(bundle):
    manifest = bundle.manifest
    assert (manifest.languages.targets, manifest.limits.max_input_tokens) == (("en",), 30)
    assert manifest.audio_preprocessing.window_s == 1.2
    for variant in manifest.variants.values():
        assert (variant.quality.metric, variant.quality.example_count) == ("wer", 12)
        assert variant.quality.value < 10
        assert not variant.quality.higher_is_better
    assert manifest.variants[Precision.FP32].parity.max_relative_logit_error < 1e-4
    assert manifest.variants[Precision.FP32].parity.greedy_mismatch_count == 0
    card = (bundle.path / "README.md").read_text()
    assert "It hears 1.2 seconds of mono audio of 8000 Hz at once." in card
    assert "headway-train evaluate listener" in card


def test_a_server_writes_which_tones_it_hears_of_any_length(address, tmp_path):
    texts = ["low high", "middle", "high low"]
    for text in texts:
        write_wav(tmp_path / f"{text}.wav", tones(text, 44_100, seed=9), 44_100)
    with Client(address) as client:
        results = client.transcribe_speech([(tmp_path / f"{text}.wav").read_bytes() for text in texts]).results
        assert [result.text for result in results] == texts
        assert {result.language for result in results} == {"en"}
        assert client.get_model("listener").model.target_languages == ("en",)


def test_the_served_model_is_measured_as_for_its_card(bundle, address, tmp_path):
    def evaluate(*words):
        result = CliRunner().invoke(app, ["evaluate", "listener", *words, "--server", address, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout.strip().splitlines()[-1])

    table = write_tones(tmp_path, "valid", seed=1)
    report = evaluate("--file", str(table), "--batch-size", "5")
    assert (report["metric"], report["unit"], report["example_count"]) == ("wer", "recordings", 12)
    assert report["value"] == pytest.approx(bundle.manifest.variants[Precision.INT8].quality.value)
    assert report["agrees_with_card"]
    assert evaluate("--file", str(table), "--limit", "2", "--option", "language=en")["example_count"] == 2


def test_recordings_that_the_model_cannot_hear_are_refused(transcriber_checkpoint, tmp_path):
    source = from_checkpoint(transcriber_checkpoint)
    data = source.evaluation
    long = type(data)(
        dataset="long", metric="wer", higher_is_better=False, recordings=[np.zeros(10_000, np.int16)], rate=8000
    )
    with pytest.raises(SourceError, match=re.escape("long: a recording has 1.2 s, and listener hears 1.2 s at once")):
        features_of(source, long, slice(1))
    other = type(data)(
        dataset="other", metric="wer", higher_is_better=False, recordings=[np.zeros(10, np.int16)], rate=16_000
    )
    with pytest.raises(SourceError, match="its recordings have 16000 samples a second, and listener hears 8000"):
        features_of(source, other, slice(1))
    with pytest.raises(SourceError, match="such a model is exported from a checkpoint of the kit"):
        from_factory("nothing:build", tmp_path, task="transcription", name="x")
