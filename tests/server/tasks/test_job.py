"""What every call of a model that decodes or draws keeps to, whatever its task and whether it is a stream."""

import asyncio
import io
import time
import wave
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import structlog.testing
from PIL import Image
from waiting import until

from headway_server.errors import DeadlineError, InvalidInputError, ModelRunError, OverloadedError
from headway_server.observers import Observer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost
from headway_server.serving.images import SentImage
from headway_server.serving.permits import Admission
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.job import Job
from headway_server.tasks.speech.transcripts import SpeechRequest
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

MODELS = Path(__file__).parents[3] / "models"
pytestmark = pytest.mark.asyncio(loop_scope="module")


def png(seed: int, colour: str | None = None) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    (Image.fromarray(pixels) if colour is None else Image.new("RGB", (40, 40), colour)).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, 8000, 0, "NONE", ""))
        opened.writeframes(np.random.default_rng(4).normal(0, 3000, int(8000 * seconds)).astype("<i2").tobytes())
    return file.getvalue()


def sent(data: bytes, field: str) -> SentImage:
    return SentImage(data=data, field=field, key=data[-20:])


def written(deadline, *, beams=1, **fields):
    return TextToTextRequest(
        parameters=TextToTextParameters(max_new_tokens=8, beam_size=beams), deadline=deadline, **fields
    )


def said(deadline):
    return SpeechRequest(parameters=TextToTextParameters(max_new_tokens=6), deadline=deadline)


def continued(deadline, **fields):
    return GenerationRequest(parameters={"max_new_tokens": 8, "temperature": 1.0}, deadline=deadline, **fields)


DRAWN = ImageGenerationRequest(num_images=2, num_steps=6)
DRAWN_OVER = ImageGenerationRequest(image=sent(png(1), "image"), mask=sent(png(1, "white"), "mask"), num_steps=6)
PHRASES = (PhraseRequest(forbidden=("ein Mann",)), PhraseRequest(required=("Hund",)))


@dataclass(frozen=True)
class Case:
    """A kind of call."""

    model: str
    ask: Callable[[Any, float | None], Any]
    """Asks the model; the deadline is by `time.monotonic`."""
    charge: Callable[[Any], int] | None = None
    """Tokens of an answer; None: those that the engine has read and written."""


CASES = {
    "generation": Case(
        "shakespeare",
        lambda model, deadline: model.generate(
            ["The king", "O"], fields=["prompts[0]", "prompts[1]"], request=continued(deadline, sample_count=2)
        ),
    ),
    "generation, streamed": Case(
        "shakespeare",
        lambda model, deadline: model.stream(
            "The king", field="prompt", request=continued(deadline, sample_count=3, echo=True)
        ),
    ),
    "translation": Case(
        "multi30k-en-de", lambda model, deadline: model.write(["a man", "two dogs run"], request=written(deadline))
    ),
    "translation of sentences": Case(
        "multi30k-en-de",
        lambda model, deadline: model.write(
            ["A man runs. Two dogs run.", "A cat."], request=written(deadline, split_sentences=True)
        ),
    ),
    "translation by a search": Case(
        "multi30k-en-de",
        lambda model, deadline: model.write(
            ["a man", "two dogs run"], request=written(deadline, beams=3, phrases=PHRASES)
        ),
    ),
    "translation, streamed": Case(
        "multi30k-en-de", lambda model, deadline: model.stream("two dogs run", field="text", request=written(deadline))
    ),
    "captioning": Case(
        "caption",
        lambda model, deadline: model.caption([png(1), png(2)], request=written(deadline, target_language="en")),
    ),
    "captioning, streamed": Case(
        "caption",
        lambda model, deadline: model.stream_caption(
            png(1), field="image", request=written(deadline, target_language="en")
        ),
    ),
    "transcription": Case(
        "telephone-transcriber",
        lambda model, deadline: model.transcribe([sound(1), sound(2)], request=said(deadline)),
    ),
    "transcription, streamed": Case(
        "telephone-transcriber", lambda model, deadline: model.stream(sound(1), name="audio", request=said(deadline))
    ),
    "synthesis": Case(
        "telephone-speech",
        lambda model, deadline: model.synthesize(
            ["one", "two"], request=SynthesisRequest(max_seconds=0.4, deadline=deadline)
        ),
    ),
    "synthesis, streamed": Case(
        "telephone-speech",
        lambda model, deadline: model.stream(
            "one", field="text", request=SynthesisRequest(max_seconds=0.4, deadline=deadline)
        ),
    ),
    "image generation": Case(
        "fashion-mnist-diffusion", lambda model, deadline: model.generate(DRAWN, deadline=deadline)
    ),
    "image generation, streamed": Case(
        "fashion-mnist-diffusion", lambda model, deadline: model.stream(DRAWN_OVER, deadline=deadline)
    ),
    "inspection of a text": Case(
        "shakespeare",
        lambda model, deadline: model.inspect(
            "The king", request=AttentionRequest(), truncate=False, deadline=deadline
        ),
        lambda found: len(found.tokens),
    ),
    "inspection of a translation": Case(
        "multi30k-en-de",
        lambda model, deadline: model.inspect(
            "a man", translation="ein Mann", request=AttentionRequest(), truncate=False, deadline=deadline
        ),
        lambda found: len(found.tokens) + len(found.target_tokens),
    ),
}
STREAMED = [name for name in CASES if name.endswith("streamed")]


