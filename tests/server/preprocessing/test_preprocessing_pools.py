"""The threads of texts and of images."""

import threading

from headway_server.preprocessing.pool import image_pool, text_pool


def test_a_text_does_not_wait_for_images():
    gate, pool = threading.Event(), image_pool()
    held = [pool.submit(gate.wait, 30) for _ in range(2 * pool._max_workers)]
    try:
        assert text_pool().submit(int).result(timeout=30) == 0
    finally:
        gate.set()
    assert all(job.result() for job in held)
