"""Whisper, exported by one command and served, against `generate` of `transformers`, and audio that is hostile."""

import asyncio
import io
import socket
import struct
from functools import cache

import grpc
import httpx2
import numpy as np
import pytest
import tiny_speech as tiny
import torch
import transformers
from rpc_failures import failure_of
from served_sequences import export
from typer.testing import CliRunner

from headway.v1 import speech_service_pb2 as pb
from headway.v1 import speech_service_pb2_grpc as pb_grpc
from headway_client import AsyncClient, Client, InvalidArgumentError
from headway_client.cli import app

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

LONG = tiny.wav(tiny.sound(5.3, seed=5))
WHOLE = tiny.wav(tiny.sound(tiny.SECONDS, seed=1))
SOUNDS = [WHOLE, *(tiny.wav(tiny.sound(seconds, seed)) for seconds, seed in ((0.7, 2), (1.31, 3)))]
MODEL = {"model": "whisper"}
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("speech")
    return {
        "whisper": tiny.write_whisper(root / "whisper", seed=8),
        "english": tiny.write_whisper(root / "english", multilingual=False, seed=4),
    }


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    store = export(folders, tmp_path_factory.mktemp("store"))
    flags = ("--max-audio-seconds", "8", "--max-waiting-mib", "8")
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT, *flags)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@cache
def reference(folder):
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    return model.eval(), extractor, transformers.AutoTokenizer.from_pretrained(folder)


def generate(folder, data, **options):
    """What `generate` writes of an audio: the tokens of each output, or the segments where times are asked for."""
    model, extractor, _ = reference(folder)
    samples = tiny.heard(data)
    sizes = {"truncation": False, "padding": "longest"} if len(samples) > tiny.SECONDS * tiny.RATE else {}
    heard = extractor(samples, sampling_rate=tiny.RATE, return_tensors="pt", **sizes)
    times = bool(options.get("return_timestamps"))
    if not times:
        options["force_unique_generate_call"] = True  # which else goes on where random weights write times unasked
    with torch.inference_mode():
        found = model.generate(heard.input_features, return_segments=times, **options)
    if times:
        return [(one["tokens"].tolist(), float(one["start"]), float(one["end"])) for one in found["segments"][0]]
    return [row.tolist() for row in found]


def text_of(folder, token_ids):
    words = [token for token in token_ids if token < tiny.FIRST_TIME]
    return reference(folder)[2].decode(words, skip_special_tokens=True).strip()


def segments_of(result):
    return [(list(one.token_ids), one.start_seconds, one.end_seconds) for one in result.segments]


@pytest.mark.parametrize(("language", "task"), [("de", "transcribe"), ("en", "transcribe"), ("fr", "translate")])
def test_transcripts_are_those_of_generate(folders, client, language, task):
    results = client.transcribe_speech(SOUNDS, language=language, task=task, **MODEL).results
    for data, result in zip(SOUNDS, results, strict=True):
        [expected] = generate(folders["whisper"], data, language=language, task=task)
        assert result.text == text_of(folders["whisper"], expected)
        assert len(result.text) > 10
        assert result.language == language
    assert len({result.text for result in results}) > 1


def test_the_language_is_the_one_that_generate_detects(folders, client):
    model, extractor, _ = reference(folders["whisper"])
    results = client.transcribe_speech(SOUNDS, **MODEL).results
    for data, result in zip(SOUNDS, results, strict=True):
        heard = extractor(tiny.heard(data), sampling_rate=tiny.RATE, return_tensors="pt").input_features
        [token] = model.detect_language(heard).tolist()
        assert tiny.IDS[f"<|{result.language}|>"] == token
        assert result.language_probabilities[0].language == result.language
        assert sum(one.probability for one in result.language_probabilities) == pytest.approx(1, abs=1e-5)
        [expected] = generate(folders["whisper"], data, task="transcribe")
        assert result.text == text_of(folders["whisper"], expected)


