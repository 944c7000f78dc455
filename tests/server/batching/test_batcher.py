"""The batcher, with a model that can be held up."""

import asyncio
import threading
import time

import numpy as np
import pytest
import structlog
from waiting import until

from headway_server.batching import inline_gate
from headway_server.batching.batcher import Batcher, BatchError
from headway_server.batching.run_costs import RunCosts
from headway_server.errors import DeadlineError, DrainingError, InvalidInputError
from headway_server.runtime import Cores


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

    def run(self, feeds):
        self.num_running += 1
        assert self.num_running == 1, "two runs at a time"
        self.batches.append(feeds["numbers"].tolist())
        self.entered.set()
        assert self.gate.wait(30)
        self.num_running -= 1
        if 13 in feeds["numbers"]:
            raise ArithmeticError("13")
        return np.stack([feeds["numbers"], feeds["numbers"] ** 2], axis=1)

    def finish(self, outputs):
        if 17 in outputs:
            raise ArithmeticError("17")
        return outputs


@pytest.fixture
def model() -> HoldableModel:
    return HoldableModel()


@pytest.fixture
async def batcher(model):
    batcher = Batcher(model, budget=4, name="squares")
    batcher.start()
    yield batcher
    model.gate.set()
    batcher.close()
    assert not any(thread.is_alive() for thread in batcher._threads)


def submit(batcher: Batcher, *numbers: float, deadline: float | None = None) -> asyncio.Task:
    return asyncio.create_task(batcher.submit(numbers, [1] * len(numbers), deadline=deadline))


async def hold(model: HoldableModel, batcher: Batcher) -> asyncio.Task:
    """Closes the gate and gets one call stuck in the model, so that all that follow wait."""
    model.gate.clear()
    task = submit(batcher, 1000)
    await until(model.entered.is_set)
    return task


async def test_results_come_in_the_order_of_the_call(batcher):
    results = await submit(batcher, *range(11))
    assert np.stack(results.rows).tolist() == [[n, n * n] for n in range(11)]
    assert all(run.started_at >= run.arrived_at for run in results.runs)
    assert all(run.finished_at > run.started_at for run in results.runs)


async def test_an_idle_model_runs_at_once_and_what_came_meanwhile_runs_together(batcher, model):
    first = await hold(model, batcher)
    later = [submit(batcher, n) for n in range(3)]
    await until(lambda: len(batcher._queue) == 3)
    model.gate.set()
    await asyncio.gather(first, *later)
    assert model.batches == [[1000], [0, 1, 2]]


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


