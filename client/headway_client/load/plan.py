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
    """What is called; the names are those of the commands."""

    GENERATE_TEXT = "generate-text"
    TRANSLATE_TEXT = "translate-text"
    CLASSIFY_TEXT = "classify-text"
    CLASSIFY_TOKENS = "classify-tokens"
    CLASSIFY_IMAGE = "classify-image"
    EMBED_TEXT = "embed-text"
    EMBED_IMAGE = "embed-image"

    @property
    def method(self) -> str:
        """Name of the client's method."""
        return self.replace("-", "_")

    @property
    def takes_images(self) -> bool:
        """True if the inputs are images."""
        return self in (LoadTask.CLASSIFY_IMAGE, LoadTask.EMBED_IMAGE)

    @property
    def decodes(self) -> bool:
        """True if the outputs are texts."""
        return self in (LoadTask.GENERATE_TEXT, LoadTask.TRANSLATE_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A load test. Exactly one of `rate_per_s` and `concurrency` is given.

    Raises:
        ValueError: A number is out of its range, or does not go with another.
    """

    task: LoadTask
    rate_per_s: float | None = None
    """Open loop: calls per second, at random times (a Poisson process), however long the answers take."""
    concurrency: int | None = None
    """Closed loop: callers, each of which calls again as soon as it is answered."""
    duration_s: float = 10.0
    """Length of the measured phase, in seconds."""
    warmup_s: float = 2.0
    """Length of the phase before it, which is not measured, in seconds."""
    max_outstanding: int = 256
    """Open loop: most calls at a time. A call past it waits, and its wait counts as latency."""
    seed: int = 0
    """Seed of the open loop's arrival times."""
    batch_size: int = 1
    """Inputs of a call."""
    stream: bool = False
    """Calls the streaming RPC, which measures the time to the first token and between tokens."""
    timeout_s: float = 60.0
    """Longest time of a call, in seconds."""
    model: str | None = None
    model_version: str | None = None
    max_new_tokens: int | None = None
    """Most tokens of a text, for generate-text and translate-text."""
    beam_size: int | None = None
    """Width of the beam search, for translate-text."""

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
            raise ValueError(f"warmup is {self.warmup_s:g} s; must be from 0 to {MAX_DURATION_S:g} s")
        if self.stream and not self.task.decodes:
            raise ValueError(f"stream: {self.task} has no streaming RPC")
        if self.stream and self.batch_size != 1:
            raise ValueError(f"batch size is {self.batch_size}; a streaming call takes one input")
        if self.max_new_tokens is not None and not self.task.decodes:
            raise ValueError(f"max new tokens: {self.task} generates no tokens")
        if self.beam_size is not None and (self.stream or self.task is not LoadTask.TRANSLATE_TEXT):
            raise ValueError("beam size is for translate-text without a stream")

    def describe(self) -> str:
        """Returns the plan in one line."""
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
        raise ValueError(f"{name} is {value:g}; must be above 0 and at most {limit:g}")
