"""Results of a step, passed to the event loop in one call per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Elements
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sequence import FinishReason, Reply, Sequence, SequenceResult, TokenLogProbability

_Part: TypeAlias = tuple[Reply, Any, int, tuple[TokenLogProbability, ...]]
_End: TypeAlias = tuple[Reply, "SequenceResult | BaseException"]

Align: TypeAlias = Callable[[Sequence], NDArray[np.float32]]
"""Returns how much each token of a finished sequence attended to each position of its source, (T, S)."""

_DELTA_SHARE_S = 2e-3
"""Least time between two deltas of any streams. A message takes about 0.15 ms of a core on its way to the reader; at
most 500 a second are sent, so that 32 streams get one every 64 ms each."""


class Outbox:
    """Collects on the engine's thread; `flush` wakes the event loop once.

    Attributes:
        post: Calls a function with arguments on the event loop.
    """

    def __init__(self, *, stream_interval_ms: float = 0.0) -> None:
        """Sends deltas of a stream at least `stream_interval_ms` apart, by `post`, which is set before the first."""
        self.post: Callable[..., object]
        self._least_interval_s = self._interval_s = stream_interval_ms / 1e3
        self._parts: list[_Part] = []
        self._ends: list[_End] = []

    def pace(self, num_streams: int) -> None:
        """Lengthens the time between two deltas of a stream with the number of streams."""
        if self._least_interval_s:
            self._interval_s = max(self._least_interval_s, num_streams * _DELTA_SHARE_S)

    def add_token(
        self,
        sequence: Sequence,
        token_id: int,
        log_probability: float,
        top_tokens: Elements[tuple[int, float]] = (),
        *,
        align: Align | None = None,
    ) -> FinishReason | None:
        """Adds a sequence's next token and sends its new output; returns the finish reason, if it has finished.

        If the sequence wants its alignment, `align` is called at the end.
        """
        finish_reason = sequence.accept(token_id, log_probability, top_tokens)
        self.add_progress(sequence, finish_reason, align=align)
        return finish_reason

    def add_progress(
        self, sequence: Sequence, finish_reason: FinishReason | None, *, align: Align | None = None
    ) -> None:
        """Sends the new output of a sequence that has got a token, or its result; `align` is that of `add_token`."""
        result = None
        if finish_reason is not None:
            alignment = align(sequence) if align is not None and sequence.wants_alignment else None
            result = sequence.result(finish_reason, time.monotonic(), alignment)
        if sequence.wants_deltas:
            self._add_delta(sequence, is_last=result is not None)
        if result is not None:
            self.add_end(sequence.reply, result)

    def _add_delta(self, sequence: Sequence, *, is_last: bool) -> None:
        """Sends the new output, unless the last delta is too recent."""
        now = time.monotonic()
        if is_last or now - sequence.delta_at >= self._interval_s:
            sequence.delta_at = now
            self._parts.append(
                (sequence.reply, sequence.output.take(), sequence.num_new_tokens, sequence.take_tokens())
            )

    def add_end(self, reply: Reply, outcome: SequenceResult | BaseException) -> None:
        """Hands out a result, or the error instead."""
        self._ends.append((reply, outcome))

    def flush(self) -> None:
        """Sends the collected results."""
        if not self._parts and not self._ends:
            return
        parts, self._parts = self._parts, []
        ends, self._ends = self._ends, []
        self.post(_deliver, parts, ends)

    def __repr__(self) -> str:
        return f"Outbox({len(self._parts)} deltas, {len(self._ends)} ends)"


def _deliver(parts: list[_Part], ends: list[_End]) -> None:
    for reply, part, num_new_tokens, tokens in parts:
        reply.add(part, num_new_tokens, tokens)
    for reply, outcome in ends:
        reply.end(outcome)
