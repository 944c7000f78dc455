"""VITS, exported by one command and served, against the samples of `transformers` for the same noise."""

import io
import json
import socket

import httpx2
import numpy as np
import pytest
import tiny_voices
import torch
import transformers
from served_sequences import export
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_export.cli import app
from headway_server.transports.http.openai.requests import SpeechBody

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

TEXTS = ["The knock, knock of a Kiosk!", "a", "the cook's book - like a thick black brick " * 6, "kk"]
SPEAKERS = {"num_speakers": 3, "speaker_embedding_size": 6}
ROUNDING = 1 / 32_768
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_voices.write_vits(tmp_path_factory.mktemp("voices") / "vits", **SPEAKERS)


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    store = export({"vits": folder}, tmp_path_factory.mktemp("store"))
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def own(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.VitsModel.from_pretrained(folder).eval(), tokenizer


def spoken_by(own, text, *, seed, speaker=0, rate=1.0, monkeypatch):
    """The samples of `transformers`, whose noise is the server's of a seed."""
    model, tokenizer = own
    ids, random = tokenizer(text, return_tensors="pt").input_ids, np.random.Generator(np.random.Philox(seed))

    def of_durations(*_):
        return torch.from_numpy(random.standard_normal((1, 2, ids.shape[1]), np.float32))

    def of_frames(like):
        noise = random.standard_normal((like.shape[2], like.shape[1]), np.float32)
        return torch.from_numpy(noise.T[np.newaxis].copy())

    with monkeypatch.context() as patched, torch.inference_mode():
        patched.setattr(torch, "randn", of_durations)
        patched.setattr(torch, "randn_like", of_frames)
        return model(ids, speaker_id=speaker, speaking_rate=rate).waveform[0].numpy()


def samples_of(spoken):
    return soundfile.read(io.BytesIO(spoken.audio), dtype="float32")[0]


@pytest.mark.parametrize(("voice", "rate"), [("", None), ("2", 0.7)])
def test_samples_are_those_of_transformers_alone_together_and_streamed(own, client, monkeypatch, voice, rate):
    options = {"model": "vits", "voice": voice, "seed": 7, "speaking_rate": rate}
    together = client.synthesize_speech(TEXTS, **options).results
    asked = {"seed": 7, "speaker": int(voice or 0), "rate": rate or 1.0, "monkeypatch": monkeypatch}
    for text, spoken in zip(TEXTS, together, strict=True):
        expected, found = spoken_by(own, text, **asked), samples_of(spoken)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-4 + ROUNDING)
        assert spoken.seed == 7
        assert spoken.new_token_count * 8 == len(found) == round(spoken.duration_seconds * spoken.sampling_rate)
        [alone] = client.synthesize_speech(text, **options).results
        assert alone.audio == spoken.audio
        with client.stream_synthesize_speech(text, **options) as stream:
            pcm = b"".join(part.pcm for part in stream)
        assert spoken.audio.endswith(pcm)
        assert len(pcm) == 2 * len(found)
    longest = max(together, key=lambda one: one.new_token_count)
    assert longest.new_token_count > 2 * 512  # in several windows
    assert np.abs(samples_of(longest)).max() < 1.0


def test_another_seed_or_voice_speaks_otherwise(client):
    spoken = [
        client.synthesize_speech("like a book", model="vits", **options).results[0].audio
        for options in ({"seed": 1}, {"seed": 2}, {"seed": 1, "voice": "1"}, {"seed": 1})
    ]
    assert spoken[0] == spoken[3]
    assert len(set(spoken)) == 3


def test_speech_is_cut_at_the_asked_length(client):
    options = {"model": "vits", "seed": 3}
    [whole] = client.synthesize_speech(TEXTS[2], **options).results
    [cut] = client.synthesize_speech(TEXTS[2], max_duration_seconds=0.1, **options).results
    assert cut.finish_reason == "length"
    assert whole.finish_reason != "length"
    np.testing.assert_array_equal(samples_of(cut)[:1000], samples_of(whole)[:1000])
    assert len(samples_of(cut)) == 1600


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("a", {"temperature": 0.5}, "sampling.temperature.*draws no codes"),
        ("a", {"speaking_rate": 9.0}, "speaking_rate.*0.25 to 4"),
        ("a", {"voice": "7"}, "voice.*0, 1, 2"),
        ("a" * 1_100, {}, "texts.*1100 tokens"),
        ("!?", {}, "texts.*has no text"),
        ("a", {"max_duration_seconds": 1e6}, "max_duration_seconds"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, text, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        client.synthesize_speech(text, model="vits", **options)


def test_the_api_of_openai_speaks_at_a_speed(client):
    [expected] = client.synthesize_speech("like a book", model="vits", seed=5, speaking_rate=2.0).results
    body = {"model": "vits", "input": "like a book", "speed": 2, "seed": 5, "response_format": "wav"}
    answer = httpx2.post(f"http://127.0.0.1:{HTTP_PORT}/v1/audio/speech", json=body, timeout=60)
    assert answer.content == expected.audio


@pytest.mark.parametrize(("voices", "voice"), [((), ""), (("0", "1"), "alloy")])
def test_a_voice_that_clients_of_openai_always_name_is_ignored_where_voices_have_no_names(voices, voice):
    body = SpeechBody.read(b'{"model": "vits", "input": "like a book", "voice": "alloy"}')
    assert body.request(voices).voice == voice


def refusal_of(folder, store, *flags):
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), *flags])
    assert result.exit_code == 2, result.output
    assert not any(store.glob("*/*"))
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"is_uroman": True}, (), "uroman"),
        ({"normalize": False}, (), "does not normalize texts"),
        ({}, ("--precision", "int8"), "in fp32 alone"),
    ],
)
def test_what_cannot_be_exported_is_refused(folder, tmp_path, changes, flags, words):
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in folder.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    settings = json.loads((changed / "tokenizer_config.json").read_text())
    (changed / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    assert words in refusal_of(changed, tmp_path / "store", *flags)