class Work(Observer):
    """Counts what engines read before they write, and what they write, of all beams."""

    num_read = num_rows = num_written = 0

    def step_finished(self, event) -> None:
        if event.kind in ("encode", "prefill"):
            self.num_read += event.num_tokens
        elif event.kind == "decode":
            self.num_rows += event.num_rows

    def sequence_finished(self, event) -> None:
        self.num_written += event.num_output_tokens


class Budget:
    """The rights of a caller that may do everything; keeps what is charged."""

    name, counts_tokens = "caller", True

    def __init__(self) -> None:
        self.num_tokens = 0

    def begin(self):
        return 0.0

    def end(self, began_at):
        pass

    def count_tokens(self, count):
        self.num_tokens += count


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    """The shipped models of all cases by their names, and what their engines do."""
    work, names = Work(), {case.model for case in CASES.values()}
    host = ModelHost.open(
        Runtime(device="cpu", num_threads=1),
        ServerSettings(store=MODELS),
        asked_for={f"{folder.name}/1": folder.name in names for folder in MODELS.iterdir() if folder.is_dir()},
        observer=work,
    )
    for model in host.models:
        model.start()
    yield SimpleNamespace(models={model.bundle.manifest.name: model for model in host.models}, work=work)
    host.close()


async def answer(call) -> Any:
    """The answer to a call, or the last part of its stream."""
    if not hasattr(call, "__aiter__"):
        return await call
    async for part in call:
        last = part
    assert isinstance(last, Answer)
    return last


def admissions(model, name) -> tuple[Admission, Admission]:
    """Those of inputs and of bytes."""
    inspector = model._inspector if name.startswith("inspection") else None
    return (model._admission, model._memory) if inspector is None else (inspector._waiting, inspector._memory)


def assert_nothing_is_left(model) -> None:
    inspector = getattr(model, "_inspector", None)
    for admission in (model._admission, model._memory, *((inspector._waiting, inspector._memory) if inspector else ())):
        assert not admission.num_admitted
        assert not admission._num_bytes


@pytest.mark.parametrize("name", CASES)
async def test_a_call_is_charged_what_the_engine_does_and_its_times_add_up(name, served):
    case, model, work, budget = CASES[name], served.models[CASES[name].model], served.work, Budget()
    before = work.num_read, work.num_rows, work.num_written
    began = time.monotonic()
    async with Calls(access=SimpleNamespace(identify=lambda _: budget)).answer("call"):
        found = await answer(case.ask(model, None))
    took_s, timings = time.monotonic() - began, found.timings
    read, rows, tokens = (
        now - then for now, then in zip((work.num_read, work.num_rows, work.num_written), before, strict=True)
    )
    # A search writes a row for each beam; the first token of a prompt comes of reading it and takes no row.
    assert budget.num_tokens == (read + max(rows, tokens) if case.charge is None else case.charge(found))
    assert budget.num_tokens or case.model == "fashion-mnist-diffusion"
    assert min(timings.preprocessing_s, timings.inference_s) > 0
    assert timings.queue_s >= 0
    parts = (timings.queue_s, timings.preprocessing_s, timings.inference_s)
    assert max(parts) <= took_s
    assert sum(parts) <= took_s or name not in STREAMED, "parts overlap where a call has several inputs"
    assert_nothing_is_left(model)


@pytest.mark.parametrize("name", CASES)
async def test_a_call_that_is_refused_gives_everything_back(name, served):
    case, model = CASES[name], served.models[CASES[name].model]
    inputs, memory = admissions(model, name)
    with inputs.admit(inputs._limit), pytest.raises(OverloadedError, match=f"the limit is {inputs._limit} "):
        await answer(case.ask(model, None))
    assert_nothing_is_left(model)
    with memory.admit(1, memory._max_bytes):
        with pytest.raises(OverloadedError, match=r"\d+ bytes of .* waiting"):
            await answer(case.ask(model, None))
        assert (memory.num_admitted, memory._num_bytes, inputs.num_admitted) == (1, memory._max_bytes, 0)
    with pytest.raises(DeadlineError):
        await answer(case.ask(model, 0.0))
    assert_nothing_is_left(model)