async def test_items_are_prepared_by_the_batchers_threads_unless_nobody_waits(model):
    threads: set[str] = set()
    seen: list[float] = []

    def double(number: float) -> float:
        threads.add(threading.current_thread().name)
        seen.append(number)
        if number == 5:
            raise InvalidInputError("numbers[0]", "is five")
        return 2 * number

    batcher = Batcher(model, budget=4, name="squares", prepare=double)
    batcher.start()
    try:
        stuck = await hold(model, batcher)
        gone, five, kept = submit(batcher, 1), submit(batcher, 5), submit(batcher, 3)
        await until(lambda: len(batcher._queue) == 3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        model.gate.set()
        with pytest.raises(InvalidInputError, match="is five"):
            await five
        assert (await kept).rows[0].tolist() == [6, 36]
        assert (await stuck).rows[0].tolist() == [2000, 4000000]
        assert seen == [1000, 5, 3]
        assert all(name.startswith("batcher-squares") for name in threads)
        alone = submit(batcher, 5)
        with pytest.raises(InvalidInputError):  # of a batch of which nothing is left, nothing is run
            await alone
        assert (await submit(batcher, 7)).rows[0].tolist() == [14, 196]
    finally:
        model.gate.set()
        batcher.close()


async def test_what_cannot_be_prepared_for_whatever_reason_fails_its_call_alone(model):
    seen: list[float] = []

    def prepare(number: float) -> float:
        seen.append(number)
        if number == 5:
            raise TypeError("five")
        return number

    batcher = Batcher(model, budget=8, name="squares", prepare=prepare)
    batcher.start()
    try:
        stuck = await hold(model, batcher)
        waiting = submit(batcher, 0)  # takes the thread that prepares ahead, or shares the batch
        bad, good = submit(batcher, 4, 5, 6), submit(batcher, 3)
        await until(lambda: len(batcher._queue) >= 4)
        with structlog.testing.capture_logs() as logs:
            model.gate.set()
            with pytest.raises(BatchError, match="the server's log says why"):
                await bad
            assert (await good).rows[0].tolist() == [3, 9]
        await asyncio.gather(stuck, waiting)
        assert 6 not in seen, "its call had failed already"
        assert 4 not in [number for batch in model.batches for number in batch]
        assert [entry["event"] for entry in logs] == ["an item could not be prepared"]
    finally:
        model.gate.set()
        batcher.close()


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
    assert (await submit(batcher, 5)).rows[0].tolist() == [5, 25]
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
    assert [row.tolist() for row in (await stays).rows] == [[3, 9], [4, 16]]
    await first
    assert model.batches == [[1000], [3, 4]]


@pytest.mark.parametrize("bad", [13, 17])
async def test_an_error_fails_the_calls_of_its_batch_and_no_others(batcher, bad):
    with pytest.raises(BatchError, match="the server's log says why"):
        await submit(batcher, bad)
    assert np.stack((await submit(batcher, 2)).rows).tolist() == [[2, 4]]


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
        while not batcher._closed:
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
    assert np.stack((await running).rows).tolist() == [[1000, 1e6]]


async def test_many_calls_at_once_get_their_own_answers(batcher):
    calls = [list(range(start, start + 1 + start % 7)) for start in range(20, 220)]
    answers = await asyncio.gather(*(submit(batcher, *call) for call in calls))
    for call, answer in zip(calls, answers, strict=True):
        assert [row[0] for row in answer.rows] == call


class TwoAtATime:
    """Notes how many runs there are at a time; each waits for another, as long as it takes and not for ever."""

    def __init__(self, cores: Cores) -> None:
        self.together = threading.Barrier(2)
        self.batches: list[list[float]] = []
        self.knew_of_each_other: list[bool] = []
        self.cores = cores

    def collate(self, items):
        return np.array(items, np.float32)

    def run(self, numbers):
        self.batches.append(numbers.tolist())
        self.knew_of_each_other.append(self.cores.is_shared)
        self.together.wait(30)
        return numbers

    def finish(self, numbers):
        return numbers[:, np.newaxis] ** 2


class TwoLanes:
    """A session that is worth two runs at a time."""

    num_lanes = 2

    def __init__(self) -> None:
        self.cores = Cores(2, 2)


async def test_with_two_lanes_what_waits_is_run_in_two_shares_at_a_time():
    session = TwoLanes()
    model = TwoAtATime(session.cores)
    batcher = Batcher(model, budget=100, name="squares", session=session)
    batcher.start()
    results = await submit(batcher, *range(10))
    assert np.stack(results.rows).ravel().tolist() == [n * n for n in range(10)]
    assert sorted(map(len, model.batches)) == [5, 5]
    assert model.knew_of_each_other == [True, True]
    batcher.close()
    assert not session.cores.is_shared
    assert repr(session.cores) == "Cores(0 busy on 2)"


@pytest.fixture
async def inline(model, monkeypatch):
    """A batcher that refuses five, and runs items of length 1 on the event loop from the first call on."""
    monkeypatch.setattr(inline_gate, "_NUM_ALONE", 0)

    def refuse_five(number: float) -> float:
        if number == 5:
            raise InvalidInputError("numbers[0]", "is five")
        return number

    batcher = Batcher(model, budget=4, name="squares", costs=RunCosts(most_inline=1), prepare=refuse_five)
    batcher.start()
    yield batcher
    model.gate.set()
    batcher.close()


async def test_a_short_item_that_comes_alone_is_run_on_the_event_loop(inline, model, monkeypatch):
    threads: list[str] = []
    run = model.run
    monkeypatch.setattr(model, "run", lambda feeds: (threads.append(threading.current_thread().name), run(feeds))[1])
    results = await inline.submit([3], [1], deadline=None)
    assert results.rows[0].tolist() == [3, 9]
    assert all(run.started_at >= run.arrived_at for run in results.runs)
    assert all(run.finished_at > run.started_at for run in results.runs)
    await asyncio.sleep(0.001)
    for lengths in ([2], [1, 1]):
        assert len((await inline.submit([4] * len(lengths), lengths, deadline=None)).rows) == len(lengths)
    assert threads[0] == threading.current_thread().name
    assert not {threading.current_thread().name} & set(threads[1:]), "longer ones and several go to the threads"


async def test_while_a_batch_runs_a_short_item_waits_for_the_threads(inline, model):
    model.gate.clear()
    stuck = asyncio.create_task(inline.submit([1, 2], [1, 1], deadline=None))
    await until(model.entered.is_set)
    waiting = submit(inline, 3)
    await until(lambda: len(inline._queue) == 1)
    model.gate.set()
    assert (await waiting).rows[0].tolist() == [3, 9]
    await stuck


async def test_what_fails_on_the_event_loop_fails_as_in_the_threads(inline):
    with structlog.testing.capture_logs() as logs:
        for number in (13, 17):
            await asyncio.sleep(0.001)
            with pytest.raises(BatchError, match="could not be run"):
                await inline.submit([number], [1], deadline=None)
    assert [entry["event"] for entry in logs] == ["a batch failed"] * 2
    await asyncio.sleep(0.001)
    with pytest.raises(InvalidInputError, match="is five"):
        await inline.submit([5], [1], deadline=None)
    await asyncio.sleep(0.001)
    with pytest.raises(DeadlineError):
        await inline.submit([1], [1], deadline=time.monotonic() - 1)
    await asyncio.sleep(0.001)
    assert (await inline.submit([6], [1], deadline=None)).rows[0].tolist() == [6, 36]
    await asyncio.to_thread(inline.close)
    with pytest.raises(DrainingError):
        await inline.submit([1], [1], deadline=None)
