"""What the engine does for a call is charged to its caller, however often a call lets it run."""

import io
import wave
from contextlib import aclosing
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_decoder import NumpyEncoder
from tiny_engine import VOCAB_SIZE, byte_tokenizer, make_decoder, make_generation_model, make_translation_model
from tiny_hearing import RATE, make_speech_model

from headway_server.batching.batcher import BatchedResults
from headway_server.observers import Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.serving.calls import Calls
from headway_server.serving.permits import Admission
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.image_generation.prompts import TextPrompts
from headway_server.tasks.job import Job
from headway_server.tasks.speech.transcripts import SpeechRequest
from headway_server.tasks.text_to_text.call import TextToTextCall
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest


class Work(Observer):
    """Counts what engines have read before they wrote, and what they have generated, of all beams."""

    num_read = num_generated = 0

    def step_finished(self, event) -> None:
        if event.kind in ("encode", "prefill"):
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


async def transcribe_prompted(work):
    model = make_speech_model(work)
    model.start()
    parameters = TextToTextParameters(max_new_tokens=2)
    request = SpeechRequest(language="de", prompt="names of places", condition_on_previous=True, parameters=parameters)
    await model.transcribe([sound(1.4)], request=request)
    return model


async def draw(work):
    """Reads a prompt and a negative prompt, as a model does that draws by texts."""

    async def encode(rows, *_, **__):
        work.num_read += sum(int(row["attention_mask"].sum()) for row in rows)
        return BatchedResults(results=[{"text": np.zeros((9, 2), np.float32)} for _ in rows], runs=[])

    tokenizer = TextTokenizer(byte_tokenizer())
    prompts = TextPrompts(
        tokenizer,
        SimpleNamespace(submit=encode),
        max_tokens=9,
        pad_id=0,
        max_bytes=99,
        outputs=("text",),
        has_zero_negative=False,
    )
    read = [await prompts.read("prompt", text) for text in ("a cat", "a dog")]
    admissions = [Admission(limit=1, noun="images", owner="model")] * 2
    with Job(None, *admissions, count=0, work=1.0, num_bytes=0, deadline=None) as job:
        assert len(await prompts.conditions(read, job)) == 2
    return SimpleNamespace(close=lambda: None)


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


ASKED = ["searched once", "searched again", "detected", "named", "prompted", "sampled", "streamed", "drawn"]


@pytest.mark.parametrize("name", ASKED)
async def test_all_that_is_read_and_generated_for_a_call_is_charged(name, monkeypatch):
    work, budget = Work(), Budget()
    ask = {
        "searched once": lambda: translate(work, monkeypatch, repeats=0),
        "searched again": lambda: translate(work, monkeypatch, repeats=2),
        "detected": lambda: transcribe(work),
        "named": lambda: transcribe_named(work),
        "prompted": lambda: transcribe_prompted(work),
        "drawn": lambda: draw(work),
        "sampled": lambda: generate(work),
        "streamed": lambda: stream(work),
    }[name]
    async with Calls(access=SimpleNamespace(identify=lambda _: budget)).answer("call"):
        model = await ask()
    model.close()
    assert budget.num_tokens >= work.num_read + work.num_generated > 0
    assert budget.num_tokens <= 1.3 * (work.num_read + work.num_generated)
