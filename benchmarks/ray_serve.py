"""A store on Ray Serve beside `headway-server` itself: `python -m benchmarks.ray_serve`.

Both serve `ag-news` and `shakespeare` on this machine at the same time, one replica and one thread each, and are called
in turn by the load tester. So the difference is what Serve's proxy, its router and its actors cost. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.contestants.headway import running_server
from benchmarks.worker import START_TIMEOUT_S, Process, tree_environment
from headway_load import LoadPlan, LoadProcesses, LoadTask, Workload, sample_inputs

_TREE: Final = Path(__file__).parents[1]
_READY: Final = "headway-ray ready on "
_FLAGS: Final = ["--threads", "1"]


def _plan(kind: str, callers: int, seconds: float) -> LoadPlan:
    task = LoadTask.CLASSIFY_TEXT if kind == "calls" else LoadTask.GENERATE_TEXT
    workload = Workload(
        task=task,
        inputs=sample_inputs(task),
        stream=kind == "streams",
        options={"model": "ag-news"} if kind == "calls" else {"model": "shakespeare", "max_new_tokens": 32},
    )
    return LoadPlan(workloads=(workload,), concurrency=callers, duration_s=seconds, warmup_s=0.5)


def _figures(address: str, kind: str, callers: int, seconds: float) -> dict[str, float]:
    with LoadProcesses({"server": address}, 1) as load:
        outcome = load.run(_plan(kind, callers, seconds))
    recorder = outcome.recorder
    found = {
        "calls_per_s": recorder.completed_count / outcome.elapsed_s,
        "p50_ms": recorder.latency.percentile_ms(50),
        "p99_ms": recorder.latency.percentile_ms(99),
        "failed": float(sum(recorder.error_counts.values())),
    }
    if kind == "streams":
        found["first_token_p50_ms"] = recorder.first_token.percentile_ms(50)
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for model in ("ag-news", "shakespeare"):
            (store / model).symlink_to(_TREE / "models" / model)
        server = stack.enter_context(running_server(_TREE, store, _FLAGS))
        environment = tree_environment(_TREE)
        command = [sys.executable, str(_TREE / "tests/support/ray_server.py"), "--store", str(store), *_FLAGS]
        process = stack.enter_context(Process(command, environment))
        addresses = {
            "headway-server": server.address,
            "Ray Serve": process.read_line(_READY, timeout_s=START_TIMEOUT_S).removeprefix(_READY).split()[0],
        }
        for kind in ("calls", "streams"):
            for callers in arguments.callers:
                found: dict[str, list[dict[str, float]]] = {name: [] for name in addresses}
                for _ in range(arguments.rounds):
                    for name, address in addresses.items():
                        found[name].append(_figures(address, kind, callers, arguments.seconds))
                for name, rounds in found.items():
                    row = {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
                    rows[f"{kind}, {callers} callers, {name}"] = row
                    print(f"{kind}, {callers} callers, {name:<15} {row}", flush=True)  # noqa: T201 (its output)
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "rows": rows}
    print(json.dumps(result))  # noqa: T201 (its output)


if __name__ == "__main__":
    main()
