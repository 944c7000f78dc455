"""Permits."""

import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from headway_server.errors import InvalidInputError, OverloadedError
from headway_server.serving.permits import Admission, MeasuredPace


@pytest.fixture
def admission() -> Admission:
    return Admission(limit=10, noun="texts", owner="topics")


async def test_a_full_model_refuses_and_says_when_to_come_back(admission):
    with admission.admit(8):
        with pytest.raises(
            OverloadedError, match="topics has 8 texts waiting, the limit is 10 and this call brings 3"
        ) as e:
            admission.admit(3).__enter__()
        assert 0 < e.value.retry_after_s <= 30
        with admission.admit(2):
            pass
    with admission.admit(10):
        pass


async def test_bytes_are_bounded_beside_the_count():
    admission = Admission(limit=10, noun="images", owner="colours", max_bytes=100)
    message = "colours has 60 bytes of images waiting, the limit is 100 and this call brings 41"
    with admission.admit(1, 60):
        with pytest.raises(OverloadedError, match=message) as e:
            admission.admit(1, 41).__enter__()
        assert 0 < e.value.retry_after_s <= 30
        with admission.admit(1, 40):
            pass
    with admission.admit(1, 100):
        pass


async def test_a_call_of_more_bytes_than_the_limit_is_admitted_alone():
    admission = Admission(limit=10, noun="images", owner="colours", max_bytes=100)
    with admission.admit(1, 101), pytest.raises(OverloadedError):
        admission.admit(1, 1).__enter__()
    with admission.admit(1, 1), pytest.raises(OverloadedError):
        admission.admit(1, 101).__enter__()


async def test_a_permit_grows_as_long_as_others_leave_room_and_always_shrinks():
    admission = Admission(limit=None, noun="masks", owner="cells", max_bytes=100)
    alone = admission.admit(0)
    alone.resize(2, 150)  # as a call of more is admitted, when nothing else is
    alone.resize(3, 300)
    alone.resize(1, 120)
    alone.resize(1, 60)
    with admission.admit(1, 30) as other:
        with pytest.raises(OverloadedError, match="has 30 bytes of masks waiting, the limit is 100 and this call bri"):
            alone.resize(2, 71)
        assert (admission.num_admitted, admission._num_bytes) == (2, 90), "what was held is still held"
        alone.resize(2, 70)
        other.resize(0, 0)
        alone.resize(5, 200)
    alone.release()
    assert (admission.num_admitted, admission._num_bytes) == (0, 0)


async def test_a_permit_is_given_back_after_an_error(admission):
    with pytest.raises(ZeroDivisionError), admission.admit(10):
        raise ZeroDivisionError
    with admission.admit(10):
        pass


class Steady:
    """A pace of ten pieces of work a second, one at a time."""

    def queue_s(self, ahead, _):
        return ahead / 10

    def service_s(self, work):
        return work / 10


@pytest.fixture
def paced() -> Admission:
    return Admission(limit=1000, noun="texts", owner="topics", pace=Steady())


async def test_what_cannot_be_answered_in_time_is_refused_at_once_with_an_honest_hint(paced):
    with paced.admit(100):
        with paced.admit(1, deadline=time.monotonic() + 20):
            pass
        with pytest.raises(OverloadedError, match=r"would answer in 11\.6. s, and the call has 5\.00 s left") as e:
            paced.admit(1, deadline=time.monotonic() + 5.004).__enter__()
        assert 6 < e.value.retry_after_s < 7
        with paced.admit(1):  # it did not say how long it would wait
            pass
    with paced.admit(1, deadline=time.monotonic() + 0.01):  # alone, it may try
        pass


async def test_a_full_queue_says_how_long_it_is():
    admission = Admission(limit=100, noun="texts", owner="topics", pace=Steady())
    with admission.admit(100), pytest.raises(OverloadedError) as e:
        admission.admit(1).__enter__()
    assert e.value.retry_after_s == 10


async def test_a_caller_waits_for_no_more_of_anothers_queue_than_its_own(paced):
    with paced.admit(500, caller="greedy"):
        with paced.admit(2, deadline=time.monotonic() + 1, caller="patient"):
            pass
        with pytest.raises(OverloadedError):
            paced.admit(2, deadline=time.monotonic() + 1, caller="greedy").__enter__()


