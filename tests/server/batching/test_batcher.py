"""The batcher, with a model that can be held up."""

import asyncio
import threading
import time

import numpy as np
import pytest
import structlog
from waiting import until

from headway_server.batching import Batcher, BatchError
from headway_server.errors import DeadlineError, DrainingError, InvalidInputError
from headway_server.observers import BatchEvent, ModelId, Observer, QueueEvent
from headway_server.runtime import Cores

SQUARES = ModelId(name="squares", version="1")


class HoldableModel:
    """Answers each number with its square; runs only while `gate` is open; notes what it ran."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[list[float]] = []
        self.num_running = 0

    def collate(self, items):
        return {"numbers": np.array(items, np.float32)}

    def run(self, feeds, outputs):
        assert outputs == ["squares"]
        self.num_running += 1
        assert self.num_running == 1, "two runs at a time"
        self.batches.append(feeds["numbers"].tolist())
        self.entered.set()
        assert self.gate.wait(30)
        self.num_running -= 1
        if 19 in feeds["numbers"]:
            raise InvalidInputError("inputs", "have 19")
        if 13 in feeds["numbers"]:
            raise ArithmeticError("13")
        return np.stack([feeds["numbers"], feeds["numbers"] ** 2], axis=1)

    def split(self, outputs, _items):
        if 17 in outputs:
            raise ArithmeticError("17")
        return list(outputs)


@pytest.fixture
def model() -> HoldableModel:
    return HoldableModel()


@pytest.fixture
async def batcher(model):
    batcher = Batcher(model, budget=4, model=SQUARES)
    batcher.start()
    yield batcher
    model.gate.set()
    batcher.close()
    assert not any(thread.is_alive() for thread in batcher._threads)


def submit(batcher: Batcher, *numbers: float, deadline: float | None = None, read=None) -> asyncio.Task:
    lengths = [1] * len(numbers)
    return asyncio.create_task(batcher.submit(numbers, lengths, outputs=("squares",), read=read, deadline=deadline))


async def hold(model: HoldableModel, batcher: Batcher) -> asyncio.Task:
    """Closes the gate and gets one call stuck in the model, so that all that follow wait."""
    model.gate.clear()
    task = submit(batcher, 1000)
    await until(model.entered.is_set)
    return task


async def test_results_come_in_the_order_of_the_call(batcher):
    results = await submit(batcher, *range(11))
    assert np.stack(results.results).tolist() == [[n, n * n] for n in range(11)]
    assert all(run.started_at >= run.arrived_at for run in results.runs)
    assert all(run.finished_at > run.started_at for run in results.runs)


async def test_an_idle_model_runs_at_once_and_what_came_meanwhile_runs_together(batcher, model):
    first = await hold(model, batcher)
    later = [submit(batcher, n) for n in range(3)]
    await until(lambda: len(batcher._queue) == 3)
    model.gate.set()
    await asyncio.gather(first, *later)
    assert model.batches == [[1000], [0, 1, 2]]


async def test_calls_that_the_event_loop_is_about_to_read_run_together(batcher, model):
    await asyncio.gather(*(submit(batcher, n) for n in range(3)))
    assert model.batches == [[0, 1, 2]]


async def test_an_event_loop_that_is_never_idle_keeps_items_for_a_moment_only(batcher):
    answered = submit(batcher, 3)

    async def keep_busy() -> None:
        while not answered.done():
            time.sleep(2e-4)  # noqa: ASYNC251 (the event loop is to be busy)
            await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(answered, keep_busy()), 10)
    [result] = answered.result().results
    assert result.tolist() == [3, 9]


async def test_a_full_batch_is_prepared_while_one_runs_and_a_part_of_one_is_not(batcher, model):
    await hold(model, batcher)
    part = [submit(batcher, n) for n in range(3)]
    await until(lambda: len(batcher._queue) == 3)
    assert batcher._num_taken == 1
    rest = submit(batcher, 3)
    await until(lambda: batcher._num_taken == 2)
    assert len(batcher._queue) == 0
    model.gate.set()
    await asyncio.gather(*part, rest)
    assert len(model.batches) == 2


async def test_outputs_are_read_by_the_batchers_threads_and_each_knows_its_place_in_the_call(batcher):
    threads: set[str] = set()

    def read(row, index):
        threads.add(threading.current_thread().name)
        return index, float(row[1])

    assert (await submit(batcher, 3, 4, 5, read=read)).results == [(0, 9), (1, 16), (2, 25)]
    assert all(name.startswith("batcher-squares") for name in threads)


async def test_an_answer_that_cannot_be_read_fails_its_call_alone(batcher, model):
    def read(row, index):
        if row[0] == 5:
            raise FloatingPointError("five")
        return float(row[1])

    stuck = await hold(model, batcher)
    bad, good = submit(batcher, 4, 5, read=read), submit(batcher, 3, read=read)
    await until(lambda: len(batcher._queue) == 3)
    with structlog.testing.capture_logs() as logs:
        model.gate.set()
        with pytest.raises(BatchError, match="the server's log says why"):
            await bad
        assert (await good).results == [9]
    await stuck
    assert [entry["event"] for entry in logs] == ["an answer could not be read"]


async def test_a_cancelled_call_never_runs(batcher, model):
    first = await hold(model, batcher)
    gone, stays = submit(batcher, 1, 2), submit(batcher, 3)
    await until(lambda: len(batcher._queue) == 3)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    model.gate.set()
    await asyncio.gather(first, stays)
    assert model.batches == [[1000], [3]]


async def test_a_call_past_its_deadline_never_runs_and_is_told(batcher, model):
    first = await hold(model, batcher)
    late = submit(batcher, 1, 2, deadline=time.monotonic())
    stays = submit(batcher, 3, deadline=time.monotonic() + 60)
    await until(lambda: len(batcher._queue) == 3)
    model.gate.set()
    with pytest.raises(DeadlineError):
        await late
    await asyncio.gather(first, stays)
    assert model.batches == [[1000], [3]]


async def test_a_caller_that_goes_when_its_batch_is_prepared_costs_no_run(batcher, model):
    first = await hold(model, batcher)
    gone = [submit(batcher, n) for n in (1, 2, 3, 4)]
    await until(lambda: batcher._num_taken == 2)
    for call in gone:
        call.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    model.gate.set()
    await first
    assert (await submit(batcher, 5)).results[0].tolist() == [5, 25]
    assert model.batches == [[1000], [5]]


async def test_who_is_too_late_when_the_batch_is_prepared_is_left_out_of_it(batcher, model):
    first = await hold(model, batcher)
    late = submit(batcher, 1, deadline=time.monotonic() + 0.05)
    gone, stays = submit(batcher, 2), submit(batcher, 3, 4, deadline=time.monotonic() + 60)
    await until(lambda: batcher._num_taken == 2)
    gone.cancel()
    await asyncio.sleep(0.06)
    model.gate.set()
    with pytest.raises(DeadlineError):
        await late
    assert [row.tolist() for row in (await stays).results] == [[3, 9], [4, 16]]
    await first
    assert model.batches == [[1000], [3, 4]]


@pytest.mark.parametrize("bad", [13, 17])
async def test_an_error_fails_the_calls_of_its_batch_and_no_others(batcher, bad):
    with pytest.raises(BatchError, match="the server's log says why"):
        await submit(batcher, bad)
    assert np.stack((await submit(batcher, 2)).results).tolist() == [[2, 4]]


async def test_inputs_that_the_graph_refuses_fail_their_own_call_and_the_rest_is_answered(batcher, model):
    first = await hold(model, batcher)
    calls = [submit(batcher, 2), submit(batcher, 19), submit(batcher, 3)]
    await asyncio.sleep(0)
    model.gate.set()
    await first
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert str(found[1]) == "inputs: have 19"
    assert [found[0].results[0].tolist(), found[2].results[0].tolist()] == [[2, 4], [3, 9]]
    assert model.batches == [[1000], [2, 19, 3], [2], [19], [3]]
    assert (await submit(batcher, 4)).results[0].tolist() == [4, 16]


async def test_an_error_is_logged_once_for_all_calls_of_its_batch(batcher, model):
    first = await hold(model, batcher)
    with structlog.testing.capture_logs() as lines:
        calls = [submit(batcher, n) for n in (13, 14, 15)]
        await until(lambda: len(batcher._queue) == 3)
        model.gate.set()
        assert all(isinstance(error, BatchError) for error in await asyncio.gather(*calls, return_exceptions=True))
    await first
    [line] = lines
    assert (line["event"], line["model"], line["num_items"]) == ("a batch failed", "squares", 3)
    assert isinstance(line["exc_info"], ArithmeticError)


async def test_a_call_worth_two_batches_wakes_both_threads(batcher, model):
    model.gate.clear()
    call = submit(batcher, *range(8))
    await until(lambda: batcher._num_taken == 2)
    model.gate.set()
    await call


async def test_closing_fails_what_waits_and_refuses_what_comes(batcher, model):
    running = await hold(model, batcher)
    waiting = submit(batcher, 1)
    await until(lambda: len(batcher._queue) == 1)

    def open_gate_once_closed() -> None:
        while not batcher._is_closed:
            time.sleep(0.001)
        model.gate.set()

    opener = threading.Thread(target=open_gate_once_closed)
    opener.start()
    batcher.close()
    opener.join()
    with pytest.raises(DrainingError):
        await waiting
    with pytest.raises(DrainingError):
        await submit(batcher, 2)
    assert np.stack((await running).results).tolist() == [[1000, 1e6]]


async def test_closing_leaves_a_run_that_hangs_behind_and_fails_its_call(batcher, model):
    stuck = await hold(model, batcher)
    with structlog.testing.capture_logs() as logs:
        began = time.monotonic()
        assert not await asyncio.to_thread(batcher.close, 0.1)
        assert time.monotonic() - began < 5
        with pytest.raises(DrainingError):
            await stuck
    assert [entry["event"] for entry in logs] == ["a thread does not end and is left behind"]
    model.gate.set()
    assert await asyncio.to_thread(batcher.close)


@pytest.mark.parametrize("place", ["collate", "run", "split"])
async def test_a_thread_that_ends_by_itself_fails_every_call_and_the_model_says_so(batcher, model, monkeypatch, place):
    class Panic(BaseException):
        """As of a library that is written in Rust."""

    def panic(*_):
        model.gate.wait(30)
        raise Panic

    running = await hold(model, batcher)
    monkeypatch.setattr(model, place, panic)
    calls = [submit(batcher, n) for n in range(9)]
    await until(lambda: len(batcher._queue) > 0)
    with structlog.testing.capture_logs() as logs:
        model.gate.set()
        for call in (*calls, *([running] if place == "split" else [])):
            with pytest.raises(BatchError):
                await asyncio.wait_for(call, 30)
    assert "a thread of a model has ended by itself" in [entry["event"] for entry in logs]
    assert not batcher.is_alive
    with pytest.raises(BatchError):
        await submit(batcher, 1)


async def test_what_runs_is_seen_to_stall_and_what_waits_is_not(batcher, model):
    assert batcher.stalled_s() == 0
    stuck = await hold(model, batcher)
    await until(lambda: batcher.stalled_s() > 0.05)
    model.gate.set()
    await stuck
    await until(lambda: batcher.stalled_s() == 0)


class Noting(Observer):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.left: list[QueueEvent] = []
        self.batches: list[BatchEvent] = []

    def left_queue(self, event: QueueEvent) -> None:
        self.left.append(event)

    def batch_finished(self, event: BatchEvent) -> None:
        self.batches.append(event)


async def test_an_observer_is_told_of_every_item_that_leaves_the_queue_and_of_every_batch(model):
    observer = Noting()
    batcher = Batcher(model, budget=8, model=SQUARES, observer=observer)
    batcher.start()
    try:
        stuck = await hold(model, batcher)
        gone, late = submit(batcher, 1, 2), submit(batcher, 3, deadline=time.monotonic())
        stays = asyncio.create_task(batcher.submit([4, 5], [1, 3], outputs=("squares",), deadline=None))
        await until(lambda: len(batcher._queue) == 5)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        model.gate.set()
        await asyncio.gather(stuck, late, stays, return_exceptions=True)
    finally:
        batcher.close()
    assert sorted(event.reason for event in observer.left) == ["cancelled"] * 2 + ["expired"] + ["started"] * 3
    assert all(event.queue_s >= 0 and event.model == SQUARES for event in observer.left)
    assert observer.left[-1].num_waiting == 0
    first, second = observer.batches
    assert (first.num_items, first.length, first.num_padded) == (1, 1, 0)
    assert (second.num_items, second.length, second.num_padded) == (2, 3, 2)
    assert first.run_s > 0


async def test_many_calls_at_once_get_their_own_answers(batcher):
    calls = [list(range(start, start + 1 + start % 7)) for start in range(20, 220)]
    answers = await asyncio.gather(*(submit(batcher, *call) for call in calls))
    for call, answer in zip(calls, answers, strict=True):
        assert [row[0] for row in answer.results] == call


class TwoAtATime:
    """Notes how many runs there are at a time; each waits for another, as long as it takes and not for ever."""

    def __init__(self, cores: Cores) -> None:
        self.together = threading.Barrier(2)
        self.batches: list[list[float]] = []
        self.knew_of_each_other: list[bool] = []
        self.cores = cores

    def collate(self, items):
        return np.array(items, np.float32)

    def run(self, numbers, _outputs):
        self.batches.append(numbers.tolist())
        self.knew_of_each_other.append(self.cores.is_shared)
        self.together.wait(30)
        return numbers

    def split(self, numbers, _items):
        return list(numbers[:, np.newaxis] ** 2)


class TwoLanes:
    """A session that is worth two runs at a time."""

    num_lanes = 2

    def __init__(self) -> None:
        self.cores = Cores(2)


async def test_with_two_lanes_what_waits_is_run_in_two_shares_at_a_time():
    session = TwoLanes()
    model = TwoAtATime(session.cores)
    batcher = Batcher(model, budget=100, model=SQUARES, session=session)
    batcher.start()
    results = await submit(batcher, *range(10))
    assert np.stack(results.results).ravel().tolist() == [n * n for n in range(10)]
    assert sorted(map(len, model.batches)) == [5, 5]
    assert model.knew_of_each_other == [True, True]
    batcher.close()
    assert not session.cores.is_shared
    assert repr(session.cores) == "Cores(0 busy on 2)"
