"""The threads of a model, whatever they compute: what is submitted is answered, however they end."""

import asyncio
import threading

import pytest
from structlog.testing import capture_logs

from headway_server.errors import DrainingError, ModelRunError
from headway_server.runtime import Cores
from headway_server.runtime.worker import Pending, SteppingWorker

SECONDS = 20.0


class Adder(SteppingWorker[tuple[Pending[int], int]]):
    """Adds one to numbers, one a step; a negative one ends the thread. While the gate is closed, a step hangs."""

    def __init__(self, **options):
        super().__init__("adder", ModelRunError, **options)
        self.waiting, self.gate, self.began = [], threading.Event(), threading.Event()
        self.gate.set()

    @property
    def has_work(self):
        return bool(self.waiting)

    def _take_in(self, message):
        self.waiting.append(message)

    def _step(self):
        pending, number = self.waiting.pop(0)
        self.began.set()
        self.gate.wait(SECONDS)
        if number < 0:
            raise SystemExit
        self._post(pending.end, number + 1)

    def _release(self):
        self.waiting.clear()

    def submit(self, *numbers):
        """Returns what the numbers wait for."""
        submitted = [Pending() for _ in numbers]
        for pending, number in zip(submitted, numbers, strict=True):
            self._submit([pending], (pending, number))
        return [pending.result for pending in submitted]


async def outcomes(results):
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*results, return_exceptions=True)


async def test_what_is_submitted_is_answered_until_the_worker_is_closed():
    cores = Cores(2)
    worker = Adder(busy_lanes=cores.busy_lanes())
    assert not worker.is_alive
    worker.start()
    assert worker.is_alive
    assert await outcomes(worker.submit(1, 2, 3)) == [2, 3, 4]
    assert await asyncio.to_thread(worker.close)
    assert (worker.is_alive, worker.state, worker.stalled_s(), cores.num_busy) == (False, "closed", 0.0, 0)
    with pytest.raises(DrainingError):
        worker.submit(4)


async def test_a_thread_that_ends_by_an_error_is_told_to_every_caller_and_in_the_log():
    worker = Adder(busy_lanes=Cores(2).busy_lanes())
    worker.start()
    worker.gate.clear()
    results = worker.submit(1, -1, 2)
    with capture_logs() as logs:
        worker.gate.set()
        found = await outcomes(results)
        worker._threads[0].join(SECONDS)
    assert found[0] == 2
    assert [type(error) for error in found[1:]] == [ModelRunError] * 2
    assert isinstance(found[1].__cause__, SystemExit)
    assert "a thread of a model has ended by itself" in [entry["event"] for entry in logs]
    assert (worker.is_alive, worker.state, worker.stalled_s()) == (False, "failed", 0.0)
    with pytest.raises(ModelRunError, match="has stopped"):
        worker.submit(4)
    assert await asyncio.to_thread(worker.close)


async def test_what_hangs_is_left_behind_and_its_callers_are_not():
    worker = Adder()
    worker.start()
    worker.gate.clear()
    results = worker.submit(1, 2)
    await asyncio.to_thread(worker.began.wait, SECONDS)
    assert worker.is_alive
    with capture_logs() as logs:
        assert not await asyncio.to_thread(worker.close, 0.05)
    assert logs[0]["owner"] == "adder"
    assert [type(error) for error in await outcomes(results)] == [DrainingError] * 2
    worker.gate.set()
    worker._threads[0].join(SECONDS)


async def test_the_first_end_counts_and_nobody_hears_of_one_after_the_caller_has_gone():
    kept, gone = Pending(), Pending()
    kept.end(1)
    kept.end(ValueError())
    gone.result.cancel()
    gone.end(2)
    assert await kept.result == 1
    assert gone.result.cancelled()
