"""What a step hands out, carried to the event loop in one call a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Elements
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.decoding.reply import Reply
from headway_server.decoding.sequence import Sequence, SequenceResult, TokenLogProbability

_Text: TypeAlias = tuple[Reply, str, int, tuple[TokenLogProbability, ...]]
_End: TypeAlias = tuple[Reply, "SequenceResult | BaseException"]

Align: TypeAlias = Callable[[Sequence], NDArray[np.float32]]
"""Returns how much each token of a finished translation attended to each of its source, (T, S)."""

_log = structlog.get_logger(__name__)

_PIECE_SHARE_S = 2e-3
"""Least time a piece, whatever stream it belongs to. Between one of ours and its reader, a message takes about 0.15 ms
of a core; 500 a second are all that is spent on them, and 32 streams get one every 64 ms."""


class Outbox:
    """Collects on the engine's thread; `flush` wakes the event loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, stream_interval_ms: float = 0.0) -> None:
        """Sends to `loop`; pieces of a stream not more often than every `stream_interval_ms`."""
        self._loop = loop
        self._least_interval_s = self._interval_s = stream_interval_ms / 1e3
        self._texts: list[_Text] = []
        self._ends: list[_End] = []

    def pace(self, num_streams: int) -> None:
        """Lets the time between two pieces of a stream grow with the streams there are."""
        if self._least_interval_s:
            self._interval_s = max(self._least_interval_s, num_streams * _PIECE_SHARE_S)

    def add_token(
        self,
        sequence: Sequence,
        token_id: int,
        log_probability: float,
        top_tokens: Elements[tuple[int, float]] = (),
        *,
        align: Align | None = None,
    ) -> bool:
        """Gives a sequence its next token, hands out what has appeared, and says whether it has finished.

        Where its alignment is wanted, `align` is asked for it at the end.
        """
        finish_reason = sequence.accept(token_id, log_probability, top_tokens)
        result = None
        if finish_reason is not None:
            alignment = align(sequence) if align is not None and sequence.wants_alignment else None
            result = sequence.result(finish_reason, time.monotonic(), alignment)
        if sequence.wants_pieces:
            self._add_piece(sequence, is_last=result is not None)
        if result is not None:
            self.add_end(sequence.reply, result)
        return result is not None

    def _add_piece(self, sequence: Sequence, *, is_last: bool) -> None:
        """Hands out the text that has appeared, unless the last piece is too fresh."""
        now = time.monotonic()
        if is_last or now - sequence.piece_at >= self._interval_s:
            sequence.piece_at = now
            self._texts.append((sequence.reply, sequence.text.take(), sequence.num_new_tokens, sequence.take_tokens()))

    def add_end(self, reply: Reply, outcome: SequenceResult | BaseException) -> None:
        """Hands out a result, or the error instead."""
        self._ends.append((reply, outcome))

    def flush(self) -> None:
        """Sends what was collected."""
        if not self._texts and not self._ends:
            return
        texts, self._texts = self._texts, []
        ends, self._ends = self._ends, []
        try:
            self._loop.call_soon_threadsafe(_deliver, texts, ends)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            with suppress(Exception):  # the log may have gone with it
                _log.warning("the event loop is closed; results are dropped", num_results=len(ends))


def _deliver(texts: list[_Text], ends: list[_End]) -> None:
    for reply, text, num_new_tokens, tokens in texts:
        reply.add(text, num_new_tokens, tokens)
    for reply, outcome in ends:
        reply.end(outcome)
