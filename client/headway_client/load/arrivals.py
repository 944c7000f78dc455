"""When the calls of an open loop are due."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson_arrivals(rate_per_s: float, start_s: float, end_s: float, seed: int) -> Iterator[float]:
    """Yields the times of a Poisson process from `start_s` to `end_s`, in seconds; a seed gives the same times.

    The gaps between independent callers are exponentially distributed, so calls come in bursts as they do in life;
    evenly spaced calls would flatter a server.
    """
    generator = random.Random(seed)  # noqa: S311 (load, not secrets)
    due_s = start_s + generator.expovariate(rate_per_s)
    while due_s < end_s:
        yield due_s
        due_s += generator.expovariate(rate_per_s)
