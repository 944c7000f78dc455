"""Predicts latency against load and workers by a simulation of queues, and holds it against a server.

`python -m benchmarks.simulation` measures what a call of `ag-news` costs each thread, alone and among many; it
simulates Poisson arrivals with these times, and has the load tester call a server of one worker and one of two at the
same rates. The server of two is predicted from what the one costs. Callers and servers share the cores, in the
simulation too.

`python -m benchmarks.simulation --predict RESULT.json` simulates other numbers of workers, a core each and callers on
machines of their own, with what such a run has written (`--write`).

The simulation has callers' processes, gRPC's threads, an event loop for each worker, the interpreter lock that its
lanes share with it, batches of what waits when a lane is free, and cores, which a thread keeps for a time slice while
it has work. What is measured, and by whom:

- processor time of a call: of a caller who is alone and never pauses, whose threads wake for each call, and of many
- pauses of the event loop, how many a second and how long: by the caller who is alone, who sees all of them
- how long a thread takes to wake on an idle machine: by calls that come rarely

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import urllib.request
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import simpy

from benchmarks.contestants.headway import Server, running_server
from headway_load import LoadPlan, LoadProcesses, LoadTask, Outcome, TimeHistogram, Workload, sample_inputs

_TREE: Final = Path(__file__).parents[1]
_PYTHON_SHARE: Final = 0.2
"""Of a batch, the part that needs the interpreter lock: docs/performance.md, "Where the time goes", `ag-news` x 32."""
_MAX_BATCH: Final = 32
_SLICE_MS: Final = 3.0
"""How long a thread keeps a core before others get it: the base slice of Linux' scheduler on two cores."""
_QUANTILES: Final = 400
_RARE_RATE: Final = 50
"""Calls a second that hardly ever meet."""
_MANY: Final = 16
"""Callers that keep every thread busy."""
_NUM_WAKES: Final = 5
"""Of threads, for a call that comes alone: the caller's twice, gRPC's twice, the event loop's."""
_SHORTEST_PAUSE_MS: Final = 1.0
_WARM: Final = 0.1
"""Share of the simulated calls that is left out."""

Steps = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What was measured: processor time in milliseconds, of a thread that wakes for a call, and of one that goes on."""

    caller: tuple[float, float]
    """The load tester's."""
    transport: tuple[float, float]
    """gRPC's threads."""
    loop: tuple[float, float]
    """The event loop's, without the run."""
    first: float
    """A run of one text."""
    further: float
    """What each further text adds."""
    wake: float
    """How long a thread that was idle takes to run, while the core does nothing for it."""
    pauses: tuple[float, ...]
    """How long pauses of an event loop last: garbage collection, other threads, the machine."""
    pauses_per_s: float


