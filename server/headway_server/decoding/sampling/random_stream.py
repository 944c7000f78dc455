"""Random numbers by counter: a pure function of (seed, sample, step), so that nothing is shared between sequences.

Each (seed, sample) starts a SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators", figure 17) at a hashed state; step i is its i-th output, computed without those before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise; products wrap around."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream_states(seeds: NDArray[np.uint64], samples: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the state (n,) at which the stream of each (seed, sample) starts."""
    return _mix(_mix(seeds + _GOLDEN_GAMMA) + _GOLDEN_GAMMA * (samples + np.uint64(1)))


def uniform(states: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) of 53 bits for each stream state (n,) and step (n,), the first step being 0."""
    bits = _mix(states + _GOLDEN_GAMMA * (steps + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
