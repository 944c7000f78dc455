"""Classifiers of audio, exported by one command and served, against the pipeline of `transformers`."""

import io

import numpy as np
import pytest
import tiny_bundles
import tiny_sounds
import transformers
from served_sequences import export
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_export.cli import app
from headway_export.synthetic import draw_speech

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

RATE = 16_000
LENGTHS = (16_000, 23_456, 16_000, 9_000)
SEVERAL = "several"
SERVED = {"ast": {}, "wav2vec2": {}, SEVERAL: {"problem_type": "multi_label_classification"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    return {
        name: tiny_sounds.write_classifier(root / name, "ast" if name == SEVERAL else name, **changes)
        for name, changes in SERVED.items()
    }


@pytest.fixture(scope="module")
def client(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"), "--precision", "fp32")
    tiny_bundles.write_loudness_bundle(store)
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def speech(length, seed=0):
    return draw_speech(1, RATE, length, np.random.default_rng(seed))[0].astype(np.float32)


def wav(samples):
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def probabilities(result):
    return [one.probability for one in result.labels]


@pytest.mark.parametrize("name", SERVED)
def test_labels_are_those_of_the_pipeline_alone_and_together(folders, client, name):
    sounds = [speech(length, seed) for seed, length in enumerate(LENGTHS)]
    pipeline = transformers.pipeline("audio-classification", model=str(folders[name]))
    results = client.classify_audio(list(map(wav, sounds)), model=name).results
    for samples, result in zip(sounds, results, strict=True):
        expected = pipeline(samples.copy(), top_k=5)
        assert [one.label for one in result.labels] == [one["label"] for one in expected]
        assert probabilities(result) == pytest.approx([one["score"] for one in expected], abs=1e-5)
        assert result.duration_seconds == pytest.approx(len(samples) / RATE)
        [alone] = client.classify_audio([wav(samples)], model=name, top_k=2).results
        assert [one.label for one in alone.labels] == [one.label for one in result.labels[:2]]
        assert probabilities(alone) == pytest.approx(probabilities(result)[:2], abs=1e-6)
    assert len({result.labels[0].probability for result in results}) == len(results)


def test_long_audio_is_cut_where_that_is_asked_for_or_the_model_does(folders, client):
    long = wav(tiny_bundles.letters("B" * 20 + "_" * 20))
    with pytest.raises(InvalidArgumentError, match=r"audios\[0\]:? has 4.0 seconds, and loudness reads 2; cut it"):
        client.classify_audio([long], model="loudness")
    [result] = client.classify_audio([long], model="loudness", truncate=True).results
    assert (result.labels[0].label, result.labels[0].selected, result.truncated) == ("loud", True, True)
    [short] = client.classify_audio([wav(tiny_bundles.letters("_" * 9))], model="loudness").results
    assert (short.labels[0].label, short.truncated) == ("quiet", False)
    samples = speech(4 * RATE, 3)  # of 64 frames, as `transformers` cuts it
    [cut] = client.classify_audio([wav(samples)], model="ast").results
    expected = transformers.pipeline("audio-classification", model=str(folders["ast"]))(samples.copy(), top_k=5)
    assert probabilities(cut) == pytest.approx([one["score"] for one in expected], abs=1e-5)
    assert cut.truncated


def test_what_is_no_audio_or_no_number_of_labels_is_refused(client):
    with pytest.raises(InvalidArgumentError, match="is not audio of a supported format"):
        client.classify_audio([b"no audio"], model="loudness")
    with pytest.raises(InvalidArgumentError, match="top_k"):
        client.classify_audio([wav(speech(900))], model="loudness", top_k=4)


def test_a_regression_is_refused_in_a_sentence(tmp_path):
    folder = tiny_sounds.write_classifier(tmp_path / "numbers", "wav2vec2", problem_type="regression")
    ended = CliRunner().invoke(app, ["hf", str(folder), "--store", str(tmp_path / "store")])
    assert ended.exit_code == 2
    assert "gives numbers in place of labels" in ended.output
    assert not (tmp_path / "store" / "numbers").exists()
