"""What generation is to reach, and whether it did."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_SHARE_OF_BARE = {1: 0.95, 8: 0.9, 32: 0.9}
"""Of the bare loop's tokens a second, by streams."""
_TIMES_PEER = {
    "CTranslate2 int8": {"128": 2.0, "32-256": 2.5},
    "transformers fp32": {"128": 4.0, "32-256": 4.0},
}
"""Times a peer's tokens a second, by prompt set."""
_GAP_TIMES_MEDIAN = 3.0
_FIRST_TOKEN_TIMES_IDLE = 2.0
_MEMORY_BEYOND_MIB = 300.0

OURS = "headway int8, served"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target and what was measured."""

    name: str
    target: float
    value: float
    at_least: bool
    """Whether more is better."""

    @property
    def is_hit(self) -> bool:
        """Whether it was reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    def as_record(self) -> dict[str, Any]:
        """For the JSON object."""
        return asdict(self) | {"value": round(self.value, 3), "hit": self.is_hit}


def judge(
    rounds: Mapping[tuple[str, str, int], Sequence[float]], latency: Mapping[str, Any], memory: Mapping[str, Any]
) -> list[Verdict]:
    """Holds what was measured against the targets.

    Args:
        rounds: Tokens a second of each round, by row, prompt set and streams.
        latency: As `measure_latency` gives it.
        memory: With `beyond_mib`.
    """
    return [*_speed(rounds), *_latency(latency), _memory(memory)]


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of our share of theirs: what slows a round slows both sides of it."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _speed(rounds: Mapping[tuple[str, str, int], Sequence[float]]) -> Iterator[Verdict]:
    bare = OURS.replace("served", "bare loop")
    for (row, prompt_set, streams), tokens_per_s in rounds.items():
        target = _SHARE_OF_BARE.get(streams) if row == bare else _TIMES_PEER.get(row, {}).get(prompt_set)
        if target is not None:
            yield Verdict(
                name=f"{prompt_set} tokens, {streams} streams: times {row}",
                target=target,
                value=paired_ratio(rounds[OURS, prompt_set, streams], tokens_per_s),
                at_least=True,
            )


def _latency(latency: Mapping[str, Any]) -> Iterator[Verdict]:
    gap = latency["gap_ms"]
    yield Verdict(
        name="31 streams and newcomers: p99 gap between tokens, ms",
        target=round(_GAP_TIMES_MEDIAN * gap["median"], 3),
        value=gap["p99"],
        at_least=False,
    )
    yield Verdict(
        name="31 streams and newcomers: a newcomer's first token, median ms",
        target=round(_FIRST_TOKEN_TIMES_IDLE * latency["idle_first_token_ms"]["median"] + gap["median"], 3),
        value=latency["first_token_ms"]["median"],
        at_least=False,
    )


def _memory(memory: Mapping[str, Any]) -> Verdict:
    return Verdict(
        name="resident memory beyond weights and cache, MiB",
        target=_MEMORY_BEYOND_MIB,
        value=memory["beyond_mib"],
        at_least=False,
    )
