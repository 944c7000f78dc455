"""The simulation of a server's queues, where arithmetic knows the answer."""

from __future__ import annotations

import statistics

import pytest
from benchmarks.simulation import Constants, Simulation


def constants(**times: float | tuple[float, ...]) -> Constants:
    """Times of which all are zero but those that are given; a single one holds for waking and for going on."""
    zero: dict[str, float | tuple[float, ...]] = {
        "first": 0.0,
        "further": 0.0,
        "wake": 0.0,
        "pauses": (),
        "pauses_per_s": 0.0,
    }
    threads = {name: (times.pop(name, 0.0),) * 2 for name in ("caller", "transport", "loop")}
    return Constants(**zero | threads | times)


@pytest.mark.parametrize(
    ("loads", "cores", "rate"),
    [([2], 2, 1000), ([1, 1], 2, 2000), ([1, 1], 1, 1000)],
    ids=["an event loop", "two event loops", "two event loops on a core"],
)
def test_the_highest_rate_is_that_of_what_is_busiest(loads, cores, rate):
    simulation = Simulation(constants(loop=1.0), loads=loads, lanes=1, cores=cores, apart=True, seed=0)
    assert simulation.run_callers(8, 800) == pytest.approx(rate, rel=0.02)


def test_a_call_that_comes_alone_takes_the_sum_of_its_times():
    times = constants(loop=1.0, caller=0.5, transport=0.25, first=0.25, wake=0.1)
    latencies = Simulation(times, loads=[1], lanes=1, cores=2, apart=False, seed=0).run(1, 200)
    assert statistics.median(latencies) == pytest.approx(1.0 + 0.5 + 0.25 + 0.25 + 5 * 0.1)


def test_a_batch_costs_its_first_text_and_what_the_others_add():
    times = constants(first=4.0, further=1.0)  # 16 callers wait while a batch of 16 runs
    rate = Simulation(times, loads=[1], lanes=1, cores=2, apart=True, seed=0).run_callers(32, 3200)
    assert rate == pytest.approx(1000 * 31 / (4 + 30), rel=0.1)


def test_calls_that_come_during_a_pause_wait_for_its_end():
    times = constants(loop=0.1, pauses=(10.0,), pauses_per_s=20.0)  # a fifth of the time
    latencies = Simulation(times, loads=[1], lanes=1, cores=2, apart=True, seed=0).run(200, 4000)
    assert sum(latency > 1 for latency in latencies) / len(latencies) == pytest.approx(0.2, abs=0.04)
