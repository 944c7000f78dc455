"""Which items are run on the event loop."""

import pytest

from headway_server.batching import inline_gate
from headway_server.batching.inline_gate import InlineGate


class Caller:
    """Asks again and again for items of one model; between two calls the event loop waits as long as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_inline: int) -> None:
        self._gate = InlineGate(most_inline)
        self._waited_s = 100.0
        monkeypatch.setattr(inline_gate, "_waited_s", lambda: self._waited_s)

    def ask(self, length: int = 10, *, is_idle: bool = True, pause_s: float = 0.001) -> bool:
        """Whether the item was run on the event loop."""
        self._waited_s += pause_s
        admitted = self._gate.admits(length, is_idle=is_idle)
        if admitted:
            self._gate.note_end()
        return admitted


@pytest.fixture
def caller(monkeypatch) -> Caller:
    """The only one of a model, which has asked sixteen times."""
    caller = Caller(monkeypatch, most_inline=10)
    assert not any(caller.ask() for _ in range(16))
    return caller


def test_short_items_of_a_caller_who_is_alone_are_let_in(caller):
    assert [caller.ask(length) for length in (10, 11, 1)] == [True, False, True]


def test_who_comes_while_another_is_answered_is_not_alone(caller):
    assert not caller.ask(is_idle=False)
    assert [caller.ask() for _ in range(17)] == [False] * 16 + [True]


def test_a_call_that_was_there_when_the_last_one_was_answered_is_another_callers(caller):
    assert caller.ask()
    assert not caller.ask(pause_s=0.00001)
    assert [caller.ask() for _ in range(17)] == [False] * 16 + [True]


def test_where_no_length_pays_nothing_is_let_in(monkeypatch):
    caller = Caller(monkeypatch, most_inline=0)
    assert not any(caller.ask(1) for _ in range(40))


def test_time_that_the_thread_is_at_work_is_no_pause():
    before = inline_gate._waited_s()
    sum(range(200_000))
    at_work = inline_gate._waited_s() - before
    inline_gate.time.sleep(0.05)
    assert inline_gate._waited_s() - before - at_work >= 0.045