@pytest.mark.parametrize("length_penalty", [1.0, 0.4])
def test_the_best_of_a_beam_search_are_those_of_generate(folders, client, length_penalty):
    options = {"beam_size": 4, "hypothesis_count": 3, "length_penalty": length_penalty}
    results = client.transcribe_speech(SOUNDS, language="en", **options, **MODEL).results
    model, extractor, _ = reference(folders["whisper"])
    start = torch.tensor(
        [[tiny.IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]]
    )
    for data, result in zip(SOUNDS, results, strict=True):
        heard = extractor(tiny.heard(data), sampling_rate=tiny.RATE, return_tensors="pt").input_features
        options = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": length_penalty}
        # Whisper's own `generate` returns the best of the three three times.
        found = transformers.GenerationMixin.generate(model, heard, decoder_input_ids=start, **options)
        texts = [text_of(folders["whisper"], tokens.tolist()) for tokens in found]
        assert [one.text for one in result.hypotheses] == texts


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"condition_on_previous": True}, {"prompt": "hello"}])
@pytest.mark.parametrize("data", [WHOLE, LONG], ids=["window", "long"])
def test_segments_and_their_times_are_those_of_generate(folders, client, data, options):
    [result] = client.transcribe_speech(data, language="de", include_timestamps=True, **options, **MODEL).results
    own = {"num_beams": options.get("beam_size", 1)}
    if "condition_on_previous" in options:
        own["condition_on_prev_tokens"] = True
    if prompt := options.get("prompt"):
        ids = reference(folders["whisper"])[2].encode(f" {prompt}", add_special_tokens=False)
        own["prompt_ids"] = torch.tensor([tiny.IDS["<|startofprev|>"], *ids])
    expected = generate(folders["whisper"], data, language="de", task="transcribe", return_timestamps=True, **own)
    assert [tokens for tokens, _, _ in segments_of(result)] == [tokens for tokens, _, _ in expected]
    for found, (_, start, end) in zip(result.segments, expected, strict=True):
        assert (found.start_seconds, found.end_seconds) == pytest.approx((start, end), abs=1e-6)
    assert result.text == text_of(folders["whisper"], [token for tokens, _, _ in expected for token in tokens])


def test_long_audio_is_heard_in_windows_though_no_times_are_asked_for(client):
    [plain], [timed] = (
        client.transcribe_speech(LONG, language="de", include_timestamps=times, **MODEL).results
        for times in (False, True)
    )
    assert plain.text == timed.text
    assert not plain.segments
    assert plain.window_count > 2
    assert plain.duration_seconds == pytest.approx(5.3)


def test_a_model_of_one_language_is_told_none(folders, client):
    [result] = client.transcribe_speech(WHOLE, model="english").results
    [expected] = generate(folders["english"], WHOLE)
    assert result.text == text_of(folders["english"], expected)
    assert result.language == ""
    models = {model.name: model for model in client.list_models()}
    assert models["whisper"].target_languages == tiny.LANGUAGES
    assert {"translate_speech", "time_speech"} <= set(models["whisper"].capabilities)
    assert "translate_speech" not in models["english"].capabilities


@pytest.mark.parametrize("data", [WHOLE, LONG], ids=["window", "long"])
def test_a_streamed_transcript_is_that_of_the_unary_call(client, data):
    for times in (False, True):
        options = {"language": "de", "include_timestamps": times, **MODEL}
        [expected] = client.transcribe_speech(data, **options).results
        with client.stream_transcribe_speech(data, **options) as stream:
            deltas = list(stream)
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [segment for delta in deltas for segment in delta.segments] == list(expected.segments)
        assert stream.answer[0] == expected
        assert times or data is LONG or len(deltas) > 1


