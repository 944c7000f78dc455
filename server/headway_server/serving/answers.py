"""The answer to a call of any task: one result an input, and timings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from headway_server.observers import current_call

Result = TypeVar("Result")


class Timed(Protocol):
    """Times of one input: arrival, start, end; seconds by `time.monotonic`."""

    @property
    def arrived_at(self) -> float:
        """Time of entering the engine's queue."""

    @property
    def started_at(self) -> float:
        """Start of its first run."""

    @property
    def finished_at(self) -> float:
        """End of its last run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimings:
    """Timings of a call, in seconds."""

    queue_s: float
    """Longest wait of an input for its first run."""
    preprocessing_s: float
    """Tokenizing, decoding images, compiling constraints."""
    inference_s: float
    """From the start of the first run of its inputs to the end of the last, without waits between runs."""

    @classmethod
    def of(cls, inputs: Iterable[Timed], *, preprocessing_s: float, num_inputs: int | None = None) -> CallTimings:
        """Summarises a call of at least one input, or a part of it, and notes it as `note` does.

        Args:
            inputs: Times of its inputs, or of parts of several inputs.
            preprocessing_s: Seconds before they were submitted.
            num_inputs: Number of its inputs; None: that of `inputs`.
        """
        timed = list(inputs)
        timings = cls(
            queue_s=max(one.started_at - one.arrived_at for one in timed),
            preprocessing_s=preprocessing_s,
            inference_s=max(one.finished_at for one in timed) - min(one.started_at for one in timed),
        )
        timings.note(len(timed) if num_inputs is None else num_inputs)
        return timings

    def note(self, num_inputs: int) -> None:
        """Adds these timings, of inputs that were computed, to the current call, for its observers."""
        if (call := current_call()) is not None:
            call.num_computed += num_inputs
            call.queue_s = max(call.queue_s, self.queue_s)
            call.preprocessing_s += self.preprocessing_s
            call.inference_s += self.inference_s

    def __add__(self, other: CallTimings) -> CallTimings:
        """Adds the timings of two successive parts of a call."""
        return CallTimings(
            queue_s=max(self.queue_s, other.queue_s),
            preprocessing_s=self.preprocessing_s + other.preprocessing_s,
            inference_s=self.inference_s + other.inference_s,
        )


NO_TIMINGS: Final = CallTimings(queue_s=0.0, preprocessing_s=0.0, inference_s=0.0)
"""Timings of a call without computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[Result]):
    """The answer to a call."""

    results: list[Result]
    """One for each input, in order."""
    timings: CallTimings
