"""Plan of a load test: the calls, their times and the objectives."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import count, takewhile
from typing import Any

from headway_client import AsyncClient
from headway_client.requests import Conversation
from headway_load.objectives import Objective

MAX_DURATION_S = 3600.0
MAX_RATE_PER_S = 10_000.0
MAX_CONCURRENCY = 1024
MAX_OUTSTANDING = 10_000
MAX_TIMEOUT_S = 600.0
MAX_BATCH_SIZE = 256

Input = str | bytes | Conversation
"""Input of a call: a text, an encoded image, or the turns of a conversation."""


class LoadTask(StrEnum):
    """Tasks to call, by the names of the commands."""

    GENERATE_TEXT = "generate-text"
    CHAT = "chat"
    TRANSLATE_TEXT = "translate-text"
    REWRITE_TEXT = "rewrite-text"
    CLASSIFY_TEXT = "classify-text"
    CLASSIFY_TOKENS = "classify-tokens"
    FILL_MASK = "fill-mask"
    CLASSIFY_IMAGE = "classify-image"
    DETECT_OBJECTS = "detect-objects"
    CLASSIFY_PIXELS = "classify-pixels"
    ESTIMATE_DEPTH = "estimate-depth"
    EMBED_TEXT = "embed-text"
    SCORE_TEXT = "score-text"
    EMBED_IMAGE = "embed-image"

    @property
    def takes_images(self) -> bool:
        """True if the inputs are images."""
        return self in (
            LoadTask.CLASSIFY_IMAGE,
            LoadTask.DETECT_OBJECTS,
            LoadTask.CLASSIFY_PIXELS,
            LoadTask.ESTIMATE_DEPTH,
            LoadTask.EMBED_IMAGE,
        )

    @property
    def decodes(self) -> bool:
        """True if the outputs are texts."""
        return self in (LoadTask.GENERATE_TEXT, LoadTask.CHAT, LoadTask.TRANSLATE_TEXT, LoadTask.REWRITE_TEXT)


class Arrivals(StrEnum):
    """Spacing of the calls of an open loop."""

    POISSON = "poisson"
    """At random, like independent callers: exponentially distributed gaps, so calls come in bursts."""
    CONSTANT = "constant"
    """Evenly. This flatters a server: calls never come in bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of call.

    Raises:
        ValueError: A number is out of its range, or an option does not go with the task.
    """

    task: LoadTask
    inputs: Sequence[Input] = field(repr=False)
    """Inputs, sent in turn."""
    name: str = ""
    """Name in reports and objectives. Default: the task."""
    weight: float = 1.0
    """Share of the calls, relative to the other workloads of the plan."""
    stream: bool = False
    """True calls the streaming RPC, which measures the time to the first token and between tokens."""
    batch_size: int = 1
    """Inputs of a call."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the client's method."""
    input_options: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """Further options of single inputs: none, or one mapping per input."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not self.name:
            object.__setattr__(self, "name", str(self.task))
        if not self.inputs:
            raise ValueError(f"{self.name} has no inputs")
        _check(f"{self.name}: weight", self.weight, math.inf)
        _check(f"{self.name}: batch size", self.batch_size, MAX_BATCH_SIZE)
        if self.stream and not self.task.decodes:
            raise ValueError(f"{self.name}: {self.task} has no streaming RPC")
        if self.stream and self.batch_size != 1:
            raise ValueError(f"{self.name}: batch size is {self.batch_size}; a streaming call takes one input")
        if self.input_options and (self.batch_size != 1 or len(self.input_options) != len(self.inputs)):
            raise ValueError(f"{self.name}: options of single inputs need a batch size of 1 and one mapping an input")
        known = inspect.signature(getattr(AsyncClient, self.method)).parameters.keys() - {"self", "timeout_s"}
        given = set(self.options).union(*self.input_options)
        if unknown := given - known:
            names = ", ".join(sorted(map(repr, unknown)))
            raise ValueError(f"{self.name}: {self.method} has no option {names}; it has {', '.join(sorted(known))}")

    @property
    def method(self) -> str:
        """Name of the client's method."""
        name = self.task.replace("-", "_")
        return f"stream_{name}" if self.stream else name

    def as_dict(self) -> dict[str, Any]:
        """Returns the workload for a report: inputs are counted, not shown."""
        shown = {name: value for name, value in _values(self).items() if name not in ("inputs", "input_options")}
        return shown | {"input_count": len(self.inputs)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A load test. Exactly one of `rate_per_s`, `replay_s` and `concurrency` is given.

    Raises:
        ValueError: A number is out of its range, or does not go with another.
    """

    workloads: tuple[Workload, ...]
    """Workloads; each call is drawn from them by weight."""
    rate_per_s: float | None = None
    """Open loop: calls per second, independent of the answers."""
    ramp_to_per_s: float | None = None
    """Open loop: the rate at the end. It changes evenly during the measured phase."""
    arrivals: Arrivals = Arrivals.POISSON
    """Open loop: spacing of the calls."""
    replay_s: tuple[float, ...] = field(default=(), repr=False)
    """Open loop: due times in seconds. The first call is due at once; calls of the warm-up are not measured."""
    concurrency: int | None = None
    """Closed loop: callers; each calls again as soon as it is answered."""
    duration_s: float = 10.0
    """Length of the measured phase, in seconds."""
    warmup_s: float = 2.0
    """Length of the warm-up before it, in seconds; not measured."""
    max_outstanding: int = 256
    """Open loop: most calls at a time. A call past it waits, and its wait counts as latency."""
    seed: int = 0
    """Seed of the arrival times and of the choice of workloads."""
    timeout_s: float = 60.0
    """Timeout of a call, in seconds."""
    objectives: tuple[Objective, ...] = ()
    """Objectives of the test."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if (self.rate_per_s is not None) + bool(self.replay_s) + (self.concurrency is not None) != 1:
            raise ValueError("give one of a rate, a replay (open loop) and a concurrency (closed loop)")
        _check("rate", self.rate_per_s, MAX_RATE_PER_S)
        _check("ramp to", self.ramp_to_per_s, MAX_RATE_PER_S)
        _check("concurrency", self.concurrency, MAX_CONCURRENCY)
        _check("duration", self.duration_s, MAX_DURATION_S)
        _check("max outstanding", self.max_outstanding, MAX_OUTSTANDING)
        _check("timeout", self.timeout_s, MAX_TIMEOUT_S)
        if not 0 <= self.warmup_s <= MAX_DURATION_S:
            raise ValueError(f"warmup is {self.warmup_s:g} s; must be from 0 to {MAX_DURATION_S:g} s")
        if self.ramp_to_per_s is not None and self.rate_per_s is None:
            raise ValueError("a ramp begins at a rate; give it too")
        names = [workload.name for workload in self.workloads]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"workloads are {', '.join(names) or 'missing'}; give each a name of its own")
        for objective in self.objectives:
            objective.check_for(names, streams=[workload.name for workload in self.workloads if workload.stream])

    @property
    def is_open(self) -> bool:
        """True if the due times of calls do not depend on the answers."""
        return self.concurrency is None

    def schedule(self, start_s: float) -> Iterator[tuple[float, int]]:
        """Yields the due time in seconds and the workload number of each call of the open loop.

        The same seed gives the same schedule. `start_s` is the beginning of the measured phase.
        """
        begin_s, end_s = start_s - self.warmup_s, start_s + self.duration_s
        due = takewhile(lambda due_s: due_s < end_s, (begin_s + due_s for due_s in self._offsets_s()))
        return zip(due, self.choices(), strict=False)

    def choices(self, caller: int = 0) -> Iterator[int]:
        """Yields workload numbers for one call after another, endlessly."""
        generator = random.Random(f"{self.seed}/{caller}")  # noqa: S311 (load, not secrets)
        numbers, weights = range(len(self.workloads)), [workload.weight for workload in self.workloads]
        while True:
            yield from generator.choices(numbers, weights, k=256) if len(numbers) > 1 else (0,)

    def _offsets_s(self) -> Iterator[float]:
        """Yields due times in seconds from the beginning of the warm-up.

        The rate is integrated over time: a call is due where the integral reaches its expected count.
        """
        if self.replay_s:
            yield from (due_s - self.replay_s[0] for due_s in self.replay_s)
            return
        rate = self.rate_per_s
        assert rate is not None
        slope = 0.0 if self.ramp_to_per_s is None else (self.ramp_to_per_s - rate) / self.duration_s
        for expected in self._expected_counts():
            past_warmup = expected - rate * self.warmup_s
            if past_warmup < 0:
                yield expected / rate
            elif (square := rate**2 + 2 * slope * past_warmup) >= 0:
                yield self.warmup_s + 2 * past_warmup / (rate + math.sqrt(square))
            else:  # a rate that falls has reached 0
                return

    def _expected_counts(self) -> Iterator[float]:
        if self.arrivals is Arrivals.CONSTANT:
            yield from count()
        generator = random.Random(self.seed)  # noqa: S311 (load, not secrets)
        expected = 0.0
        while True:
            expected += generator.expovariate(1.0)
            yield expected

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan for a report: inputs and replayed times are counted, not shown."""
        counted = {"replay_s": len(self.replay_s), "objectives": [str(each) for each in self.objectives]}
        return _values(self) | counted | {"workloads": [each.as_dict() for each in self.workloads]}

    def describe(self) -> str:
        """Returns the plan in one line."""
        if self.concurrency is not None:
            mode = f"closed loop, {self.concurrency} callers"
        else:
            if self.replay_s:
                calls = f"{len(self.replay_s)} replayed calls"
            else:
                ramp = "" if self.ramp_to_per_s is None else f" to {self.ramp_to_per_s:g}"
                calls = f"{self.rate_per_s:g}{ramp} calls/s ({self.arrivals.capitalize()}, seed {self.seed})"
            mode = f"open loop, {calls}, at most {self.max_outstanding} outstanding"
        whole = sum(workload.weight for workload in self.workloads)
        names = [
            workload.name if len(self.workloads) == 1 else f"{workload.weight / whole:.0%} {workload.name}"
            for workload in self.workloads
        ]
        return f"{', '.join(names)}: {mode}, {self.warmup_s:g} s of warm-up, {self.duration_s:g} s measured"


def _values(kind: LoadPlan | Workload) -> dict[str, Any]:
    return {each.name: getattr(kind, each.name) for each in fields(kind)}


def _check(name: str, value: float | None, limit: float) -> None:
    if not isinstance(value, int | float | None):
        raise ValueError(f"{name} is {value!r}; must be a number")
    if value is not None and not 0 < value <= limit:
        bound = "" if math.isinf(limit) else f" and at most {limit:g}"
        raise ValueError(f"{name} is {value:g}; must be above 0{bound}")
