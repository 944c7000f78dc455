"""What an engine reports to an observer: every run, and every sequence that leaves the queue."""

import asyncio

import numpy as np
from numpy_decoder import NumpyEncoder
from tiny_engine import BOS_ID, VOCAB_SIZE, make_decoder, make_sequence, running_engine, slow_down

from headway_server.errors import DeadlineError
from headway_server.observers import ModelId, Observer, QueueEvent, StepEvent

MODEL = ModelId(name="tiny", version="1")


class Recorder(Observer):
    def __init__(self) -> None:
        self.steps: list[StepEvent] = []
        self.left: list[QueueEvent] = []

    def step_finished(self, event: StepEvent) -> None:
        self.steps.append(event)

    def left_queue(self, event: QueueEvent) -> None:
        self.left.append(event)


async def test_prefills_and_decode_steps_are_reported_with_their_tokens():
    recorder = Recorder()
    async with running_engine(make_decoder(prefill_chunk=8), observer=recorder, model=MODEL) as engine:
        await engine.run([make_sequence(np.arange(2, 21), eos_id=None, max_new_tokens=5)])
    assert [(event.kind, event.num_rows, event.num_tokens) for event in recorder.steps] == [
        ("prefill", 1, 8),
        ("prefill", 1, 8),
        ("prefill", 1, 3),
        *[("decode", 1, 1)] * 4,
    ]
    assert all(event.model == MODEL and event.run_s > 0 for event in recorder.steps)
    assert [(event.reason, event.num_waiting) for event in recorder.left] == [("started", 0)]


async def test_encoder_batches_and_starts_of_several_tokens_are_reported():
    recorder = Recorder()
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    async with running_engine(make_decoder(), encoder=encoder, observer=recorder) as engine:
        sequences = [make_sequence([5, 6, 7], start_ids=[BOS_ID, n, n], eos_id=None, max_new_tokens=2) for n in (8, 9)]
        await engine.run(sequences)
    assert [(event.kind, event.num_rows, event.num_tokens) for event in recorder.steps] == [
        ("encode", 2, 6),
        ("prefill", 1, 2),
        ("prefill", 1, 2),
        ("decode", 2, 2),
        ("decode", 2, 2),
    ]


async def test_sequences_that_leave_the_queue_unserved_are_reported_with_the_reason():
    recorder, decoder = Recorder(), make_decoder(num_slots=1)
    slow_down(decoder, 0.02)
    async with running_engine(decoder, observer=recorder) as engine:
        running = asyncio.ensure_future(engine.run([make_sequence([5], eos_id=None, max_new_tokens=20)]))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(engine.run([make_sequence([6], deadline=0.0)]))
        gone = asyncio.ensure_future(engine.run([make_sequence([7])]))
        await asyncio.sleep(0.01)
        gone.cancel()
        outcomes = await asyncio.gather(running, late, gone, return_exceptions=True)
    assert isinstance(outcomes[1], DeadlineError)
    assert sorted(event.reason for event in recorder.left) == ["cancelled", "expired", "started"]
    assert all(event.queue_s >= 0 for event in recorder.left)