async def test_permits_are_given_back_one_by_one(paced):
    with paced.admit(4, 40, caller="a") as permit:
        permit.release(1)
        assert (paced.num_admitted, paced._num_bytes, paced._work_of) == (3, 30, {"a": 3.0})
        permit.release(1)
        permit.release(5)
        assert (paced.num_admitted, paced._num_bytes, paced._work_of) == (0, 0, {})
        permit.release(1)
    assert (paced.num_admitted, paced._num_bytes) == (0, 0)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("headway_server.serving.permits.time.monotonic", lambda: now.s)
    return now


def test_a_measured_pace_is_the_best_of_late_where_there_is_little_to_do(clock):
    pace = MeasuredPace()
    assert pace.queue_s(10, 1) is None
    for _ in range(10):
        clock.s += 0.1
        pace.note(10, left=5)
    assert pace.queue_s(100, 1) == pytest.approx(1.0, rel=0.1)
    for _ in range(3):
        clock.s += 1
        pace.note(1, left=0.05)
    assert pace.queue_s(100, 1) == pytest.approx(1.0, rel=0.15)


def test_a_measured_pace_is_what_is_answered_while_there_is_always_work(clock):
    pace = MeasuredPace()
    for each in (10, 5):
        for _ in range(30):
            clock.s += 0.1
            pace.note(each, left=100)
        assert pace.queue_s(100, 1) == pytest.approx(10 / each, rel=0.1)


def test_calls_that_were_given_up_do_not_make_a_model_seem_quick(clock):
    pace = MeasuredPace()
    admission = Admission(limit=1000, noun="texts", owner="topics", pace=pace)
    with admission.admit(50):
        for _ in range(30):
            clock.s += 0.1
            with admission.admit(1):
                pass
            with suppress(TimeoutError), admission.admit(9):
                raise TimeoutError
    assert pace.queue_s(100, 1) == pytest.approx(10.0, rel=0.1)


def test_calls_that_are_late_make_estimates_more_careful_and_others_less_so(clock):
    admission = Admission(limit=1000, noun="texts", owner="topics", pace=Steady())

    def takes(work):
        """Returns whether a call of five seconds is taken behind so much work."""
        with admission.admit(work):
            try:
                with admission.admit(1, deadline=clock.s + 5):
                    return True
            except OverloadedError:
                return False

    def fails(error, *, late, queued=5, left_s=2.0):
        """Lets calls in that have `left_s`, behind so much work, and ends them with an error."""
        with admission.admit(queued):
            for _ in range(50):
                with suppress(type(error)), admission.admit(1, deadline=clock.s + left_s):
                    clock.s += 2 * left_s * late
                    raise error

    assert takes(40)
    fails(OverloadedError("no memory for it", 1.0), late=False)
    fails(OverloadedError("no memory for it", 1.0), late=True)
    fails(InvalidInputError("texts[0]", "is no text"), late=False)
    fails(TimeoutError(), late=True, queued=0, left_s=1e-3)  # nothing was ahead, so nothing was estimated
    assert takes(40)
    fails(TimeoutError(), late=True)
    assert not takes(40)
    for _ in range(5000):
        admission.note_in_time()
    fails(OverloadedError("no time left", 1.0, is_late=True), late=False)
    assert not takes(40)
    assert takes(20)
    for _ in range(5000):
        with admission.admit(1, deadline=clock.s + 1):
            pass
    assert takes(40)


def test_silence_is_no_time_that_a_model_takes(clock):
    pace = MeasuredPace()
    admission = Admission(limit=1000, noun="texts", owner="topics", pace=pace)

    def answers(count, each_s):
        for _ in range(count):
            clock.s += 45
            with admission.admit(1):
                clock.s += each_s

    with admission.admit(20) as permit:
        for _ in range(20):
            clock.s += 0.1
            permit.release(1)
    answers(20, 0.1)
    assert pace.queue_s(100, 1) == pytest.approx(10.0, rel=0.1)
    with admission.admit(8) as permit:  # the model hangs for a minute, and nobody waits for it to the end
        for _ in range(8):
            clock.s += 8
            permit.release(1, is_done=False)
    assert pace.queue_s(100, 1) > 100
    answers(10, 0.1)  # one at a time, since others would be refused
    assert pace.queue_s(100, 1) == pytest.approx(10.0, rel=0.1)