@pytest.mark.asyncio
async def test_a_transcript_does_not_depend_on_what_is_written_beside_it(client):
    alone = [client.transcribe_speech(data, language="en", beam_size=2, **MODEL)[0] for data in SOUNDS]
    async with AsyncClient(client.server) as other:
        together = await asyncio.gather(
            *(other.transcribe_speech(SOUNDS, language=one, beam_size=2, **MODEL) for one in ("en", "de", "en"))
        )
    for answer in (together[0], together[2]):
        assert list(answer.results) == alone


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("WAV", "FLOAT")]
)
def test_every_format_is_heard(client, kind, subtype):
    file = io.BytesIO()
    samples = tiny.heard(WHOLE)
    soundfile.write(file, np.stack([samples, samples], axis=1), tiny.RATE, format=kind, subtype=subtype)
    [result] = client.transcribe_speech(file.getvalue(), language="en", **MODEL).results
    assert result.duration_seconds == pytest.approx(tiny.SECONDS, abs=0.2)
    if kind in ("FLAC", "WAV"):  # without loss
        assert result.text == client.transcribe_speech(WHOLE, language="en", **MODEL)[0].text


def test_other_rates_are_resampled(client):
    for rate in (8_000, 44_100):
        times = np.arange(rate) / rate
        tone = (0.3 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)
        [result] = client.transcribe_speech(tiny.wav(tone, rate), language="en", **MODEL).results
        assert result.duration_seconds == pytest.approx(1)
        assert result.text