@contextmanager
def broken(model):
    """Every run of the model's graphs fails; gives what is logged."""

    def fail(*_, **__):
        raise RuntimeError("broken")

    if hasattr(model, "_lanes"):
        parts = [(engine._stepper._decoder, name) for engine in model._lanes._engines for name in ("prefill", "decode")]
        parts += [(model._inspector._batcher._graph, "run")] if model._inspector._batcher else []
    else:
        parts = [(model._engine, "_denoise")]
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:  # tracebacks take a second
        for part, name in parts:
            patch.setattr(part, name, fail)
        yield logs


@pytest.mark.parametrize("name", CASES)
async def test_a_call_that_fails_gives_everything_back(name, served):
    case, model = CASES[name], served.models[CASES[name].model]
    if name.startswith("inspection"):
        await model._inspector.open()
    with broken(model) as logs:
        with pytest.raises(ModelRunError):
            await answer(case.ask(model, None))
        await until(lambda: logs)
    assert_nothing_is_left(model)


@pytest.mark.parametrize("name", CASES)
async def test_a_call_whose_caller_goes_gives_everything_back(name, served):
    case, model = CASES[name], served.models[CASES[name].model]
    inputs, memory = admissions(model, name)
    call = asyncio.ensure_future(answer(case.ask(model, None)))
    while not (inputs.num_admitted and memory._num_bytes):  # each turn of the loop, since a run takes few of them
        assert not call.done()
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert_nothing_is_left(model)


@pytest.mark.parametrize("name", STREAMED)
async def test_a_stream_whose_reader_goes_gives_everything_back(name, served):
    case, model = CASES[name], served.models[CASES[name].model]
    stream = case.ask(model, None)
    assert not isinstance(await anext(stream), Answer)
    assert model._admission.num_admitted
    await stream.aclose()
    assert_nothing_is_left(model)


async def test_a_job_counts_what_it_and_its_runs_hold_and_refuses_what_leaves_no_room():
    inputs, memory = (Admission(limit=4, noun="inputs", owner="model", max_bytes=100) for _ in range(2))

    def begin(num_bytes: int) -> Job[None]:
        return Job(None, inputs, memory, count=2, work=1.0, num_bytes=num_bytes, deadline=None)

    with begin(0) as job:
        assert (inputs.num_admitted, memory.num_admitted) == (2, 0), "a job without bytes is in nobody's way"
        with begin(500):
            assert memory._num_bytes == 500, "one that is alone may hold any number"
        job.reserve(30)
        with begin(60) as other:
            with job._running(num_bytes=5, num_read=0):
                assert memory._num_bytes == 95
                with pytest.raises(OverloadedError, match="60 bytes"):
                    job.reserve_more(40)
                assert memory._num_bytes == 95
            assert memory._num_bytes == 90
            with pytest.raises(OverloadedError, match="the limit is 4 "):
                other.admit(1)
        with pytest.raises(OverloadedError, match="bytes"), begin(80):
            pass
        assert (inputs.num_admitted, memory._num_bytes) == (2, 30)
    assert (inputs.num_admitted, memory.num_admitted, memory._num_bytes) == (0, 0, 0)


async def test_a_job_gives_the_place_of_an_input_back_when_its_last_run_ends():
    inputs, memory = (Admission(limit=4, noun="inputs", owner="model") for _ in range(2))
    ends = [asyncio.get_running_loop().create_future() for _ in range(2)]
    with Job(None, inputs, memory, count=2, work=1.0, num_bytes=0, deadline=None) as job:
        with job._running(num_bytes=0, num_read=0, ends=ends):
            ends[0].set_result(None)
            await until(lambda: inputs.num_admitted == 1)
        assert inputs.num_admitted == 1
    ends[1].set_result(None)
    await asyncio.sleep(0)
    assert inputs.num_admitted == 0


async def test_more_inputs_than_a_model_admits_are_invalid(served):
    for name in ("shakespeare", "multi30k-en-de", "caption", "telephone-transcriber", "telephone-speech"):
        model = served.models[name]
        with pytest.raises(InvalidInputError, match=f"takes at most {model._capacity} at once"):
            model._begin(model._capacity + 1, num_tokens=1, num_bytes=0, deadline=None)
