"""What an engine takes for a step: silence between two calls is none of it."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from numpy_decoder import NumpyEncoder
from tiny_engine import BOS_ID, VOCAB_SIZE, make_decoder, make_sequence

from headway_server.decoding.core.step import Stepper
from headway_server.decoding.parameters import SearchParameters
from headway_server.errors import OverloadedError
from headway_server.observers import Observer

STEP_S = 0.01


class Ends(Observer):
    """Keeps how sequences leave the queue and how they end."""

    def __init__(self) -> None:
        self.left, self.ended = [], []

    def left_queue(self, event) -> None:
        self.left.append(event.reason)

    def sequence_finished(self, event) -> None:
        self.ended.append(event.outcome)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: now.s)
    return now


@pytest.fixture(params=["sampled", "searched"])
async def make(request, clock):
    """Makes an engine's step, its pace and its sequences, of prompts that are sampled or of sources searched for."""
    decoder = make_decoder(num_slots=2)
    decode = decoder.decode

    def timed(*arguments, **options):
        clock.s += STEP_S
        return decode(*arguments, **options)

    decoder.decode = timed
    is_search = request.param == "searched"

    def engine(observer):
        encoder = NumpyEncoder(vocab_size=VOCAB_SIZE) if is_search else None
        stepper = Stepper(decoder, encoder=encoder, name="tiny", observer=observer)
        stepper.outbox.post = asyncio.get_running_loop().call_soon_threadsafe
        return stepper, stepper.pace

    def sequence(**options):
        options = {"eos_id": None, "max_new_tokens": 6} | options
        if is_search:
            options |= {"start_ids": [BOS_ID], "search": SearchParameters(beam_size=2)}
        return make_sequence([5, 6, 7], **options)

    return SimpleNamespace(engine=engine, sequence=sequence)


def run(stepper, sequences):
    stepper.scheduler.waiting.add(sequences)
    while stepper.scheduler.has_work:
        stepper.step()


async def test_silence_is_no_step(make, clock):
    stepper, pace = make.engine(Ends())
    for _ in range(3):
        run(stepper, [make.sequence(), make.sequence()])
        clock.s += 45
    assert pace.step_s == pytest.approx(STEP_S, rel=0.5)


async def test_what_is_dropped_as_hopeless_is_reported_as_everything_that_ends(make, clock):
    recorder = Ends()
    stepper, _ = make.engine(recorder)
    run(stepper, [make.sequence()])
    hopeless = [make.sequence(deadline=clock.s + STEP_S) for _ in range(4)]
    run(stepper, [*hopeless, *(make.sequence() for _ in range(4))])
    await asyncio.sleep(0)
    assert all(isinstance(one.reply.result.exception(), OverloadedError) for one in hopeless)
    assert recorder.left.count("expired") == recorder.ended.count("expired") == 4
    assert len(recorder.ended) == 9
