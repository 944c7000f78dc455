"""The first runs of a graph, which tell how large it is."""

from __future__ import annotations

import time
from typing import Any

import structlog
from numpy.typing import NDArray

from headway_server.runtime import Session

_SMALL_S = 2e-3
"""A graph that one core runs once in less is small. What a call costs beside it is more than that, so its runs keep to
one core each and leave one to the calls (docs/lanes.md)."""
_NUM_RUNS = 3

_log = structlog.get_logger(__name__)


def run_to_warm_up(session: Session, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Runs a graph until it is known how long it takes on one core; lets runs of a small one keep to one core.

    Args:
        session: The graph.
        feeds: One input of a usual length.

    Returns:
        The outputs.
    """
    outputs = session.run(feeds)
    if session.num_lanes > 1:
        session.run(feeds, on_one_core=True)
        times_s = []
        for _ in range(_NUM_RUNS):
            begun_s = time.perf_counter()
            session.run(feeds, on_one_core=True)
            times_s.append(time.perf_counter() - begun_s)
        if min(times_s) < _SMALL_S:
            session.keep_to_one_core()
        _log.info("lanes", file=session.graph.file, one_core_ms=round(1e3 * min(times_s), 2), lanes=session.num_lanes)
    return outputs
