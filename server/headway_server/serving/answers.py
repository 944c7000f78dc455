"""What every call is answered with, whatever its task: one result an input, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Timed(Protocol):
    """When one input of a call arrived, was first computed, and was done; seconds by `time.monotonic`."""

    @property
    def arrived_at(self) -> float:
        """When it entered the engine's queue."""

    @property
    def started_at(self) -> float:
        """When its first run began."""

    @property
    def finished_at(self) -> float:
        """When its last run ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimings:
    """Where the time of a call went, in seconds."""

    queue_s: float
    """The longest that one of its inputs waited for its first run."""
    preprocessing_s: float
    """Tokenizing, decoding images, compiling constraints."""
    inference_s: float
    """From the beginning of the first run of its inputs to the end of the last, without waits between runs."""

    @classmethod
    def of(cls, inputs: Iterable[Timed], *, preprocessing_s: float) -> CallTimings:
        """Summarises a call of at least one input."""
        timed = list(inputs)
        return cls(
            queue_s=max(one.started_at - one.arrived_at for one in timed),
            preprocessing_s=preprocessing_s,
            inference_s=max(one.finished_at for one in timed) - min(one.started_at for one in timed),
        )

    def __add__(self, other: CallTimings) -> CallTimings:
        """Of two parts of a call, one after the other."""
        return CallTimings(
            queue_s=max(self.queue_s, other.queue_s),
            preprocessing_s=self.preprocessing_s + other.preprocessing_s,
            inference_s=self.inference_s + other.inference_s,
        )


NO_TIMINGS: Final = CallTimings(queue_s=0.0, preprocessing_s=0.0, inference_s=0.0)
"""Of a call that nothing was computed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[Result]):
    """The answer to a call."""

    results: list[Result]
    """One for each input, in order."""
    timings: CallTimings
