"""What a load test does, decided before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_DURATION_S = 3600.0
MAX_RATE_PER_S = 10_000.0
MAX_CONCURRENCY = 1024
MAX_OUTSTANDING = 10_000
MAX_TIMEOUT_S = 600.0


class LoadTask(StrEnum):
    """What is called."""

    GENERATE = "generate"
    TRANSLATE = "translate"
    CLASSIFY = "classify"
    LABEL = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A load test. Exactly one of `rate_per_s` and `concurrency` is given; every size is bounded.

    Raises:
        ValueError: A number is out of its range.
    """

    task: LoadTask
    rate_per_s: float | None = None
    """Open loop: calls begun a second, at random times (a Poisson process), whatever the answers do."""
    concurrency: int | None = None
    """Closed loop: callers, each of which calls again once it is answered."""
    duration_s: float = 10.0
    """Length of the measured phase, in seconds."""
    warmup_s: float = 2.0
    """Length of the phase before it, which is not measured, in seconds."""
    max_outstanding: int = 256
    """Open loop: most calls at a time; past it calls wait, and their wait counts as latency."""
    seed: int = 0
    """Of the times of the open loop."""
    batch_size: int = 1
    """Inputs of a call."""
    stream: bool = False
    """Call the streaming RPC, for the time to the first token and between tokens."""
    timeout_s: float = 60.0
    """Longest time of a call, in seconds."""
    model: str = ""
    model_version: str = ""
    max_new_tokens: int | None = None
    beam_size: int | None = None
    """Beams of each translation."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise ValueError("give either a rate (open loop) or a concurrency (closed loop)")
        _check("rate", self.rate_per_s, MAX_RATE_PER_S)
        _check("concurrency", self.concurrency, MAX_CONCURRENCY)
        _check("duration", self.duration_s, MAX_DURATION_S)
        _check("max outstanding", self.max_outstanding, MAX_OUTSTANDING)
        _check("timeout", self.timeout_s, MAX_TIMEOUT_S)
        _check("batch size", self.batch_size, 256)
        if not 0 <= self.warmup_s <= MAX_DURATION_S:
            raise ValueError(f"warmup: from 0 to {MAX_DURATION_S:g} s, got {self.warmup_s:g}")
        if self.stream and self.task not in (LoadTask.GENERATE, LoadTask.TRANSLATE):
            raise ValueError(f"stream: {self.task} has no streaming call")
        if self.beam_size is not None and (self.stream or self.task is not LoadTask.TRANSLATE):
            raise ValueError("beam size: is for translate without a stream")
        if self.stream and self.batch_size != 1:
            raise ValueError(f"batch size: a streaming call takes one input, got {self.batch_size}")

    def describe(self) -> str:
        """The plan in one line."""
        if self.rate_per_s is not None:
            mode = (
                f"open loop, {self.rate_per_s:g} calls/s (Poisson, seed {self.seed}), "
                f"at most {self.max_outstanding} outstanding"
            )
        else:
            mode = f"closed loop, {self.concurrency} callers"
        return f"{self.task}: {mode}, {self.warmup_s:g} s of warm-up, {self.duration_s:g} s measured"


def _check(name: str, value: float | None, limit: float) -> None:
    if value is not None and not 0 < value <= limit:
        raise ValueError(f"{name}: above 0 and at most {limit:g}, got {value:g}")
