"""Moonshine and Speech2Text, exported by one command and served, against `generate` of `transformers`."""

import socket

import httpx2
import numpy as np
import pytest
import tiny_speech
import tiny_transcribers as tiny
import torch
import transformers
from served_sequences import export

from headway_client import Client, InvalidArgumentError
from headway_export import huggingface

from .conftest import serve

pytest.importorskip("soundfile")

RATE = 16_000
SECONDS = (2.0, 1.31, 0.7, 1.31)
FAMILIES = ("moonshine", "speech-to-text")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("transcribers")
    return {family: tiny.write_transcriber(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"), "--precision", "fp32")
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def audios():
    return [tiny_speech.wav(tiny_speech.sound(seconds, seed)) for seed, seconds in enumerate(SECONDS)]


class Own:
    """A folder as `transformers` runs it."""

    def __init__(self, folder):
        options = {"attn_implementation": "eager"}
        self.model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder, **options).eval()
        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(self, samples, **options):
        heard = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            found = self.model.generate(**heard, **options)
        special = set(self.tokenizer.all_special_ids)
        return [[token for token in row if token not in special] for row in found.tolist()]

    def texts(self, samples, **options):
        return [self.tokenizer.decode(row).strip() for row in self.tokens(samples, **options)]


@pytest.fixture(scope="module", params=FAMILIES)
def own(request, folders):
    return request.param, Own(folders[request.param])


def test_transcripts_alone_together_and_streamed_are_those_of_generate(own, client, audios):
    family, reference = own
    together = client.transcribe_speech(audios, model=family).results
    for data, result in zip(audios, together, strict=True):
        [expected] = reference.texts(tiny_speech.heard(data))
        assert result.text == expected
        [alone] = client.transcribe_speech(data, model=family).results
        assert (alone.text, alone.log_probability) == (result.text, pytest.approx(result.log_probability, rel=1e-4))
        with client.stream_transcribe_speech(data, model=family) as stream:
            assert "".join(part.text for part in stream) == expected
    assert len({result.text for result in together}) > 1


def test_the_best_of_a_beam_search_are_those_of_generate(own, client, audios):
    family, reference = own
    options = {"beam_size": 3, "hypothesis_count": 3}
    results = client.transcribe_speech(audios[:2], model=family, **options).results
    for data, result in zip(audios, results, strict=False):
        texts = reference.texts(tiny_speech.heard(data), num_beams=3, num_return_sequences=3)
        assert [one.text for one in result.hypotheses] == texts


def test_long_audio_is_read_in_windows_and_the_rest_by_itself(folders, client):
    reference, window = Own(folders["speech-to-text"]), 399 * 160 + 400
    data = tiny_speech.wav(tiny_speech.sound(9.0, 7))
    samples = tiny_speech.heard(data)
    parts = [samples[start : start + window] for start in range(0, len(samples), window)]
    [result] = client.transcribe_speech(data, model="speech-to-text").results
    assert result.window_count == len(parts) == 3
    expected = reference.tokenizer.decode([token for part in parts for token in reference.tokens(part)[0]])
    assert result.text == expected
    with client.stream_transcribe_speech(data, model="speech-to-text") as stream:
        assert "".join(part.text for part in stream) == expected


def test_silence_and_the_shortest_audio_are_read(own, client):
    family, _ = own
    silent = [np.zeros(size, np.float32) for size in (1, 800, RATE)]
    results = client.transcribe_speech(list(map(tiny_speech.wav, silent)), model=family).results
    assert all(np.isfinite(result.log_probability) for result in results)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"language": "en"}, "language"), ({"prompt": "hello"}, "prompt"), ({"include_timestamps": True}, "include_time")],
)
def test_what_the_model_has_not_is_refused_by_name(client, audios, options, field):
    with pytest.raises(InvalidArgumentError, match=field):
        client.transcribe_speech(audios[0], model="moonshine", **options)


def test_speecht5_is_what_transformers_computes(tmp_path):
    """Its logits are compared as it is read; its graphs are not exported here."""
    folder = tiny.write_transcriber(tmp_path / "speecht5", "speecht5")
    source, _ = huggingface.from_folder(folder, huggingface.FolderOptions())
    assert source.limits.max_total_tokens == tiny.LENGTH
    assert source.sound.window_samples == 30 * RATE


def test_the_api_of_openai_gives_the_same_text(own, client, audios):
    family, _ = own
    [expected] = client.transcribe_speech(audios[0], model=family).results
    url = f"http://127.0.0.1:{HTTP_PORT}/v1/audio/transcriptions"
    answer = httpx2.post(url, data={"model": family}, files={"file": ("said.wav", audios[0])}, timeout=60)
    assert answer.json()["text"] == expected.text
