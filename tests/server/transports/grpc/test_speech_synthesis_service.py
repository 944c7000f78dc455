"""Texts that are spoken: whole and streamed alike, whatever their company, in formats and within limits."""

import asyncio
import io

import grpc
import numpy as np
import pytest
import soundfile
from rpc_failures import failure_of
from typer.testing import CliRunner

from headway.v1 import common_pb2, model_service_pb2
from headway.v1 import speech_service_pb2 as pb
from headway.v1 import speech_service_pb2_grpc as pb_grpc
from headway_client import AsyncClient, Client
from headway_client.cli import app
from headway_server.observers import Observer

RATE = 8000
HOP = 160


class Runs(Observer):
    """Counts the streams of each run of the codec."""

    def __init__(self):
        self.rows = []

    def batch_finished(self, event):
        self.rows.append(event.num_items)


@pytest.fixture
async def runs():
    return Runs()


@pytest.fixture
async def speaking(serve, voice_store, runs):
    async with serve(voice_store, observer=runs, precision="fp32") as serving:
        yield serving


def stub(serving):
    return pb_grpc.SpeechServiceStub(serving.channel)


def parameters(seed=1, temperature=1.5, **fields):
    sampling = common_pb2.SamplingParameters(temperature=temperature, seed=seed)
    return pb.SynthesisParameters(sampling=sampling, **fields)


def samples_of(audio):
    samples, rate = soundfile.read(io.BytesIO(audio), dtype="int16")
    assert rate == RATE
    return samples


async def stream(serving, text, **fields):
    """Returns the samples of a stream and its messages."""
    parts = [
        part
        async for part in stub(serving).StreamSynthesizeSpeech(pb.StreamSynthesizeSpeechRequest(text=text, **fields))
    ]
    return np.frombuffer(b"".join(part.pcm for part in parts), "<i2"), parts


@pytest.mark.parametrize("precision", ["fp32", "int8"])
async def test_streamed_and_whole_speech_are_the_same_samples_whatever_their_company(
    serve, voice_store, runs, precision
):
    async with serve(voice_store, observer=runs, precision=precision) as speaking:
        asked = [("low", "ann", 1), ("high", "bob", 2), ("both low", "", 3), ("low high", "bob", 4)]
        whole = []
        for text, voice, seed in asked:
            request = pb.SynthesizeSpeechRequest(texts=[text], voice=voice, parameters=parameters(seed))
            [result] = (await stub(speaking).SynthesizeSpeech(request)).results
            samples = samples_of(result.audio)
            assert len(samples) == round(result.duration_seconds * RATE) > 0
            assert len(samples) % HOP == 0
            assert result.seed == seed
            whole.append(samples)
        assert len({samples.tobytes() for samples in whole}) == len(asked)
        runs.rows.clear()
        streamed = await asyncio.gather(
            *(
                stream(speaking, text, voice=voice, parameters=parameters(seed))
                for text, voice, seed in asked
                for _ in range(3)
            )
        )
        assert max(runs.rows) > 1, "streams share runs of the codec"
        for (samples, parts), expected in zip(streamed, [one for one in whole for _ in range(3)], strict=True):
            np.testing.assert_array_equal(samples, expected)
            assert parts[-1].result.duration_seconds == len(expected) / RATE
            assert not parts[-1].result.audio
            assert all(part.sampling_rate == RATE for part in parts)


async def test_all_texts_of_a_call_are_spoken_as_each_alone(speaking):
    texts = ["low", "high", "both"]
    request = pb.SynthesizeSpeechRequest(texts=texts, voice="bob", parameters=parameters(7))
    together = await stub(speaking).SynthesizeSpeech(request)
    assert together.model.name == "tones"
    assert together.timings.inference.nanos > 0
    for text, result in zip(texts, together.results, strict=True):
        alone = pb.SynthesizeSpeechRequest(texts=[text], voice="bob", parameters=parameters(7))
        [expected] = (await stub(speaking).SynthesizeSpeech(alone)).results
        assert result.audio == expected.audio


@pytest.mark.parametrize(
    ("form", "beginning"), [("WAV", b"RIFF"), ("FLAC", b"fLaC"), ("OPUS", b"OggS"), ("MP3", b"\xff")]
)
async def test_formats_hold_the_same_speech(speaking, form, beginning):
    request = pb.SynthesizeSpeechRequest(
        texts=["low"], voice="ann", parameters=parameters(), format=f"AUDIO_FORMAT_{form}"
    )
    [result] = (await stub(speaking).SynthesizeSpeech(request)).results
    assert result.audio.startswith(beginning)
    if form in ("WAV", "FLAC"):  # the others are not exact
        expected, _ = await stream(speaking, "low", voice="ann", parameters=parameters())
        np.testing.assert_array_equal(samples_of(result.audio), expected)


