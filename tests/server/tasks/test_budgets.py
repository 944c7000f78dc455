"""What the engine does for a call is charged to its caller, however often a call lets it run."""

import io
import wave
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_decoder import NumpyEncoder
from tiny_engine import VOCAB_SIZE, make_decoder, make_generation_model, make_translation_model
from tiny_hearing import RATE, make_speech_model

from headway_server.observers import Observer
from headway_server.serving.calls import Calls
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.speech.model import SpeechRequest
from headway_server.tasks.text_to_text.call import TextToTextCall
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest


class Work(Observer):
    """Counts the prompts or sources that engines have read, and what they have generated, of all beams."""

    def __init__(self, read_by) -> None:
        self.num_read = self.num_generated = 0
        self._read_by = read_by

    def step_finished(self, event) -> None:
        if event.kind == self._read_by:
            self.num_read += event.num_tokens
        elif event.kind == "decode":
            self.num_generated += event.num_rows


class Budget:
    """The rights of a caller that may do everything; keeps what is charged."""

    name, counts_tokens = "caller", True

    def __init__(self) -> None:
        self.num_tokens = 0

    def begin(self):
        return 0.0

    def end(self, began_at):
        pass

    def check_model(self, task, model):
        pass

    def count_tokens(self, count):
        self.num_tokens += count


def sound(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, RATE, 0, "NONE", ""))
        samples = np.random.default_rng(4).normal(0, 3000, int(seconds * RATE))
        opened.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


async def transcribe(work):
    model = make_speech_model(work)
    model.start()
    parameters = TextToTextParameters(max_new_tokens=5)
    await model.transcribe([sound(0.3), sound(1.2)], request=SpeechRequest(parameters=parameters))
    return model


async def transcribe_named(work):
    model = make_speech_model(work)
    model.start()
    request = SpeechRequest(language="de", parameters=TextToTextParameters(max_new_tokens=5))
    async with aclosing(model.stream(sound(0.4), name="audio", request=request)) as parts:
        assert [part async for part in parts]
    return model


async def translate(work, monkeypatch, *, repeats):
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    model = make_translation_model(make_decoder(num_slots=8), encoder, observer=work)
    left = iter(range(repeats))

    def find_once_more(_call, sources, _results):
        return {1: sources[1]} if next(left, None) is not None else {}

    monkeypatch.setattr(TextToTextCall, "forbid_spellings", find_once_more)
    model.start()
    request = TextToTextRequest(
        parameters=TextToTextParameters(max_new_tokens=6, beam_size=3),
        phrases=(PhraseRequest(forbidden=("dog",)),) * 2,
    )
    await model.write(["the cat", "a dog that sat"], request=request)
    return model


async def generate(work):
    model = make_generation_model(make_decoder(), observer=work)
    model.start()
    request = GenerationRequest(parameters={"max_new_tokens": 4}, sample_count=2)
    await model.generate(["the cat sat", "a dog"], fields=["a", "b"], request=request)
    return model


async def stream(work):
    model = make_generation_model(make_decoder(), observer=work)
    model.start()
    request = GenerationRequest(parameters={"max_new_tokens": 4}, sample_count=2)
    async with aclosing(model.stream("the cat sat", field="a", request=request)) as parts:
        assert [part async for part in parts]
    return model


@pytest.mark.parametrize("name", ["searched once", "searched again", "detected", "named", "sampled", "streamed"])
async def test_all_that_is_read_and_generated_for_a_call_is_charged(name, monkeypatch):
    work, budget = Work("prefill" if name in ("sampled", "streamed") else "encode"), Budget()
    ask = {
        "searched once": lambda: translate(work, monkeypatch, repeats=0),
        "searched again": lambda: translate(work, monkeypatch, repeats=2),
        "detected": lambda: transcribe(work),
        "named": lambda: transcribe_named(work),
        "sampled": lambda: generate(work),
        "streamed": lambda: stream(work),
    }[name]
    async with Calls(access=SimpleNamespace(identify=lambda _: budget)).answer("call"):
        model = await ask()
    model.close()
    assert budget.num_tokens >= work.num_read + work.num_generated > 0
    assert budget.num_tokens <= 1.3 * (work.num_read + work.num_generated)
