"""Measures contestants in turn, round after round, and puts the figures together: JSON, and tables for people."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.worker import ContestantError

SETTLING_SHARE = 0.1
"""Of a measurement's time that passes before it: threads of the last one go to sleep."""
_NAME_WIDTH, _CELL_WIDTH = 34, 22
_TITLES = {
    "tokens_per_s": "tokens/s",
    "inputs_per_s": "inputs/s",
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
Kind = Literal["served", "bare", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked at a time: so many callers of a case, for at least so many seconds."""

    case: str
    file: Path
    """The case as it was written."""
    rate: str
    """The figure that contestants are compared by."""
    callers: int
    seconds: float


class Contestant(Protocol):
    """One row of a table."""

    name: str
    kind: Kind

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what it is made of."""

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Measures loads of one case once each; raises `ContestantError` if it cannot."""


@dataclass(slots=True)
class Results:
    """What was measured, round after round; the first of the contestants is compared with the others."""

    contestants: Sequence[Contestant]
    loads: Sequence[Load]
    rows: dict[str, dict[tuple[str, int], list[Figures]]] = field(default_factory=dict)
    """Figures of each round by row, case and callers."""
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    """By row and case, why there are no figures."""

    def add_round(self, *, number: int, by_case: bool) -> None:
        """Measures everybody once; each round begins with another, so that all have had every neighbour.

        Contestants alternate with every load, so that what slows the machine slows all of them; or, `by_case`, with
        every case, because they have to be started for it.
        """
        first = number % len(self.contestants)
        groups: dict[object, list[Load]] = {}
        for load in self.loads:
            groups.setdefault(load.case if by_case else load, []).append(load)
        for loads in groups.values():
            for contestant in (*self.contestants[first:], *self.contestants[:first]):
                self._measure(contestant, loads)

    def _measure(self, contestant: Contestant, loads: Sequence[Load]) -> None:
        case, row = loads[0].case, self.rows.setdefault(contestant.name, {})
        if (contestant.name, case) in self.errors:
            return
        time.sleep(SETTLING_SHARE * loads[0].seconds)
        try:
            for load, figures in contestant.measure(loads):
                row.setdefault((case, load.callers), []).append(figures)
        except ContestantError as error:
            self.errors[contestant.name, case] = str(error)
            for key in [key for key in row if key[0] == case]:
                del row[key]

    def _rates(self, row: str, load: Load) -> list[float]:
        return [figures[load.rate] for figures in self.rows.get(row, {}).get((load.case, load.callers), ())]

    def records(self) -> list[dict[str, Any]]:
        """Returns the rows for the JSON object."""
        return [
            {
                "name": contestant.name,
                "kind": contestant.kind,
                "versions": dict(contestant.versions),
                "loads": [
                    self._record(contestant.name, load) for load in self.loads if self._rates(contestant.name, load)
                ],
                "errors": {case: error for (row, case), error in self.errors.items() if row == contestant.name},
            }
            for contestant in self.contestants
        ]

    def _record(self, row: str, load: Load) -> dict[str, Any]:
        rounds, ours = self._rates(row, load), self._rates(self.contestants[0].name, load)
        record = {"case": load.case, "callers": load.callers, "rate": load.rate}
        record |= medians(self.rows[row][load.case, load.callers]) | {"rounds": [round(rate, 2) for rate in rounds]}
        shared = min(len(ours), len(rounds))  # a run that is ended may have measured one side once more
        ratios = {"ours_times": paired_ratio(ours[:shared], rounds[:shared])} if shared and all(rounds) else {}
        return record | ratios


def medians(rounds: Sequence[Figures]) -> Figures:
    """Returns the median of every figure; counts are summed, and words are those of the first round."""
    merged = dict(rounds[0])
    for name in (name for name, value in merged.items() if not isinstance(value, str)):
        values = [figures[name] for figures in rounds if name in figures]
        merged[name] = sum(values) if name.endswith("_count") else round(statistics.median(values), 3)
    return merged


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Returns median, least and greatest of the rounds' ratios: what slows a round slows both sides of it."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    found = {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in found.items()}


def format_report(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a report: a block for each case, with a table for each figure."""
    for case in report["cases"]:
        rows = {row["name"]: [load for load in row["loads"] if load["case"] == case["name"]] for row in report["rows"]}
        callers = list(dict.fromkeys(load["callers"] for loads in rows.values() for load in loads))
        yield from ("", f"{case['name']}: {case['source']}")
        for figure, title in _TITLES.items():
            yield from _table(title, callers, rows, partial(_figure, figure))
            if any(load["rate"] == figure for loads in rows.values() for load in loads):
                ratios = f"{report['rows'][0]['name']}, times the row: median of the rounds' ratios (least-greatest)"
                others = dict(list(rows.items())[1:])
                yield from _table(ratios, (), others, _ratio)
        for row in report["rows"]:
            if case["name"] in row["errors"]:
                yield f"  {row['name']} was not measured: {row['errors'][case['name']]}"
            for setting in dict.fromkeys(load["setting"] for load in rows[row["name"]] if load.get("setting")):
                where = ", ".join(str(load["callers"]) for load in rows[row["name"]] if load["setting"] == setting)
                yield f"  {row['name']}, {where} callers: {setting}"


def _table(
    title: str, columns: Sequence[int], rows: Mapping[str, Sequence[Any]], cell: Callable[[Any], str]
) -> Iterator[str]:
    """Yields a title with columns, and the rows that have anything to show."""
    lines = {name: [cell(load) for load in loads] for name, loads in rows.items()}
    if any(any(cells) for cells in lines.values()):
        yield title.ljust(_NAME_WIDTH) + "".join(f"{f'{count} callers':>{_CELL_WIDTH}}" for count in columns)
        for name in (name for name, cells in lines.items() if any(cells)):
            yield f"  {name:<{_NAME_WIDTH - 2}}" + "".join(f"{one or '-':>{_CELL_WIDTH}}" for one in lines[name])


def _figure(name: str, load: Mapping[str, Any]) -> str:
    value = load.get(name)
    return "" if not value else f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.3g}"


def _ratio(load: Mapping[str, Any]) -> str:
    times = load.get("ours_times")
    return f"{times['median']:.2f} ({times['least']:.2f}-{times['greatest']:.2f})" if times else ""
