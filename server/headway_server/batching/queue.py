"""The items of one model that wait, and how a batch is cut from them.

Order: weighted fair queueing. An entry's rank is the work that the queue had handed out when its call came, plus the
work of the call's entries before it, stretched. So a call of one text passes most of a call of 256 that came before it,
and still nothing waits for ever, since newcomers rank higher and higher. A call also ranks behind what its own caller
has brought before: one that brings a thousand calls delays its own.

Cut: a batch has the entry of the lowest rank and the entries nearest to it in length among the next few batches' worth
that are of its group. `longest x count` stays within the budget, and the padding of each entry costs less than a
separate run.

Nothing here is thread-safe; the batcher holds a lock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

from headway_server.batching.graph import Tensors

_STRETCH: Final = 4
"""Factor on a call's own work in its ranks: newcomers pass it while they use less than 1 - 1/4 of the machine's
capacity."""
_WINDOW: Final = 4
"""Batches' worth of the lowest-ranked entries among which lengths are matched."""
_MAX_RANKS: Final = 1024
"""Number of callers' ranks before outdated ones are removed."""
_MAX_REMOVED: Final = 64
"""The heap is compacted when its removed entries exceed this and twice the waiting ones."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One item of a call: a text, an image; or several rows of tensors."""

    item: Tensors
    length: int
    """Its cost in the budget's unit, as the longest entry of a batch: the tokens of a text, 1 for an image."""
    call: object
    """The call it belongs to."""
    index: int
    """Its index in the call."""
    deadline: float | None = None
    """When its caller stops waiting, by `time.monotonic`."""
    count: int = 1
    """Its rows in a batch, each of `length`."""
    group: Hashable = None
    """Entries of different groups cannot share a batch."""
    rank: int = field(default=0, init=False)
    number: int = field(default=0, init=False)
    waits: bool = field(default=False, init=False)
    """True while it is in the queue and has not been removed."""

    @property
    def work(self) -> int:
        """Its cost without padding."""
        return self.length * self.count

    def is_expired(self, now: float) -> bool:
        """True if its caller has stopped waiting; `now` is by `time.monotonic`."""
        return self.deadline is not None and self.deadline <= now

    def __lt__(self, other: Entry) -> bool:
        return (self.rank, self.number) < (other.rank, other.number)


