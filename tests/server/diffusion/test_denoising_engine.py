"""The engine: images at different steps in one batch, which come and go between any two steps."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
from waiting import until

from headway_server.diffusion import (
    Denoising,
    DenoisingEngine,
    DenoisingError,
    DiffusionSampler,
    Trajectory,
    TrigonometricSchedule,
    draw_noise,
)
from headway_server.diffusion.samplers import guide
from headway_server.diffusion.schedules import EVERYWHERE
from headway_server.errors import DeadlineError, DrainingError
from headway_server.observers import ModelId, Observer

SHAPE = (2, 3, 3)
MODEL = ModelId("squares", "1")


def velocity(latent, timestep, label):
    """Of one row or several: elementwise, so that a row is the same in any company."""
    times, labels = (np.asarray(one, np.float32).reshape(-1, 1, 1, 1) for one in (timestep, label))
    return np.tanh(latent + labels * np.float32(0.3)) * (np.float32(1.5) - times)


class Denoiser:
    """Notes the labels of each run. While it is held, a run waits."""

    def __init__(self):
        self.runs = []
        self.gate = threading.Event()
        self.gate.set()
        self.waits = threading.Event()
        self.failing_label = None

    def __call__(self, inputs):
        self.waits.set()
        assert self.gate.wait(10)
        self.waits.clear()
        labels = inputs["label"].tolist()
        self.runs.append(labels)
        if self.failing_label in labels:
            raise RuntimeError("no")
        found = velocity(inputs["latent"], inputs["timestep"], inputs["label"])
        found[inputs["label"] == 99] = np.nan
        return found


class Events(Observer):
    def __init__(self):
        self.steps, self.left = [], []

    def step_finished(self, event):
        self.steps.append(event)

    def left_queue(self, event):
        self.left.append(event.reason)


@pytest.fixture
async def denoiser():
    return Denoiser()


@pytest.fixture
async def events():
    return Events()


@pytest.fixture
async def engine(denoiser, events):
    made = DenoisingEngine(denoiser, max_rows=6, model=MODEL, observer=events)
    made.start()
    yield made
    denoiser.gate.set()
    assert made.close()


def denoising(seed=0, steps=5, label=1, guidance=1.0, sampler=DiffusionSampler.DDIM, *, deadline=None, progress=False):
    trajectory = Trajectory(draw_noise(seed, SHAPE), TrigonometricSchedule().steps(steps, sampler))
    return Denoising(
        trajectory,
        condition={"label": np.array(label)},
        other_condition={"label": np.array(0)},
        guidance=guidance,
        deadline=deadline,
        wants_progress=progress,
    )


def naive(seed, steps, label, guidance, sampler):
    """One image, step by step, alone."""
    trajectory = Trajectory(draw_noise(seed, SHAPE), TrigonometricSchedule().steps(steps, sampler))
    while not trajectory.is_finished:
        found = velocity(trajectory.latent[None], trajectory.time, label)[0]
        if guidance != 1:
            found = guide(found, velocity(trajectory.latent[None], trajectory.time, 0)[0], guidance)
        trajectory.advance(found)
    return trajectory.latent


async def test_random_callers_get_what_they_would_alone(engine, denoiser):
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 (shown where the test fails)
    generator = random.Random(seed)

    async def call(number):
        count = generator.randrange(1, 4)
        steps, label = generator.randrange(1, 9), generator.randrange(1, 5)
        guidance, sampler = generator.choice((1.0, 2.5)), generator.choice(sorted(EVERYWHERE))
        await asyncio.sleep(generator.random() / 50)
        denoisings = [denoising(number + i, steps, label, guidance, sampler) for i in range(count)]
        task = asyncio.create_task(engine.run(denoisings, f"caller {number % 3}"))
        if generator.random() < 0.2:
            await asyncio.sleep(generator.random() / 100)
            task.cancel()
            await asyncio.wait([task])
            return
        for i, latent in enumerate(await task):
            np.testing.assert_array_equal(latent, naive(number + i, steps, label, guidance, sampler))

    async with asyncio.timeout(30):
        await asyncio.gather(*(call(10 * number) for number in range(40)))
    assert max(map(len, denoiser.runs)) <= 6
    await until(lambda: engine.usage().num_waiting == 0)
    await until(lambda: engine.stalled_s() == 0)


async def test_who_comes_joins_the_next_step_and_who_is_done_leaves(engine, denoiser):
    denoiser.gate.clear()
    first = asyncio.create_task(engine.run([denoising(1, steps=4, label=1)]))
    await until(denoiser.waits.is_set)  # in its first step
    second = asyncio.create_task(engine.run([denoising(2, steps=2, label=2)]))
    await asyncio.sleep(0.01)
    denoiser.gate.set()
    await asyncio.gather(first, second)
    assert [set(labels) for labels in denoiser.runs] == [{1}, {1, 2}, {1, 2}, {1}]


async def test_a_guided_image_takes_two_rows(engine, denoiser, events):
    await engine.run([denoising(1, steps=1, label=3, guidance=2.0)])
    await engine.run([denoising(1, steps=1, label=4)])
    assert denoiser.runs == [[3, 0], [4]]
    assert [event.num_rows for event in events.steps] == [2, 1]
    assert {event.kind for event in events.steps} == {"denoise"}


async def test_a_short_call_does_not_wait_for_a_long_one(engine, denoiser):
    denoiser.gate.clear()
    long = asyncio.create_task(engine.run([denoising(n, steps=250, label=1) for n in range(12)], "anna"))
    await until(denoiser.waits.is_set)
    short = asyncio.create_task(engine.run([denoising(1, steps=5, label=2)], "bert"))
    await asyncio.sleep(0.01)
    denoiser.gate.set()
    await short
    long.cancel()
    turns = [number for number, labels in enumerate(denoiser.runs) if 2 in labels]
    assert len(turns) == 5
    assert turns[-1] < 25  # of the 500 runs that the other call takes


async def test_a_caller_who_goes_frees_its_rows_before_the_next_step(engine, denoiser, events):
    denoiser.gate.clear()
    task = asyncio.create_task(engine.run([denoising(1, steps=100, label=1)]))
    await until(denoiser.waits.is_set)
    task.cancel()
    await asyncio.wait([task])
    other = asyncio.create_task(engine.run([denoising(2, steps=1, label=2)]))
    await asyncio.sleep(0.01)
    denoiser.gate.set()
    await other
    assert [set(labels) for labels in denoiser.runs] == [{1}, {2}]


async def test_a_deadline_ends_an_image_between_two_steps(engine, denoiser):
    slow = denoising(1, steps=250, deadline=time.monotonic() + 0.2)
    denoiser.gate.clear()
    task = asyncio.create_task(engine.run([slow]))
    await until(denoiser.waits.is_set)
    await asyncio.sleep(0.25)
    denoiser.gate.set()
    with pytest.raises(DeadlineError, match="after 1 of 250 steps"):
        await task


async def test_one_that_waits_past_its_deadline_never_runs(engine, denoiser, events):
    with pytest.raises(DeadlineError, match="after 0 of 5 steps"):
        await engine.run([denoising(1, deadline=time.monotonic() - 1)])
    assert denoiser.runs == []
    assert events.left == ["expired"]


async def test_a_step_that_fails_ends_its_own_images_and_no_others(engine, denoiser):
    denoiser.failing_label = 7
    with pytest.raises(DenoisingError, match="log says why"):
        await engine.run([denoising(1, label=7)])
    np.testing.assert_array_equal((await engine.run([denoising(1)]))[0], naive(1, 5, 1, 1.0, DiffusionSampler.DDIM))
    assert engine.is_alive


async def test_numbers_that_are_none_end_their_own_image(engine):
    bad = asyncio.create_task(engine.run([denoising(1, label=99)]))
    [good] = await engine.run([denoising(2)])
    np.testing.assert_array_equal(good, naive(2, 5, 1, 1.0, DiffusionSampler.DDIM))
    with pytest.raises(DenoisingError):
        await bad


async def test_a_stream_tells_of_its_steps_and_a_slow_reader_of_the_newest(engine):
    one = denoising(3, steps=6, progress=True)
    made = [progress.num_made async for progress in engine.stream(one)]
    assert made == sorted(set(made))
    np.testing.assert_array_equal(one.result.result(), naive(3, 6, 1, 1.0, DiffusionSampler.DDIM))
    slow, seen = denoising(4, steps=200, progress=True), []
    async for progress in engine.stream(slow):
        seen.append(progress.num_made)
        await asyncio.sleep(0.01)
    assert len(seen) < 200


async def test_closing_fails_what_runs_and_what_comes(denoiser):
    engine = DenoisingEngine(denoiser, max_rows=2, model=MODEL)
    engine.start()
    denoiser.gate.clear()
    task = asyncio.create_task(engine.run([denoising(1, steps=250), denoising(2, steps=250)]))
    await until(denoiser.waits.is_set)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    await until(lambda: not engine.is_alive)
    denoiser.gate.set()
    assert await closing
    with pytest.raises(DrainingError):
        await task
    with pytest.raises(DrainingError):
        await engine.run([denoising(3)])
    assert not engine.is_alive


async def test_a_step_that_hangs_is_left_behind_and_its_images_fail(denoiser):
    engine = DenoisingEngine(denoiser, max_rows=2, model=MODEL)
    engine.start()
    denoiser.gate.clear()
    task = asyncio.create_task(engine.run([denoising(1)]))
    await until(denoiser.waits.is_set)
    await until(lambda: engine.stalled_s() > 0)
    assert not await asyncio.to_thread(engine.close, 0.05)
    with pytest.raises(DrainingError):
        await task
    denoiser.gate.set()
