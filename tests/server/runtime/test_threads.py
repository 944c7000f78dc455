"""Turns and heartbeat of threads that run models, and ending them in a bounded time."""

import threading
import time

import pytest
import structlog

from headway_server.runtime.threads import Heartbeat, Turns, close_together, join_threads


@pytest.fixture
def now(monkeypatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("headway_server.runtime.threads.time.monotonic", lambda: clock[0])
    return clock


def test_a_heartbeat_counts_from_the_beginning_of_the_work_that_runs(now):
    heartbeat = Heartbeat()
    assert heartbeat.stalled_s() == 0.0
    heartbeat.beat()
    now[0] += 3
    assert heartbeat.stalled_s() == 3.0
    heartbeat.beat()
    assert heartbeat.stalled_s() == 0.0
    now[0] += 2
    heartbeat.rest()
    assert heartbeat.stalled_s() == 0.0
    heartbeat.rest()


def test_work_that_fails_is_over(now):
    heartbeat = Heartbeat()
    with pytest.raises(ZeroDivisionError), heartbeat.working():
        raise ZeroDivisionError
    now[0] += 5
    assert heartbeat.stalled_s() == 0.0


def test_of_several_threads_the_one_that_is_stuck_counts():
    heartbeat, stuck, go_on = Heartbeat(), threading.Event(), threading.Event()

    def hang() -> None:
        with heartbeat.working():
            stuck.set()
            go_on.wait()

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    stuck.wait()
    time.sleep(0.02)
    with heartbeat.working():
        assert heartbeat.stalled_s() >= 0.02
    go_on.set()
    thread.join()
    assert heartbeat.stalled_s() == 0.0


def test_threads_that_end_are_waited_for_and_one_that_hangs_is_logged_with_its_place():
    release = threading.Event()
    threads = [
        threading.Thread(target=time.sleep, args=(0.01,), name="quick", daemon=True),
        threading.Thread(target=release.wait, name="hung", daemon=True),
        threading.Thread(target=release.wait, name="never started", daemon=True),
    ]
    for thread in threads[:2]:
        thread.start()
    began = time.monotonic()
    with structlog.testing.capture_logs() as lines:
        assert not join_threads(threads, owner="topics/1", timeout_s=0.1)
    assert time.monotonic() - began < 5
    [line] = lines
    assert (line["owner"], line["thread"], line["log_level"]) == ("topics/1", "hung", "error")
    assert "wait (threading.py:" in line["at"]
    release.set()
    assert join_threads(threads, owner="topics/1", timeout_s=10)


def test_several_things_are_closed_at_once():
    together = threading.Barrier(3, timeout=30)  # which breaks where one waits for another
    closers = [lambda: bool(together.wait() >= 0)] * 3
    assert close_together(closers)
    together = threading.Barrier(3, timeout=30)
    assert not close_together([*closers[:2], lambda: together.wait() < 0])
    assert close_together([]) is close_together([lambda: True]) is True


def test_threads_take_turns_in_the_order_in_which_they_came():
    turns, entered = Turns(1), []

    def wait():
        with turns:
            entered.append("waiting")

    with turns:
        thread = threading.Thread(target=wait)
        thread.start()
        while turns._num_come < 2:
            time.sleep(0.001)
    for _ in range(100):  # as a thread that runs one batch after another
        with turns:
            entered.append("next")
    thread.join()
    assert entered[0] == "waiting"
