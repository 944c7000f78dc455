"""The first runs of a graph, which tell how large it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import structlog
from numpy.typing import NDArray

from headway_server.batching.run_costs import RunCosts
from headway_server.runtime import Session

_SMALL_S = 2e-3
"""A graph that one core runs once in less is small. What a call costs beside it is more than that, so its runs keep to
one core each and leave one to the calls (docs/lanes.md)."""
_NUM_RUNS = 3

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What the first runs gave."""

    outputs: dict[str, NDArray[Any]]
    run_s: float | None
    """The least time of a run on the CPU, on one core where there are lanes; None on other devices, where it hardly
    grows with the tokens."""

    def costs(self, length: int) -> RunCosts:
        """What follows for batches; `length` is what the input that was run takes of a batch's budget."""
        return RunCosts.of(self.run_s, length)


def run_to_warm_up(session: Session, feeds: dict[str, NDArray[Any]]) -> WarmUp:
    """Runs a graph until it is known how long it takes; lets runs of a small one keep to one core.

    Args:
        session: The graph.
        feeds: One input of a usual length.
    """
    outputs = session.run(feeds)
    if session.device == "cuda":
        return WarmUp(outputs=outputs, run_s=None)
    session.run(feeds, on_one_core=True)
    times_s = []
    for _ in range(_NUM_RUNS):
        begun_s = time.perf_counter()
        session.run(feeds, on_one_core=True)
        times_s.append(time.perf_counter() - begun_s)
    run_s = min(times_s)
    if session.num_lanes > 1 and run_s < _SMALL_S:
        session.keep_to_one_core()
    _log.info("lanes", file=session.graph.file, run_ms=round(1e3 * run_s, 2), lanes=session.num_lanes)
    return WarmUp(outputs=outputs, run_s=run_s)
