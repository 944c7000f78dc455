"""Objectives of a load test, such as `p99<200ms`, and their results.

    objective = [WORKLOAD:] MEASURE (< | >) LIMIT

| measure | of what | limit |
|---|---|---|
| `p99`, `p99.9`, `mean`, `max`; also `latency.p99` | latency of the answered calls | `< 200ms`, `2s`, `500us` |
| `ttft.p95` | time to the first token of streams | a time |
| `gap.p99` | time between tokens of streams | a time |
| `errors` | failed and unsent calls, of all due calls | `< 1%` |
| `rate` | answered calls per second | `> 50/s` |
| `goodput` | calls per second answered within all time limits | `> 50/s`, or `> 95%` of all due calls |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from headway_load.recorder import Recorder

_PATTERN = re.compile(
    r"(?:(?P<workload>[^:<>=]+):)?(?:(?P<measure>latency|ttft|gap|errors|rate|goodput)\.?)?"
    r"(?P<statistic>p\d{1,2}(?:\.\d+)?|p100|mean|max)?"
    r"\s*(?P<sign>[<>])=?\s*(?P<limit>\d+(?:\.\d*)?)\s*(?P<unit>us|ms|s|%|/s)"
)
_UNITS_OF = {
    "latency": ("<", ("us", "ms", "s")),
    "ttft": ("<", ("us", "ms", "s")),
    "gap": ("<", ("us", "ms", "s")),
    "errors": ("<", ("%",)),
    "rate": (">", ("/s",)),
    "goodput": (">", ("/s", "%")),
}
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_EXAMPLES = "p99<200ms, ttft.p95<300ms, gap.p99<50ms, errors<1%, rate>50/s or goodput>95%"


class Result(NamedTuple):
    """Result of an objective."""

    objective: str
    value: float | None
    """Measured value in the unit of the limit; None without a measurement."""
    unit: str
    met: bool

    def __str__(self) -> str:
        """The objective, the value and the verdict."""
        value = "nothing was measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"{self.objective}: {value}, {'met' if self.met else 'MISSED'}"


class TimeLimits(NamedTuple):
    """Time limits of goodput in seconds; None: no limit."""

    latency_s: float | None = None
    first_token_s: float | None = None
    mean_gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """One objective, as text and parsed."""

    text: str
    workload: str | None
    """Workload; None: all calls together."""
    measure: str
    statistic: str
    """`p99`, `mean` or `max` for times, else empty."""
    limit: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses an objective.

        Raises:
            ValueError: The text is no objective.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is no objective; write one such as {_EXAMPLES}")
        measure = match["measure"] or "latency"
        sign, units = _UNITS_OF[measure]
        if match["sign"] != sign or match["unit"] not in units or bool(match["statistic"]) != ("ms" in units):
            wanted = " or ".join(f"{sign}1{unit}" for unit in units)
            statistic = ", with a percentile, mean or max" if "ms" in units else ", without a percentile"
            raise ValueError(f"{text!r}: {measure} takes a limit such as {wanted}{statistic}")
        workload = match["workload"]
        return cls(
            text.strip(),
            workload.strip() if workload else None,
            measure,
            match["statistic"] or "",
            float(match["limit"]),
            match["unit"],
        )

    def check_for(self, workloads: Sequence[str], *, streams: Sequence[str]) -> None:
        """Raises a ValueError if the objective applies to no workload."""
        if self.workload is not None and self.workload not in workloads:
            raise ValueError(f"{self.text!r}: there is no workload {self.workload!r}, only {', '.join(workloads)}")
        if self.measure in ("ttft", "gap") and not (streams if self.workload is None else self.workload in streams):
            raise ValueError(f"{self.text!r}: only calls that stream have tokens to time")

    def judge(self, recorder: Recorder, elapsed_s: float) -> Result:
        """Compares the measurement of `elapsed_s` seconds with the limit."""
        value = self._value(recorder, elapsed_s)
        met = value is not None and (value > self.limit if _UNITS_OF[self.measure][0] == ">" else value < self.limit)
        return Result(self.text, value, self.unit, met)

    def _value(self, recorder: Recorder, elapsed_s: float) -> float | None:
        if self.measure in ("latency", "ttft", "gap"):
            names = {"latency": "latency", "ttft": "first_token", "gap": "token_gap"}
            times = getattr(recorder, names[self.measure])
            return times.statistic_ms(self.statistic) / _MS[self.unit] if len(times) else None
        due_count = recorder.outcomes.total() + recorder.not_sent_count
        if not due_count or not elapsed_s:
            return None
        if self.measure == "errors":
            return 100 * (due_count - recorder.ok_count) / due_count
        if self.measure == "rate":
            return recorder.completed_count / elapsed_s
        return 100 * recorder.good_count / due_count if self.unit == "%" else recorder.good_count / elapsed_s

    def __str__(self) -> str:
        """The text of the objective."""
        return self.text


def time_limits(objectives: Iterable[Objective], workload: str) -> TimeLimits:
    """Returns the time limits of goodput for a workload: the widest of each kind.

    With `p50<50ms` and `p99<200ms` a call counts if it takes less than 200 ms.
    """
    widest: dict[str, Any] = {}
    for objective in objectives:
        if objective.unit in _MS and objective.workload in (None, workload):
            limit_s = objective.limit * _MS[objective.unit] / 1e3
            widest[objective.measure] = max(limit_s, widest.get(objective.measure, 0.0))
    return TimeLimits(widest.get("latency"), widest.get("ttft"), widest.get("gap"))