def with_header(*, channels=1, rate=16_000, frames=16_000, data=b"\0\0" * 160, bits=16, kind=1):
    """A WAV file whose header says what is asked for, whatever follows it."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    size = min(frames * block, 0xFFFFFF00)
    body = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", min(4 + len(body), 0xFFFFFFFF)) + b"WAVE" + body


def of_flac(samples, rate=tiny.RATE):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC")
    return file.getvalue()


def of_floats(values):
    return with_header(bits=32, kind=3, frames=len(values), data=np.asarray(values, "<f4").tobytes())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"audios": []}, "audios", "is empty; give 1 to 16"),
        ({"audios": [WHOLE] * 17}, "audios", "has 17 elements, the limit is 16"),
        ({"audios": [b""]}, "audios[0]", "is empty"),
        ({"audios": [WHOLE, b"no audio at all"]}, "audios[1]", "is not audio of a supported format; give WAV"),
        ({"audios": [b"RIFF1234WAVEfmt "]}, "audios[0]", "cannot be decoded"),
        ({"audios": [b"OggS" + bytes(500)]}, "audios[0]", "cannot be decoded"),
        ({"audios": [b"\xff\xfb" + bytes(500)]}, "audios[0]", "audios[0]"),
        ({"audios": [tiny.wav(np.empty(0, np.float32))]}, "audios[0]", "has no samples"),
        ({"audios": [with_header(rate=0)]}, "audios[0]", "audios[0]"),
        ({"audios": [with_header(rate=4_000_000_000)]}, "audios[0]", "audios[0]"),
        ({"audios": [with_header(channels=1000)]}, "audios[0]", "1000 channels, the limit is 8"),
        ({"audios": [of_floats([0.1, float("nan"), 0.2])]}, "audios[0]", "no finite numbers"),
        ({"audios": [of_floats([0.1, float("inf"), 0.2])]}, "audios[0]", "no finite numbers"),
        (
            {"audios": [tiny.wav(np.zeros(9 * tiny.RATE, np.float32))]},
            "audios[0]",
            "9.0 seconds by its header, the limit",
        ),
        ({"audios": [of_flac(np.zeros(60 * tiny.RATE, np.float32))]}, "audios[0]", "the limit is 8"),
        ({"language": "tlh"}, "language", "is 'tlh'; whisper hears en, de, fr"),
        ({"task": 7}, "task", "is 7; must be"),
        ({"model": "english", "language": "en"}, "language", "knows one language"),
        ({"model": "english", "task": 2}, "task", "only writes what is said"),
        ({"prompt": "hello there you all again"}, "prompt", "tokens, the limit is 19"),
        ({"prompt": "<|en|>"}, "prompt", "special token"),
        ({"parameters": {"max_length_ratio": 2}}, "parameters.max_length_ratio", "no tokens"),
        ({"parameters": {"max_new_tokens": 99}}, "parameters.max_new_tokens", "99"),
        (
            {"audios": [LONG], "parameters": {"beam_size": 2, "hypothesis_count": 2}},
            "parameters.hypothesis_count",
            "5.3",
        ),
    ],
)
async def test_what_cannot_be_heard_is_refused_with_a_sentence(address, fields, field, words):
    values = {"audios": [WHOLE], "model": "whisper", **fields}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.SpeechServiceStub(channel)
        failure = await failure_of(stub.TranscribeSpeech(pb.TranscribeSpeechRequest(**values)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == field
    assert words in failure.message


def test_silence_of_few_bytes_takes_no_more_memory_than_the_limit(client):
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(8 * 8000, np.int16), 8000, format="FLAC")
    assert len(silence.getvalue()) < 1000
    with pytest.raises(InvalidArgumentError, match=r"have .* seconds in \d+ audios, 8 MiB decoded; the limit is 8 MiB"):
        client.transcribe_speech([silence.getvalue()] * 16, language="de", **MODEL)


def test_a_header_that_promises_more_than_there_is_is_read_as_far_as_it_goes(client):
    data = with_header(frames=2**31, data=(tiny.heard(WHOLE) * 32768).astype("<i2").tobytes())
    [result] = client.transcribe_speech(data, language="en", **MODEL).results
    assert result.text == client.transcribe_speech(WHOLE, language="en", **MODEL)[0].text


def test_the_command_line_writes_what_is_said_in_a_file(address, client, tmp_path):
    file = tmp_path / "said.wav"
    file.write_bytes(WHOLE)
    runner, flags = CliRunner(), ["--model", "whisper", "--language", "de", "--server", address]
    [expected] = client.transcribe_speech(file, language="de", **MODEL).results
    result = runner.invoke(app, ["transcribe", str(file), *flags])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == expected.text
    result = runner.invoke(app, ["transcribe", str(file), "--stream", *flags])
    assert result.output.strip() == expected.text
    result = runner.invoke(app, ["transcribe", str(file), "--timestamps", *flags])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("00:0")


def post(path, *, file=WHOLE, headers=None, **fields):
    files = {"file": ("said.wav", file, "audio/wav")}
    data = {"model": "whisper", "language": "de", **fields}
    return httpx2.post(f"http://127.0.0.1:{HTTP_PORT}/v1/audio/{path}", files=files, data=data, headers=headers)


def test_openais_api_answers_in_each_of_its_formats(client):
    options = {"language": "de", "include_timestamps": True, **MODEL}
    plain, timed = (
        client.transcribe_speech(WHOLE, language="de", **MODEL)[0],
        client.transcribe_speech(WHOLE, **options)[0],
    )
    assert post("transcriptions").json() == {"text": plain.text}
    assert post("transcriptions", response_format="text").text == f"{plain.text}\n"
    verbose = post("transcriptions", response_format="verbose_json").json()
    assert (verbose["text"], verbose["language"], verbose["duration"]) == (timed.text, "de", tiny.SECONDS)
    assert [tuple(one["tokens"]) for one in verbose["segments"]] == [one.token_ids for one in timed.segments]
    first = timed.segments[0]
    cue = f"00:00:0{first.start_seconds:.3f} --> 00:00:0{first.end_seconds:.3f}"
    assert post("transcriptions", response_format="vtt").text.startswith(f"WEBVTT\n\n{cue}\n{first.text.strip()}\n")
    assert post("transcriptions", response_format="srt").text.startswith(f"1\n{cue.replace('.', ',')}\n")
    events = post("transcriptions", stream="true").text
    assert "transcript.text.delta" in events
    assert "transcript.text.done" in events
    translated = client.transcribe_speech(WHOLE, language="de", task="translate", **MODEL)[0]
    for model in ("whisper", ""):  # the only one that translates
        assert post("translations", model=model).json() == {"text": translated.text}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "docx"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"file": b"no audio"}, "file"),
        ({"language": "tlh"}, "language"),
        ({"n": "2"}, "n"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
    ],
)
def test_openais_api_names_what_is_wrong(address, fields, param):
    answer = post("transcriptions", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_form_of_another_origins_page_is_refused(address):
    assert post("transcriptions", headers={"origin": "https://elsewhere.example"}).status_code == 415
