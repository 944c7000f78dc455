"""Requests are sent a few at a time, answers come in the order of the inputs."""

import random
import threading
import time

import pytest

from headway_training.served.sender import Sender


def test_answers_come_in_the_order_of_the_inputs():
    generator = random.Random(0)
    pauses = [generator.random() / 200 for _ in range(23)]
    seen = []

    def double(batch):
        time.sleep(pauses[batch[0]])
        return [2 * item for item in batch]

    sender = Sender(batch_size=3, concurrency=4, begin=seen.append, advance=seen.append)
    assert sender.send(range(23), double) == [2 * item for item in range(23)]
    assert seen[0] == 23
    assert sum(seen[1:]) == 23


def test_no_more_requests_are_on_their_way_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def call(batch):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return batch

    Sender(batch_size=1, concurrency=3).send(range(20), call)
    assert most <= 3


def test_nothing_is_sent_after_a_failure():
    sent = []

    def call(batch):
        sent.append(batch)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        Sender(batch_size=1, concurrency=2).send(range(100), call)
    assert len(sent) <= 2
    assert Sender().send([], call) == []
