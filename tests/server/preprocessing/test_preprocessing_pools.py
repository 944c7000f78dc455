"""The threads of texts and of images."""

import threading

import pytest

from headway_server.observers import Call, set_current_call
from headway_server.preprocessing.pool import FairPool, image_pool, text_pool


def test_a_text_does_not_wait_for_images():
    gate, pool = threading.Event(), image_pool()
    held = [pool.submit(gate.wait, 30) for _ in range(2 * pool.num_threads)]
    try:
        assert text_pool().submit(int).result(timeout=30) == 0
    finally:
        gate.set()
    assert all(job.result() for job in held)


def test_callers_take_turns():
    pool, gate, order = FairPool("turns", 1), threading.Event(), []
    jobs = [pool.submit(gate.wait, 30)]
    for caller, count in (("much", 5), ("little", 2), ("last", 1)):
        set_current_call(Call(call_id=1, method="m", started_at=0.0, caller=caller))
        jobs += [pool.submit(order.append, f"{caller} {number}") for number in range(count)]
    set_current_call(None)
    assert "'much': 5, 'little': 2, 'last': 1" in repr(pool)
    gate.set()
    for job in jobs:
        job.result(timeout=30)
    assert order == ["much 0", "little 0", "last 0", "much 1", "little 1", "much 2", "much 3", "much 4"]
    pool.shutdown()


def test_work_that_was_cancelled_is_left_and_a_panic_is_handed_on():
    pool, gate = FairPool("broken", 1), threading.Event()
    held = pool.submit(gate.wait, 30)
    cancelled, failing, last = pool.submit(int), pool.submit(_panic), pool.submit(int)
    assert cancelled.cancel()
    gate.set()
    assert held.result(timeout=30)
    with pytest.raises(KeyboardInterrupt):
        failing.result(timeout=30)
    assert last.result(timeout=30) == 0
    pool.shutdown()


def _panic():
    raise KeyboardInterrupt
