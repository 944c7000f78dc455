"""Batchers and their admission under random calls: nothing is stuck, every answer is right, every permit comes back."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import structlog

from headway_server.batching import Batcher, BatchError
from headway_server.errors import DeadlineError, DrainingError, OverloadedError
from headway_server.observers import ModelId
from headway_server.serving.permits import Admission

BUDGET = 24
LIMIT = 400
UNLUCKY = 666


@pytest.fixture(autouse=True)
def quiet():
    """Batches that fail are logged with all that was going on."""
    with structlog.testing.capture_logs():
        yield


class Squares:
    """Answers numbers with their squares, in as long as a padded batch of numbers takes; some batches fail."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self.most_work = 0

    def collate(self, items: Sequence[tuple[int, int]]) -> list[int]:
        assert items, "a batch of nobody"
        longest = max(length for _, length in items)
        if len(items) > 1:
            self.most_work = max(self.most_work, longest * len(items))
        return [number for number, _ in items]

    def run(self, prepared: list[int], _outputs: Sequence[str]) -> list[int]:
        assert self._running.acquire(blocking=False), "two runs at a time"
        try:
            time.sleep(2e-5 * len(prepared))
            if UNLUCKY in prepared:
                raise ArithmeticError("unlucky")
            return [number**2 for number in prepared]
        finally:
            self._running.release()

    def split(self, outputs: list[int], _items: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        return [np.array([square], np.float32) for square in outputs]


class Model:
    """A batcher behind an admission, as a served model has them."""

    def __init__(self, name: str) -> None:
        self.squares = Squares()
        self.batcher = Batcher(self.squares, budget=BUDGET, model=ModelId(name=name, version="1"))
        self.admission = Admission(limit=LIMIT, noun="numbers", owner=name)
        self.batcher.start()

    async def call(self, generator: random.Random) -> str:
        """Asks for random numbers; returns how it ended."""
        count = generator.choice([1, 1, 1, 2, 5, 30])
        items = [(generator.randrange(600), generator.choice([1, 2, 3, 8, 30])) for _ in range(count)]
        if generator.random() < 0.02:
            items[-1] = (UNLUCKY, 1)
        deadline = time.monotonic() + generator.uniform(-0.001, 0.01) if generator.random() < 0.2 else None
        try:
            with self.admission.admit(count):
                results = await self.batcher.submit(
                    items, [length for _, length in items], outputs=("squares",), deadline=deadline
                )
        except (BatchError, DeadlineError, DrainingError, OverloadedError) as error:
            return type(error).__name__
        assert [row.tolist() for row in results.results] == [[number**2] for number, _ in items]
        assert all(run.started_at >= run.arrived_at for run in results.runs)
        assert all(run.finished_at > run.started_at for run in results.runs)
        return "answered"

    def assert_empty(self) -> None:
        assert self.admission._num_admitted == 0
        assert self.admission._num_bytes == 0
        assert len(self.batcher._queue) == 0
        assert self.batcher._queue._waiting_work == 0
        assert self.batcher._num_taken == 0
        assert self.squares.most_work <= BUDGET


async def ask_at_random(model: Model, generator: random.Random, count: int) -> Counter[str]:
    """Makes so many calls, some at a time, of which every tenth caller goes at some moment."""
    outcomes: Counter[str] = Counter()
    slots = asyncio.Semaphore(40)

    async def one(patience_s: float | None) -> None:
        async with slots:
            try:
                async with asyncio.timeout(patience_s):
                    outcomes[await model.call(generator)] += 1
            except TimeoutError:
                outcomes["gone"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one(generator.uniform(0, 0.01) if generator.random() < 0.1 else None))
            if generator.random() < 0.3:
                await asyncio.sleep(generator.uniform(0, 0.0005))
    return outcomes


@pytest.mark.parametrize("seed", range(3))
async def test_random_calls_to_several_models_all_end_and_give_their_permits_back(seed):
    models = [Model(f"model-{number}") for number in range(3)]
    try:
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(
                *(ask_at_random(model, random.Random(f"{seed} {i}"), 400) for i, model in enumerate(models))
            )
        for model, found in zip(models, outcomes, strict=True):
            assert sum(found.values()) == 400, found
            assert found["answered"] > 40, found
            assert found["gone"], found
            assert found["DeadlineError"], found
            assert (await model.batcher.submit([(7, 1)], [1], outputs=("squares",), deadline=None)).results[
                0
            ].tolist() == [49]
            await asyncio.to_thread(model.batcher.close)
            model.assert_empty()
    finally:
        for model in models:
            await asyncio.to_thread(model.batcher.close)


@pytest.mark.parametrize("seed", range(3))
async def test_closing_amid_random_calls_leaves_none_of_them_waiting(seed):
    model, generator = Model("closed"), random.Random(seed)
    async with asyncio.timeout(60):
        asking = asyncio.create_task(ask_at_random(model, generator, 300))
        await asyncio.sleep(generator.uniform(0.005, 0.03))
        await asyncio.to_thread(model.batcher.close)
        outcomes = await asking
    assert sum(outcomes.values()) == 300, outcomes
    model.assert_empty()


async def test_one_large_call_does_not_make_small_ones_wait_for_its_end():
    model = Model("fair")
    try:
        async with asyncio.timeout(60):
            large = asyncio.create_task(
                model.batcher.submit([(1, 3)] * 3000, [3] * 3000, outputs=("squares",), deadline=None)
            )
            await asyncio.sleep(0.001)
            for _ in range(20):
                await model.batcher.submit([(2, 1)], [1], outputs=("squares",), deadline=None)
                assert not large.done(), "twenty small calls, one after another, outlasted a call worth 375 batches"
            assert len((await large).results) == 3000
    finally:
        await asyncio.to_thread(model.batcher.close)
