"""Search for the highest rate that meets the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headway_load.objectives import Result
from headway_load.plan import MAX_RATE_PER_S, LoadPlan
from headway_load.processes import Outcome

FIRST_RATE_PER_S = 16.0
_MIN_RATE_PER_S = 0.1
_PRECISION = 1.05
"""Ratio of the lowest missed to the highest met rate that ends the search."""
_LAG_SHARE, _LAG_CALLS = 0.05, 5
"""Share of due calls that may be unanswered by a server that keeps up."""


class Probe(NamedTuple):
    """One rate that was tried."""

    rate_per_s: float
    outcome: Outcome
    results: list[Result]
    keeps_up: bool
    """True if calls were answered as fast as they came. Otherwise a queue grows, and latency depends on the
    duration."""

    @property
    def met(self) -> bool:
        """True if the objectives are met at this rate."""
        return self.keeps_up and all(result.met for result in self.results)

    def __str__(self) -> str:
        """Rate, verdict and missed objectives."""
        missed = [str(result) for result in self.results if not result.met]
        if not self.keeps_up:
            missed.append(f"only {self.outcome.recorder.completed_count / self.outcome.elapsed_s:.4g}/s were answered")
        return f"{self.rate_per_s:.4g} calls/s: {'; '.join(missed) or 'met'}"


def judge(outcome: Outcome) -> list[Result]:
    """Compares the measurements of a plan with its objectives."""
    recorders = dict(zip((workload.name for workload in outcome.plan.workloads), outcome.recorders, strict=True))
    return [
        objective.judge(recorders[objective.workload] if objective.workload else outcome.recorder, outcome.elapsed_s)
        for objective in outcome.plan.objectives
    ]


def find_max(
    plan: LoadPlan, run: Callable[[LoadPlan], Outcome], max_probes: int, tell: Callable[[Probe], None] = lambda _: None
) -> list[Probe]:
    """Runs a plan at several rates and returns all probes.

    The rate doubles until it misses an objective. Then the interval between the highest met and the lowest missed rate
    is halved repeatedly.

    Args:
        plan: Plan to run; its rate is the first.
        run: Runs it.
        max_probes: Most rates to try.
        tell: Called after each.
    """
    probes: list[Probe] = []
    low, high, rate = 0.0, math.inf, plan.rate_per_s or FIRST_RATE_PER_S
    while len(probes) < max_probes and _MIN_RATE_PER_S <= rate <= MAX_RATE_PER_S and high > low * _PRECISION:
        outcome = run(replace(plan, rate_per_s=rate))
        if outcome.was_stopped:
            break
        recorder = outcome.recorder
        due_count = recorder.outcomes.total() + recorder.not_sent_count
        lag = due_count - recorder.completed_count
        keeps_up = recorder.not_sent_count == 0 and lag <= max(_LAG_CALLS, _LAG_SHARE * due_count)
        probes.append(Probe(rate, outcome, judge(outcome), keeps_up))
        tell(probes[-1])
        if probes[-1].met:
            low = rate
        else:
            high = rate
        rate = rate * 2 if math.isinf(high) else rate / 4 if not low else math.sqrt(low * high)
    return probes


def best(probes: list[Probe]) -> Probe | None:
    """Returns the probe of the highest rate that meets the objectives; None if none does."""
    return max((probe for probe in probes if probe.met), key=lambda probe: probe.rate_per_s, default=None)
