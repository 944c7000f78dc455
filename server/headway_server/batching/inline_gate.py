"""Decides which items are run on the event loop itself, where they are submitted.

Handing an item to a thread and hearing of it again takes some tenths of a millisecond, as long as a small model runs. A
caller who is alone need not wait for that. Several callers' items go to the batcher's threads, which run them together
and on other cores than the event loop's.

A caller is alone while nothing of the model runs when a call comes, and the event loop had nothing to do for a moment
since it answered the last one. With a second caller there would have been a call to read.
"""

from __future__ import annotations

import time

_PAUSE_S = 0.1e-3
"""What the event loop waits at least for the next call of a caller who is alone."""
_NUM_ALONE = 16
"""Calls in turn after which their caller is taken to be alone."""


class InlineGate:
    """Looks at the calls to one model. Belongs to the event loop."""

    def __init__(self, most_inline: int) -> None:
        """`most_inline` is the most that an item may take of a batch's budget."""
        self._most_inline = most_inline
        self._waited_s = 0.0  # by this thread, when it last answered
        self._num_alone = 0

    def admits(self, length: int, *, is_idle: bool) -> bool:
        """Whether an item may be run here.

        Args:
            length: What it takes of a batch's budget.
            is_idle: Whether nothing of the model waits or runs.
        """
        is_alone = is_idle and _waited_s() - self._waited_s >= _PAUSE_S
        self._num_alone = self._num_alone + 1 if is_alone else 0
        return self._num_alone > _NUM_ALONE and length <= self._most_inline

    def note_end(self) -> None:
        """Notes that an item was run here."""
        self._waited_s = _waited_s()


def _waited_s() -> float:
    """How long this thread has not been at work, since some moment."""
    return time.perf_counter() - time.thread_time()