class BatchQueue:
    """The entries that wait."""

    def __init__(self, budget: int, max_padding: int | None = None) -> None:
        """Starts empty.

        Args:
            budget: Maximum cost of a batch: its longest entry times its entries.
            max_padding: Maximum padding of an entry in a batch; None: no limit.
        """
        self._budget = budget
        self._max_padding = budget if max_padding is None else max_padding
        self._heap: list[Entry] = []  # removed entries stay until they are popped, or are too many
        self._num_waiting = 0
        self._waiting_work = 0
        self._done_work = 0
        self._num_added = 0
        self._rank_of: dict[str, int] = {}  # by caller, the lowest of its next call

    def __len__(self) -> int:
        return self._num_waiting

    def __repr__(self) -> str:
        return f"BatchQueue({self._num_waiting} entries, {self._waiting_work} of work, budget {self._budget})"

    @property
    def fills_batch(self) -> bool:
        """True if enough waits for a whole batch."""
        return self._waiting_work >= self._budget

    def add(self, entries: list[Entry], caller: str = "") -> None:
        """Adds the entries of one call."""
        rank = self._done_work
        if caller:
            rank = max(rank, self._rank_of.get(caller, 0))
            self._rank_of[caller] = rank + sum(entry.work for entry in entries)
            if len(self._rank_of) > _MAX_RANKS:
                self._rank_of = {name: least for name, least in self._rank_of.items() if least > self._done_work}
        for entry in entries:
            entry.rank, entry.number = rank, self._num_added
            self._num_added += 1
            self._push(entry)
            rank += _STRETCH * entry.work

    def remove(self, entries: Iterable[Entry]) -> list[Entry]:
        """Removes the still waiting entries of a cancelled call, and returns them.

        Takes time in proportion to these entries, not to all waiting ones: a lost connection may cancel a thousand
        calls.
        """
        removed = [entry for entry in entries if entry.waits]
        for entry in removed:
            self._leave(entry)
        if len(self._heap) > _MAX_REMOVED + 2 * self._num_waiting:
            self._heap = [entry for entry in self._heap if entry.waits]
            heapq.heapify(self._heap)
        return removed

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self._heap, entry)
        entry.waits = True
        self._num_waiting += 1
        self._waiting_work += entry.work

    def _leave(self, entry: Entry) -> None:
        """Counts an entry out."""
        entry.waits = False
        self._num_waiting -= 1
        self._waiting_work -= entry.work

    def remove_all(self) -> list[Entry]:
        """Removes and returns all that waits."""
        removed = [entry for entry in self._heap if entry.waits]
        for entry in removed:
            self._leave(entry)
        self._heap = []
        return removed

    def take(self, now: float, num_shares: int = 1) -> tuple[list[Entry], list[Entry]]:
        """Cuts the next batch.

        Args:
            now: The time, by `time.monotonic`.
            num_shares: Threads that are idle; if less waits than a batch for each, the batch is one share of it.

        Returns:
            The batch, shortest first, empty if nothing waits; and the expired entries that were met on the way. Both
            have left the queue.
        """
        budget = self._budget
        if num_shares > 1:
            budget = min(budget, math.ceil(self._waiting_work / num_shares))
        window, expired = self._pop_window(now)
        if not window:
            return [], expired
        first = window[0]
        group = sorted((entry for entry in window if entry.group == first.group), key=lambda entry: entry.length)
        low, high = _cut(group, group.index(first), budget, self._max_padding)
        batch = group[low:high]
        taken = set(map(id, batch))
        for entry in window:
            if id(entry) not in taken:
                self._push(entry)
        self._done_work += sum(entry.work for entry in batch)
        return batch, expired

    def _pop_window(self, now: float) -> tuple[list[Entry], list[Entry]]:
        """Pops the lowest-ranked entries worth some batches, and the expired ones among them."""
        window: list[Entry] = []
        expired: list[Entry] = []
        work = 0
        while self._heap and work < _WINDOW * self._budget:
            entry = heapq.heappop(self._heap)
            if not entry.waits:
                continue
            self._leave(entry)
            if entry.is_expired(now):
                expired.append(entry)
            else:
                window.append(entry)
                work += entry.work
        return window, expired


def _cut(entries: list[Entry], start: int, budget: int, max_padding: int) -> tuple[int, int]:
    """Grows a batch from one entry to its neighbours in length.

    Args:
        entries: In ascending order of their lengths.
        start: The entry that must be in.
        budget: Maximum `longest x count`.
        max_padding: Maximum padding of an entry.

    Returns:
        The batch as a half-open range of `entries`.
    """
    low, high, count = start, start + 1, entries[start].count
    while True:
        longest = entries[high - 1].length
        shorter = entries[low - 1] if low > 0 else None
        longer = entries[high] if high < len(entries) else None
        if shorter is not None and longest * (count + shorter.count) > budget:
            shorter = None
        if longer is not None and longer.length * (count + longer.count) > budget:
            longer = None
        # The neighbour that adds less padding: a shorter one is padded itself, a longer one pads all others.
        padding_if_shorter = budget + 1 if shorter is None else (longest - shorter.length) * shorter.count
        padding_if_longer = budget + 1 if longer is None else (longer.length - longest) * count
        if shorter is not None and padding_if_shorter <= min(padding_if_longer, max_padding):
            low, count = low - 1, count + shorter.count
        elif longer is not None and padding_if_longer <= max_padding:
            high, count = high + 1, count + longer.count
        else:
            return low, high
