"""A contestant and what was measured of it, round after round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from peers.environment import PeerError
from table import medians
from targets import paired_ratio

SETTLING_SHARE = 0.1
"""Of a measurement's time that passes before it: threads of the last one go to sleep, and cancelled streams leave."""


class Load(Protocol):
    """What is asked at a time."""

    @property
    def case(self) -> str:
        """What is asked for."""

    @property
    def num_streams(self) -> int:
        """How much of it at a time."""

    @property
    def seconds(self) -> float:
        """Shortest measurement."""


class Contestant(Protocol):
    """What is measured side by side with others."""

    name: str
    kind: Literal["served", "bare", "peer"]
    precision: str

    def measure(self, load: Any) -> dict[str, Any]:
        """Measures a kind of load that it knows; the result has at least `tokens_per_s`."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A contestant and what was measured of it."""

    contestant: Contestant
    versions: dict[str, str] = field(default_factory=dict)
    figures: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)
    """Of each round, by case and streams."""
    errors: dict[tuple[str, int], str] = field(default_factory=dict)

    def measure(self, load: Load) -> None:
        """Measures once, unless an earlier round has shown that it cannot."""
        key = (load.case, load.num_streams)
        if key in self.errors:
            return
        time.sleep(SETTLING_SHARE * load.seconds)
        try:
            self.figures.setdefault(key, []).append(self.contestant.measure(load))
        except PeerError as error:
            self.errors[key] = str(error)

    def tokens_per_s(self, key: tuple[str, int]) -> list[float]:
        """Of each round."""
        return [figures["tokens_per_s"] for figures in self.figures[key]]

    @property
    def measured(self) -> list[tuple[str, int]]:
        """Case and streams of what it can do."""
        return [key for key in self.figures if key not in self.errors]

    def record(self, ours: Row) -> dict[str, Any]:
        """For the JSON object, with how many times its tokens a second `ours` has."""
        return {
            "name": self.contestant.name,
            "kind": self.contestant.kind,
            "precision": self.contestant.precision,
            "versions": self.versions,
            "loads": [self._load(key, figures, ours) for key, figures in self.figures.items()],
        }

    def _load(self, key: tuple[str, int], figures: Sequence[dict[str, Any]], ours: Row) -> dict[str, Any]:
        record: dict[str, Any] = {"case": key[0], "streams": key[1]}
        if key in self.errors:
            return record | {"error": self.errors[key]}
        numbers = [{name: value for name, value in one.items() if isinstance(value, int | float)} for one in figures]
        record |= medians(numbers)
        record["rounds_tokens_per_s"] = [round(value, 1) for value in self.tokens_per_s(key)]
        record["headway_times"] = round(paired_ratio(ours.tokens_per_s(key), self.tokens_per_s(key)), 3)
        if "settings" in figures[0]:
            record["settings"] = figures[0]["settings"]
        return record