async def test_speech_is_cut_where_it_was_asked_to_be(speaking):
    wholes = {seed: (await stream(speaking, "low high", parameters=parameters(seed)))[0] for seed in range(8)}
    seed, whole = max(wholes.items(), key=lambda pair: len(pair[1]))
    assert len(whole) > 2 * HOP
    cut, parts = await stream(speaking, "low high", parameters=parameters(seed, max_duration_seconds=0.05))
    assert len(cut) == 2 * HOP
    np.testing.assert_array_equal(cut, whole[: 2 * HOP])
    assert parts[-1].result.finish_reason == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"texts": []}, "texts: is empty; give 1 to 16"),
        ({"texts": ["low"] * 17}, "texts: has 17 elements, the limit is 16"),
        ({"texts": ["low", ""]}, "texts[1]: is empty"),
        ({"texts": ["low " * 9]}, "texts[0]: has 38 tokens, the model speaks at most 24; split it"),
        ({"texts": ["low"], "voice": "eve"}, "voice: is 'eve'; the model has ann, bob"),
        ({"texts": ["low"], "format": 9}, "format: is 9"),
        (
            {"texts": ["low"], "parameters": parameters(max_duration_seconds=60)},
            "max_duration_seconds: is 60 seconds; must be from 0.02 to 0.94",
        ),
        (
            {"texts": ["low"], "parameters": parameters(max_duration_seconds=0)},
            "max_duration_seconds: is 0 seconds; must be from 0.02 to 0.94",
        ),
        ({"texts": ["low"], "parameters": parameters(temperature=9)}, "temperature: is 9; must be from 0 to 2"),
        ({"texts": ["low"], "model": "nobody"}, "nobody"),
    ],
)
async def test_what_is_out_of_range_is_told_with_its_limit(speaking, fields, said):
    failure = await failure_of(stub(speaking).SynthesizeSpeech(pb.SynthesizeSpeechRequest(**fields)))
    expected = grpc.StatusCode.NOT_FOUND if "model" in fields else grpc.StatusCode.INVALID_ARGUMENT
    assert failure.code is expected
    assert said in failure.message


async def test_a_stream_that_is_left_frees_its_slot(serve, voice_store):
    async with serve(voice_store, engine={"num_slots": 1}) as speaking:
        call = stub(speaking).StreamSynthesizeSpeech(pb.StreamSynthesizeSpeechRequest(text="low high low"))
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            samples, _ = await stream(speaking, "high", parameters=parameters(max_duration_seconds=0.1))
        assert len(samples)


async def test_both_clients_and_the_command_line_speak_the_same(speaking, tmp_path):
    asked = {"voice": "bob", "seed": 9, "temperature": 1.2, "max_duration_seconds": 0.8}
    address = f"127.0.0.1:{speaking.port}"
    async with AsyncClient(address) as client:
        [spoken] = (await client.synthesize_speech("low high", **asked)).results
        async with client.stream_synthesize_speech("low high", **asked) as parts:
            pcm = b"".join([part.pcm async for part in parts])
        assert parts.answer.results[0].duration_seconds == spoken.duration_seconds
        [model] = (await client.list_models()).models
        assert (model.task, model.labels) == ("speech_synthesis", ("ann", "bob"))
    samples = samples_of(spoken.audio)
    assert pcm == samples.tobytes()

    def call():
        with Client(address) as client:
            assert client.synthesize_speech(["low high"], **asked).results[0] == spoken
            with client.stream_synthesize_speech("low high", **asked) as stream:
                assert b"".join(part.pcm for part in stream) == pcm
        flags = ["--voice", "bob", "--seed", "9", "--temperature", "1.2", "--max-duration", "0.8", "--server", address]
        for name in ("out.wav", "out.flac"):
            file = tmp_path / name
            result = CliRunner().invoke(app, ["speak", "low high", "-o", str(file), *flags])
            assert result.exit_code == 0, result.output
            np.testing.assert_array_equal(samples_of(file.read_bytes()), samples)
            assert f"{spoken.duration_seconds:.2f}" in result.output
        result = CliRunner().invoke(app, ["speak", "low high", "-o", "-", *flags])
        assert result.exit_code == 0, result.output
        assert result.stdout_bytes == pcm
        result = CliRunner().invoke(app, ["speak", "low high", "-o", "out.aac", *flags])
        assert result.exit_code == 2
        assert "does not end in .wav" in result.output

    await asyncio.to_thread(call)


async def test_models_tell_whose_voices_they_have(speaking):
    [model] = (await speaking.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.task == "speech_synthesis"
    assert list(model.labels) == ["ann", "bob"]
