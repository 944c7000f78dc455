"""Threads bounded by what they carry."""

import threading

import pytest

from headway_server.preprocessing.gate import Gate


class Carrier(threading.Thread):
    """Holds a weight until it is told to go."""

    def __init__(self, gate: Gate, weight: int) -> None:
        super().__init__(daemon=True)
        self._gate, self._weight = gate, weight
        self.inside, self.go = threading.Event(), threading.Event()

    def run(self) -> None:
        with self._gate.hold(self._weight, 10):
            self.inside.set()
            assert self.go.wait(30)

    def leave(self) -> None:
        self.go.set()
        self.join()


@pytest.fixture
def enter():
    gate = Gate()

    def start(weight: int) -> Carrier:
        carrier = Carrier(gate, weight)
        carrier.start()
        return carrier

    return start


def test_what_fits_passes_and_what_does_not_waits_for_its_turn(enter):
    first, second = enter(6), enter(4)
    assert first.inside.wait(30)
    assert second.inside.wait(30)
    third = enter(5)
    assert not third.inside.wait(0.05)
    second.leave()
    assert not third.inside.wait(0.05)
    first.leave()
    assert third.inside.wait(30)
    third.leave()


def test_what_is_above_the_limit_passes_alone(enter):
    large = enter(11)
    assert large.inside.wait(30)
    small = enter(1)
    assert not small.inside.wait(0.05)
    large.leave()
    assert small.inside.wait(30)
    small.leave()


def test_an_error_gives_back_what_was_held():
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.hold(10, 10):
        raise ZeroDivisionError
    with gate.hold(10, 10):
        assert repr(gate) == "Gate(10 held)"
