"""Measures contestants in turn, round after round, and puts the figures together: JSON, tables for people."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.worker import ContestantError

SETTLING_SHARE = 0.1
"""Of a measurement's time that passes before it: threads of the last one go to sleep."""
_COUNTS = ("call_count", "error_count")
_NAME_WIDTH = 34
_TITLES = {
    "inputs_per_s": "inputs/s",
    "tokens_per_s": "tokens/s",
    "latency_p50_ms": "p50, ms",
    "latency_p99_ms": "p99, ms",
    "first_token_p50_ms": "first token p50, ms",
    "token_gap_p50_ms": "gap between tokens p50, ms",
    "token_gap_p99_ms": "gap between tokens p99, ms",
    "client_cores": "cores that the callers took",
    "error_count": "calls that failed",
}
"""Figures that are shown, in this order."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked at a time."""

    case: str
    """Name of a case."""
    file: Path
    """The case as it was written."""
    rate: str
    """The figure that contestants are compared by."""
    callers: int
    seconds: float
    """Shortest measurement."""


class Contestant(Protocol):
    """One row of a table."""

    name: str
    kind: Literal["served", "bare", "peer"]

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it is made of, by name."""

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Measures each of some loads of one case once.

        Raises:
            ContestantError: It cannot.
        """


@dataclass(slots=True)
class Results:
    """What was measured, round after round."""

    loads: Sequence[Load]
    ours: str
    """Name of the row that others are compared with."""
    rows: dict[str, dict[tuple[str, int], list[Figures]]] = field(default_factory=dict)
    """Figures of each round by row, case and callers."""
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    """By row and case, why there are no figures."""

    def add_round(self, contestants: Sequence[Contestant], number: int, *, by_case: bool) -> None:
        """Measures everybody once.

        Args:
            contestants: In the order of the table. Each round begins with another, so that nobody is always behind the
                same neighbour's heat.
            number: Of the round, from 0 on.
            by_case: True to let a contestant measure all loads of a case at a time, because it has to start for them.
                Otherwise contestants alternate with every load, and what slows the machine slows all of them.
        """
        first = number % len(contestants)
        for group in _groups(self.loads, by_case=by_case):
            for contestant in (*contestants[first:], *contestants[:first]):
                self._measure(contestant, group)

    def _measure(self, contestant: Contestant, loads: Sequence[Load]) -> None:
        case = loads[0].case
        if (contestant.name, case) in self.errors:
            return
        row = self.rows.setdefault(contestant.name, {})
        time.sleep(SETTLING_SHARE * loads[0].seconds)
        try:
            for load, figures in contestant.measure(loads):
                row.setdefault((case, load.callers), []).append(figures)
        except ContestantError as error:
            self.errors[contestant.name, case] = str(error)
            for load in self.loads:
                if load.case == case:
                    row.pop((case, load.callers), None)

    def derive(self, name: str, rate: Callable[[float, float], float], first: str, second: str) -> None:
        """Adds a row whose rates are computed of those of two others, round by round."""
        self.rows[name] = {
            (load.case, load.callers): [{load.rate: rate(a, b)} for a, b in zip(*rates, strict=True)]
            for load in self.loads
            if all(rates := [self._rates(row, load) for row in (first, second)])
        }

    def _rates(self, row: str, load: Load) -> list[float]:
        return [figures[load.rate] for figures in self.rows.get(row, {}).get((load.case, load.callers), ())]

    def records(self, contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
        """Returns the rows for the JSON object."""
        by_name = {contestant.name: contestant for contestant in contestants}
        return [
            {
                "name": name,
                "kind": by_name[name].kind if name in by_name else "bare",
                "versions": dict(by_name[name].versions) if name in by_name else {},
                "loads": [self._record(name, load) for load in self.loads if (load.case, load.callers) in row],
                "errors": {case: error for (one, case), error in self.errors.items() if one == name},
            }
            for name, row in self.rows.items()
        ]

    def _record(self, row: str, load: Load) -> dict[str, Any]:
        rounds, ours = self._rates(row, load), self._rates(self.ours, load)
        record = {"case": load.case, "callers": load.callers, "rate": load.rate}
        record |= medians(self.rows[row][load.case, load.callers])
        record["rounds"] = [round(rate, 2) for rate in rounds]
        if len(ours) == len(rounds):
            record["ours_times"] = paired_ratio(ours, rounds)
        return record


def _groups(loads: Sequence[Load], *, by_case: bool) -> list[list[Load]]:
    if not by_case:
        return [[load] for load in loads]
    return [[load for load in loads if load.case == case] for case in dict.fromkeys(load.case for load in loads)]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Returns the median of every figure; counts are summed, and words are those of the first round."""
    merged: Figures = {}
    for name, first in rounds[0].items():
        values = [figures[name] for figures in rounds if name in figures]
        if isinstance(first, str):
            merged[name] = first
        else:
            merged[name] = sum(values) if name in _COUNTS else round(statistics.median(values), 3)
    return merged


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns median, least and greatest of the rounds' ratios: what slows a round slows both sides of it."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    if not ratios:
        return {}
    found = {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in found.items()}


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a report: a block for each case, with a table for each figure."""
    for case in report["cases"]:
        rows = {
            row["name"]: {load["callers"]: load for load in row["loads"] if load["case"] == case["name"]}
            for row in report["rows"]
        }
        measured = [load for loads in rows.values() for load in loads.values()]
        callers = sorted({load["callers"] for load in measured})
        yield from ("", f"{case['name']}: {case['source']}")
        rates = list(dict.fromkeys(load["rate"] for load in measured))
        for figure in [*rates, *(name for name in _TITLES if name not in rates)]:
            shown = {
                name: {n: load[figure] for n, load in loads.items() if load.get(figure)} for name, loads in rows.items()
            }
            if any(shown.values()):
                yield _TITLES[figure].ljust(_NAME_WIDTH) + "".join(f"{f'{n} callers':>22}" for n in callers)
                for name in filter(shown.__getitem__, shown):
                    yield f"  {name:<{_NAME_WIDTH - 2}}" + "".join(
                        f"{_number(shown[name].get(n)):>22}" for n in callers
                    )
            if figure in rates:
                yield from _ratio_lines(rows, callers, report["ours"])
        for row in report["rows"]:
            if case["name"] in row["errors"]:
                yield f"  {row['name']} was not measured: {row['errors'][case['name']]}"
        for name, loads in rows.items():
            settings = dict.fromkeys(load["setting"] for load in loads.values() if load.get("setting"))
            for setting in settings:
                where = ", ".join(str(n) for n, load in loads.items() if load.get("setting") == setting)
                yield f"  {name}, {where} callers: {setting}"


def _ratio_lines(rows: Mapping[str, Mapping[int, Any]], callers: Sequence[int], ours: str) -> Iterator[str]:
    yield f"{ours}, times the row (median of the rounds' ratios, least to greatest)"
    for name, loads in rows.items():
        found = {n: load["ours_times"] for n, load in loads.items() if name != ours and load.get("ours_times")}
        cells = [
            f"{one['median']:.2f} ({one['least']:.2f}-{one['greatest']:.2f})" if (one := found.get(n)) else "-"
            for n in callers
        ]
        if found:
            yield f"  {name:<{_NAME_WIDTH - 2}}" + "".join(f"{cell:>22}" for cell in cells)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"