class Simulation:
    """One run: workers, callers and cores."""

    def __init__(
        self, constants: Constants, *, loads: Sequence[int], lanes: int, cores: int, apart: bool, seed: int
    ) -> None:
        """Sets up what is there.

        Args:
            constants: The times.
            loads: For each worker, how many of the callers' processes it has.
            lanes: Of each worker.
            cores: That all share.
            apart: True if callers have cores of their own.
            seed: Of arrivals and times.
        """
        self._constants = constants
        self._env = simpy.Environment()
        self._random = random.Random(seed)  # noqa: S311 (a simulation)
        shared = simpy.Resource(self._env, cores)
        self._workers = [_Worker(self._env, shared, constants.wake, lanes) for _ in loads]
        self._callers = [
            (_Thread(self._env, simpy.Resource(self._env, 1) if apart else shared, constants.wake), worker)
            for worker, count in zip(self._workers, loads, strict=True)
            for _ in range(count)
        ]
        self._latencies_ms: list[float] = []
        if constants.pauses:
            for worker in self._workers:
                self._env.process(self._pauses(worker.loop))

    def run(self, rate_per_s: float, num_calls: int) -> list[float]:
        """Returns the sorted latencies of calls that arrive at random, in milliseconds."""
        self._env.run(self._env.process(self._arrivals(rate_per_s, num_calls)))
        return sorted(self._latencies_ms[int(_WARM * num_calls) :])

    def run_callers(self, num_callers: int, num_calls: int) -> float:
        """Returns the calls a second of callers that call again as soon as they are answered."""
        callers = [
            self._env.process(self._caller(*self._callers[index % len(self._callers)], num_calls // num_callers))
            for index in range(num_callers)
        ]
        self._env.run(self._env.all_of(callers))
        return 1e3 * len(self._latencies_ms) / self._env.now

    def _caller(self, caller: _Thread, worker: _Worker, num_calls: int) -> Steps:
        for _ in range(num_calls):
            yield from self._call(caller, worker)

    def _arrivals(self, rate_per_s: float, num_calls: int) -> Steps:
        for _ in range(num_calls):
            yield self._env.timeout(self._random.expovariate(rate_per_s / 1e3))
            caller, worker = self._random.choice(self._callers)
            self._env.process(self._call(caller, worker))

    def _pauses(self, loop: _Thread) -> Steps:
        lengths, per_s = self._constants.pauses, self._constants.pauses_per_s
        between = max(1e-3, 1e3 / per_s - statistics.fmean(lengths))
        while True:
            yield self._env.timeout(self._random.expovariate(1 / between))
            length = self._random.choice(lengths)
            yield loop.do((length, length))

    def _call(self, caller: _Thread, worker: _Worker) -> Steps:
        began = self._env.now
        times = self._constants
        yield caller.do(times.caller, 0.5)
        yield worker.transport.do(times.transport, 0.5)
        yield worker.loop.do(times.loop, 0.5)
        if worker.idle_lanes == worker.num_lanes and not worker.waiting and not worker.loop.jobs:
            yield worker.loop.do((times.first, times.first))  # the event loop runs it
        else:
            answered = self._env.event()
            worker.waiting.append(answered)
            if worker.idle_lanes:
                self._env.process(self._lane(worker))
            yield answered
        yield worker.loop.do(times.loop, 0.5)
        yield worker.transport.do(times.transport, 0.5)
        yield caller.do(times.caller, 0.5)
        self._latencies_ms.append(self._env.now - began)

    def _lane(self, worker: _Worker) -> Steps:
        worker.idle_lanes -= 1
        run, python = _Thread(self._env, worker.cores, 0.0), _Thread(self._env, worker.cores, 0.0, worker.lock)
        while worker.waiting:
            batch, worker.waiting = worker.waiting[:_MAX_BATCH], worker.waiting[_MAX_BATCH:]
            took = self._constants.first + self._constants.further * (len(batch) - 1)
            yield run.do((took, took), 1 - _PYTHON_SHARE)
            yield python.do((took, took), _PYTHON_SHARE)
            for answered in batch:
                answered.succeed()
        worker.idle_lanes += 1


class _Thread:
    """A thread, which does its jobs in their order. It keeps a core while it has any, for a time slice at most."""

    def __init__(
        self, env: simpy.Environment, cores: simpy.Resource, wake: float, lock: simpy.Resource | None = None
    ) -> None:
        self._env, self._cores, self._wake, self._lock = env, cores, wake, lock
        self.jobs: deque[tuple[tuple[float, float], simpy.Event]] = deque()
        self._is_idle = True

    def do(self, times: tuple[float, float], share: float = 1.0) -> simpy.Event:
        """Does a share of what takes the first of the times if the thread has to wake for it, and else the second.

        Returns:
            What happens when it is done.
        """
        done = self._env.event()
        self.jobs.append(((times[0] * share, times[1] * share), done))
        if self._is_idle:
            self._is_idle = False
            self._env.process(self._run())
        return done

    def _run(self) -> Steps:
        woke = True
        yield self._env.timeout(self._wake)
        while self.jobs:
            with ExitStack() as held:
                if self._lock is not None:
                    yield held.enter_context(self._lock.request())
                yield held.enter_context(self._cores.request())
                end = self._env.now + _SLICE_MS
                while self.jobs and self._env.now < end:
                    times, done = self.jobs.popleft()
                    yield self._env.timeout(times[0 if woke else 1])
                    woke = False
                    done.succeed()
                    yield self._env.timeout(0)  # what follows at once may be for this thread
        self._is_idle = True


class _Worker:
    def __init__(self, env: simpy.Environment, cores: simpy.Resource, wake: float, lanes: int) -> None:
        self.cores, self.lock = cores, simpy.Resource(env, 1)
        self.loop, self.transport = _Thread(env, cores, wake, self.lock), _Thread(env, cores, wake)
        self.num_lanes = self.idle_lanes = lanes
        self.waiting: list[simpy.Event] = []


def _percentile(latencies: Sequence[float], percent: float) -> float:
    return latencies[min(len(latencies) - 1, int(percent / 100 * len(latencies)))]


# Measuring


def _plan(seconds: float, seed: int, *, rate: float | None = None, callers: int | None = None) -> LoadPlan:
    workload = Workload(
        task=LoadTask.CLASSIFY_TEXT, inputs=sample_inputs(LoadTask.CLASSIFY_TEXT), options={"model": "ag-news"}
    )
    return LoadPlan(
        workloads=(workload,), rate_per_s=rate, concurrency=callers, duration_s=seconds, warmup_s=0.5, seed=seed
    )


def _metrics(server: _Measured) -> dict[str, float]:
    """Returns the metrics of a server, by name and worker."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        worker = re.search(r'worker="(\d+)"', labels)
        key = f"{name} {worker[1] if worker else 0}"
        found[key] = found.get(key, 0.0) + float(value)
    return found


@dataclass(frozen=True, slots=True)
class _Measured:
    """A server that is measured."""

    server: Server
    metrics: str
    """Address of its metrics."""

    def processor_ms(self) -> tuple[float, float]:
        """Returns the processor time of the process and of its event loop, in milliseconds."""
        process = self.server.process.process_id
        found = {
            task.parent.name: int(task.read_text(encoding="ascii").split()[0]) / 1e6
            for task in Path(f"/proc/{process}/task").glob("*/schedstat")
        }
        return sum(found.values()), found[str(process)]


def _cost(measured: _Measured, processes: int, plan: LoadPlan) -> tuple[TimeHistogram, dict[str, float]]:
    """Carries out a plan; returns the latencies, and what each call cost, in milliseconds of processor time."""
    with LoadProcesses({"server": measured.server.address}, processes) as load:
        before, (total, loop) = _metrics(measured), measured.processor_ms()
        outcome = load.run(plan)
        after, (total_after, loop_after) = _metrics(measured), measured.processor_ms()
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    calls, batches = change["headway_calls_total 0"], change["headway_batch_items_count 0"]
    rate = outcome.recorder.completed_count / outcome.elapsed_s
    return outcome.recorder.latency, {
        "total": (total_after - total) / calls,
        "loop": (loop_after - loop) / calls,
        "caller": 1e3 * processes * outcome.busy_share / rate,
        "batch_items": change["headway_batch_items_sum 0"] / batches,
        "batch_ms": 1e3 * change["headway_batch_duration_seconds_sum 0"] / batches,
        "calls_per_s": rate,
    }


def _constants(
    alone: dict[str, float], many: dict[str, float], alone_latency: TimeHistogram, rare_latency: TimeHistogram
) -> Constants:
    """Makes constants of what calls cost and took.

    Args:
        alone: Costs of the calls of one caller that never pauses, whose texts run on the event loop.
        many: Those of many such callers.
        alone_latency: Of the calls of that one caller. It sees every pause.
        rare_latency: Of calls that come so rarely that every thread has to wake for each.
    """
    first = alone["batch_ms"]
    loop = (alone["loop"] - first, many["loop"])
    transport = alone["total"] - alone["loop"]
    going_on = transport * min(1.0, loop[1] / loop[0])
    items = many["batch_items"]
    batch = max(0.0, many["total"] - many["loop"] - going_on) * items
    median = alone_latency.percentile_ms(50)
    latencies = [alone_latency.percentile_ms((index + 0.5) * 100 / _QUANTILES) for index in range(_QUANTILES)]
    pauses = tuple(latency - median for latency in latencies if latency > median + _SHORTEST_PAUSE_MS)
    return Constants(
        caller=(alone["caller"], many["caller"]),
        transport=(transport, going_on),
        loop=loop,
        first=first,
        further=max(0.0, (batch - first) / (items - 1)) if items > 1 else first,
        wake=max(0.0, rare_latency.percentile_ms(50) - median) / _NUM_WAKES,
        pauses=pauses,
        pauses_per_s=len(pauses) / _QUANTILES * alone["calls_per_s"],
    )


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    num_cores = len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (store / "ag-news").symlink_to(_TREE / "models" / "ag-news")
        servers = {}
        for index, workers in enumerate((1, 2)):
            metrics = f"127.0.0.1:{arguments.metrics_port + index}"
            flags = ["--workers", str(workers), "--metrics-port", metrics.rpartition(":")[2]]
            servers[workers] = _Measured(stack.enter_context(running_server(_TREE, store, flags)), metrics)
        one = servers[1]
        alone_latency, alone = _cost(one, 1, _plan(arguments.seconds, 0, callers=1))
        rare_latency, _ = _cost(one, arguments.processes, _plan(2 * arguments.seconds, 0, rate=_RARE_RATE))
        _, many = _cost(one, arguments.processes, _plan(arguments.seconds, 0, callers=_MANY))
        constants = _constants(alone, many, alone_latency, rare_latency)
        print(json.dumps({"alone": alone, "many": many, "wake": constants.wake}), flush=True)  # noqa: T201 (its output)
        for workers, measured in servers.items():
            row = _compare_throughput(arguments, measured, constants, workers=workers, num_cores=num_cores)
            rows.append(row)
            print(json.dumps(row), flush=True)  # noqa: T201 (its output)
        for rate in arguments.rates:
            for workers, measured in servers.items():
                row = _compare(arguments, measured, constants, rate=rate, workers=workers, num_cores=num_cores)
                rows.append(row)
                print(json.dumps(row), flush=True)  # noqa: T201 (its output)
    return {"cores": num_cores, "alone": alone, "many": many, "constants": asdict(constants), "rows": rows}


def _loaded(
    arguments: argparse.Namespace, measured: _Measured, plan: LoadPlan, workers: int
) -> tuple[Outcome, list[int]]:
    """Carries out a plan; returns how many of the callers' processes each worker had, too."""
    with LoadProcesses({"server": measured.server.address}, arguments.processes) as load:
        before = _metrics(measured)
        outcome = load.run(plan)
        after = _metrics(measured)
    names = [f"headway_calls_total {each}" for each in range(workers)]
    calls = [after.get(name, 0.0) - before.get(name, 0.0) for name in names]
    return outcome, [round(arguments.processes * count / sum(calls)) for count in calls]


def _compare_throughput(
    arguments: argparse.Namespace, measured: _Measured, constants: Constants, *, workers: int, num_cores: int
) -> dict[str, Any]:
    """Measures and simulates callers that never pause."""
    found, simulated = [], []
    for number in range(arguments.rounds):
        plan = _plan(arguments.seconds, number, callers=2 * _MANY)
        outcome, loads = _loaded(arguments, measured, plan, workers)
        found.append(outcome.recorder.completed_count / outcome.elapsed_s)
        lanes = max(1, num_cores // workers)
        simulation = Simulation(constants, loads=loads, lanes=lanes, cores=num_cores, apart=False, seed=number)
        simulated.append(simulation.run_callers(2 * _MANY, 4000))
    ratios = [ours / theirs for ours, theirs in zip(simulated, found, strict=True)]
    return {
        "workers": workers,
        "callers": 2 * _MANY,
        "calls_per_s": round(statistics.median(found)),
        "calls_per_s_simulated": round(statistics.median(simulated)),
        "ratio": round(statistics.median(ratios), 2),
    }


def _compare(
    arguments: argparse.Namespace,
    measured: _Measured,
    constants: Constants,
    *,
    rate: float,
    workers: int,
    num_cores: int,
) -> dict[str, Any]:
    """Measures and simulates the same calls."""
    found, simulated = [], []
    for number in range(arguments.rounds):
        outcome, loads = _loaded(arguments, measured, _plan(arguments.seconds, number, rate=rate), workers)
        lanes = max(1, num_cores // workers)
        simulation = Simulation(constants, loads=loads, lanes=lanes, cores=num_cores, apart=False, seed=number)
        latencies = simulation.run(rate, max(2000, int(4 * rate * arguments.seconds)))
        found.append([outcome.recorder.latency.percentile_ms(percent) for percent in (50, 99)])
        simulated.append([_percentile(latencies, percent) for percent in (50, 99)])
    p50, p99 = (statistics.median(each[index] for each in found) for index in (0, 1))
    p50_simulated, p99_simulated = (statistics.median(each[index] for each in simulated) for index in (0, 1))
    return {
        "workers": workers,
        "calls_per_s": rate,
        "p50_ms": round(p50, 2),
        "p50_simulated_ms": round(p50_simulated, 2),
        "p99_ms": round(p99, 2),
        "p99_rounds_ms": [round(each[1], 2) for each in found],
        "p99_simulated_ms": round(p99_simulated, 2),
        "p99_ratio": round(p99_simulated / p99, 2),
    }


def _predict(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulates workers with a core each, callers elsewhere."""
    given = json.loads(Path(arguments.predict).read_text(encoding="utf-8"))["constants"]
    listed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    constants = Constants(**listed)
    rows: list[dict[str, Any]] = []
    for workers in arguments.workers:
        simulation = Simulation(constants, loads=[4] * workers, lanes=1, cores=workers, apart=True, seed=0)
        row: dict[str, Any] = {
            "workers": workers,
            "highest_calls_per_s": round(simulation.run_callers(_MANY * workers, 2000 * workers)),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)  # noqa: T201 (its output)
        for rate in arguments.rates:
            simulation = Simulation(constants, loads=[4] * workers, lanes=1, cores=workers, apart=True, seed=0)
            latencies = simulation.run(rate * workers, 4000 * min(workers, 8))
            row = {"workers": workers, "calls_per_s": rate * workers}
            row |= {f"p{percent}_ms": round(_percentile(latencies, percent), 1) for percent in (50, 99)}
            rows.append(row)
            print(json.dumps(row), flush=True)  # noqa: T201 (its output)
    return {"rows": rows}


def main() -> None:
    """Runs the benchmark."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", help="file with the constants of an earlier run, in place of measuring")
    parser.add_argument("--write", type=Path, help="file to write the result to")
    parser.add_argument(
        "--rates", type=numbers, default=[200, 400, 600], help="calls a second; with --predict, of a worker"
    )
    parser.add_argument(
        "--workers", type=numbers, default=[1, 2, 4, 8, 16], help="with --predict: workers, a core each"
    )
    parser.add_argument("--processes", type=int, default=4, help="of callers, each with a connection")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--metrics-port", type=int, default=9664, help="of the first server; the second has the next")
    arguments = parser.parse_args()
    result = _predict(arguments) if arguments.predict else _measure(arguments)
    if arguments.write:
        arguments.write.write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result))  # noqa: T201 (its output)


if __name__ == "__main__":
    main()
