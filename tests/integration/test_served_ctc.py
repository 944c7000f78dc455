"""Transcribers without a decoder, exported by one command and served, against `transformers` itself."""

import io
import socket

import httpx2
import numpy as np
import pytest
import tiny_bundles
import tiny_sounds
import torch
import transformers
from served_sequences import export

from headway_client import Client, InvalidArgumentError
from headway_export.synthetic import draw_speech

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

RATE = 16_000
SERVED = ("wav2vec2", "wav2vec2-bert", "parakeet")
LENGTHS = (16_000, 23_456, 48_000, 16_000, 300)
LONG = 52 * RATE + 1_234
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("transcribers")
    return {family: tiny_sounds.write_ctc(root / family, family) for family in SERVED}


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"), "--precision", "fp32")
    tiny_bundles.write_letter_bundle(store)
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def sounds():
    """Sounds of several lengths, two of them of one, and one shorter than some models read."""
    return [speech(length, seed) for seed, length in enumerate(LENGTHS)]


def speech(length, seed=0):
    return draw_speech(1, RATE, length, np.random.default_rng(seed))[0].astype(np.float32)


def wav(samples):
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


class Own:
    """A folder as `transformers` runs it."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCTC.from_pretrained(folder).eval()
        self.extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def text(self, samples):
        inputs = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            ids = self.model(**inputs).logits[0].argmax(-1)
        if self.tokenizer.pad_token != "<pad>":  # Parakeet, whose frames behind the end are blanks
            ids = self.model.generate(**inputs)[0]
        elif "input_features" in inputs:  # a frame that is half padding is masked
            ids = ids[: int(inputs["attention_mask"].sum())]
        return self.tokenizer.decode(ids).strip()

    def chunks(self, samples):
        """The text and the words with their times of a long sound, by the pipeline."""
        pipeline = transformers.pipeline(
            "automatic-speech-recognition",
            model=self.model,
            feature_extractor=self.extractor,
            tokenizer=self.tokenizer,
        )
        return pipeline(samples.copy(), chunk_length_s=30, return_timestamps="word")


@pytest.mark.parametrize("family", SERVED)
def test_texts_are_those_of_transformers_alone_and_together(folders, client, sounds, family):
    own = Own(folders[family])
    together = client.transcribe_speech(list(map(wav, sounds)), model=family).results
    for samples, result in zip(sounds, together, strict=True):
        if len(samples) > 1_000:  # less is filled with silence here, and refused there
            assert result.text == own.text(samples)
        assert result.duration_seconds == pytest.approx(len(samples) / RATE)
        [alone] = client.transcribe_speech([wav(samples)], model=family).results
        assert (alone.text, alone.log_probability) == (result.text, pytest.approx(result.log_probability, rel=1e-4))
    assert len({result.text for result in together}) > 2


def test_a_long_recording_has_the_text_and_the_words_of_the_pipeline(folders, client):
    samples = speech(LONG, 9)
    expected = Own(folders["wav2vec2"]).chunks(samples)
    [result] = client.transcribe_speech([wav(samples)], model="wav2vec2", include_timestamps=True).results
    assert (result.text, result.window_count) == (expected["text"], 3)
    words = [word for segment in result.segments for word in segment.words]
    assert [word.text for word in words] == [one["text"] for one in expected["chunks"]]
    found = [(word.start_seconds, word.end_seconds) for word in words]
    np.testing.assert_allclose(found, [one["timestamp"] for one in expected["chunks"]], atol=1e-6)
    for segment in result.segments:
        assert segment.text == "".join(f" {word.text}" for word in segment.words)
        assert segment.start_seconds == segment.words[0].start_seconds
        assert segment.end_seconds == segment.words[-1].end_seconds
    with client.stream_transcribe_speech(wav(samples), model="wav2vec2", include_timestamps=True) as stream:
        parts = list(stream)
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == result.text
    assert tuple(segment for part in parts for segment in part.segments) == result.segments


def test_words_and_segments_have_the_times_of_their_frames(client):
    heard = wav(tiny_bundles.letters("AAB_B  A_______BA"))
    [result] = client.transcribe_speech([heard], model="letters", include_timestamps=True).results
    assert result.text == "ABB  ABA".replace("  ", " ")
    spans = [
        [(word.text, round(word.start_seconds, 3), round(word.end_seconds, 3)) for word in segment.words]
        for segment in result.segments
    ]
    assert spans == [[("ABB", 0.0, 0.5), ("ABA", 0.7, 1.7)]]
    pause = wav(tiny_bundles.letters("A ______ B"))
    [result] = client.transcribe_speech([pause], model="letters", include_timestamps=True).results
    assert [segment.text for segment in result.segments] == [" A", " B"]
    [nothing] = client.transcribe_speech([wav(np.zeros(99, np.float32))], model="letters").results
    assert (nothing.text, nothing.new_token_count) == ("", 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beam_size": 2}, "parameters.beam_size"),
        ({"temperature": 0.5}, "parameters.sampling.temperature"),
        ({"min_new_tokens": 4}, "parameters.min_new_tokens"),
        ({"no_repeat_ngram_size": 2}, "parameters.no_repeat_ngram_size"),
        ({"language": "de"}, "language"),
        ({"task": "translate"}, "task"),
        ({"prompt": "names"}, "prompt"),
        ({"condition_on_previous": True}, "condition_on_previous"),
    ],
)
def test_what_would_change_a_text_is_refused_by_name(client, options, field):
    with pytest.raises(InvalidArgumentError, match=rf"{field}:? is .*; "):
        client.transcribe_speech([wav(speech(RATE))], model="letters", **options)


def test_what_changes_nothing_is_accepted(client):
    harmless = {"beam_size": 1, "temperature": 0.0, "seed": 7, "top_p": 0.9, "task": "transcribe"}
    data = wav(tiny_bundles.letters("A_A"))
    assert client.transcribe_speech([data], model="letters", **harmless).results[0].text == "AA"
    [cut] = client.transcribe_speech([data], model="letters", max_new_tokens=1).results
    assert (cut.text, cut.finish_reason) == ("A", "length")


def test_openais_api_gives_words_on_request(address):
    url = f"http://127.0.0.1:{HTTP_PORT}/v1/audio/transcriptions"

    def post(**fields):
        files = {"file": ("a.wav", wav(tiny_bundles.letters("A BB")))}
        return httpx2.post(url, data={"model": "letters", **fields}, files=files)

    verbose = post(response_format="verbose_json", temperature="0").json()
    assert (verbose["text"], "words" in verbose) == ("A B", False)
    assert [(one["start"], one["end"], one["text"]) for one in verbose["segments"]] == [(0.0, 0.4, " A B")]
    units = {"timestamp_granularities[]": ["word", "segment"]}
    assert post(response_format="verbose_json", **units).json()["words"] == [
        {"word": "A", "start": 0.0, "end": 0.1},
        {"word": "B", "start": 0.2, "end": 0.4},
    ]
    assert post(response_format="srt").text.splitlines()[1:3] == ["00:00:00,000 --> 00:00:00,400", "A B"]
    assert post(**units).json()["error"]["param"] == "timestamp_granularities[]"
    assert post(temperature="0.5").json()["error"]["param"] == "temperature"
