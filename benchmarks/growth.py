"""How a server of the shipped models grows: python -m benchmarks.growth [--rounds 3] [--quick].

- Callers: calls a second, percentiles, and the server's processor time a call, from one caller to `--most-callers`.
- Models: copies of the shipped models; time and processor time until the server is ready, memory, threads.
- Slots: memory of a generation model by its number of slots.
- Workers: calls a second of one process and of two.

Rounds take turns over all cases. Figures are medians. Of the server's processor time, that of the load tester's warm-up
is taken off by its share of the time.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.contestants.headway import Server, running_server
from benchmarks.machine import describe_run
from benchmarks.picture import draw_lines
from benchmarks.worker import ROOT, ContestantError, tree_environment

_TASKS = {
    "ag-news": ("classify-text",),
    "multi30k-en-de": ("translate-text",),
    "shakespeare": ("generate-text", "--option", "max_new_tokens=32", "--no-stream"),
}
_SLOTS = (8, 32, 128)
Figures = dict[str, float]
Case = tuple[str, str, int]
"""A curve, the model or setting that it is of, and the number that grows."""


def main(  # noqa: PLR0917 (options of a command)
    store: Annotated[Path, typer.Option(help="Bundles, those of `_TASKS` among them.")] = ROOT / "models",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Of a measurement of callers.")] = 4.0,
    most_callers: Annotated[int, typer.Option(min=1, max=1024)] = 256,
    most_models: Annotated[int, typer.Option(min=1, max=500)] = 50,
    picture: Annotated[Path | None, typer.Option(help="SVG file of the curves of callers.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, to try the command.")] = False,
) -> None:
    """Measures and prints tables, and one JSON object as the last line."""
    if quick:
        rounds, seconds, most_callers, most_models = 1, 0.3, 1, 1
    found: dict[Case, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = _cases(store, Path(folder), seconds, most_callers, most_models)
        for number in range(rounds):
            for case, measure in cases:
                found.setdefault(case, []).append(measure())
                typer.echo(f"round {number + 1}: {case}: {found[case][-1]}", err=True)
    rows = [_row(case, figures) for case, figures in found.items()]
    for row in rows:
        typer.echo("  ".join(f"{key} {value}" for key, value in row.items()))
    report = describe_run() | {"rounds": rounds, "seconds": seconds, "rows": rows}
    if picture is not None:
        of_callers = [row for row in rows if row["curve"] == "callers"]
        curves = {
            name: [(row["count"], row["calls_per_s"]) for row in of_callers if row["of"] == name] for name in _TASKS
        }
        drawn = draw_lines(curves, report, title="Calls a second by the number of callers")
        picture.write_text(drawn, encoding="utf-8")
    typer.echo(json.dumps(report))


def _cases(
    store: Path, folder: Path, seconds: float, most_callers: int, most_models: int
) -> list[tuple[Case, Callable[[], Figures]]]:
    """Returns what is measured in a round, in order."""
    cases: list[tuple[Case, Callable[[], Figures]]] = []
    for name in _TASKS:
        alone = folder / name
        alone.mkdir()
        (alone / name).symlink_to(store.resolve() / name)
        counts = [4**power for power in range(6) if 4**power <= most_callers]
        cases += [(("callers", name, count), partial(_call, alone, name, count, seconds)) for count in counts]
    for workers in (1, 2):
        flags = ("--workers", str(workers))
        measure = partial(_call, folder / "ag-news", "ag-news", 32, seconds, *flags)
        cases.append((("workers", "ag-news", workers), measure))
    for count in sorted({1, min(14, most_models), most_models}):
        copies = folder / f"{count}-models"
        _copy_models(store, copies, count)
        cases.append((("models", "shipped", count), partial(_start, copies)))
    for slots in _SLOTS:
        flags = ("--num-slots", str(slots))
        cases.append((("slots", "shakespeare", slots), partial(_start, folder / "shakespeare", *flags)))
    return cases


def _copy_models(store: Path, target: Path, count: int) -> None:
    """Writes a store of `count` models, each a copy of a shipped one under another name."""
    bundles = sorted(store.glob("*/*/bundle.json"))
    for number, manifest in zip(range(count), cycle(bundles), strict=False):
        content = json.loads(manifest.read_text(encoding="utf-8"))
        content["name"] += f"-{number}"
        copied = target / content["name"] / manifest.parent.name
        shutil.copytree(manifest.parent, copied)
        (copied / "bundle.json").write_text(json.dumps(content), encoding="utf-8")


def _start(store: Path, *flags: str) -> Figures:
    """Starts a server, and measures it when it is ready."""
    with running_server(ROOT, store, flags) as server:
        processes = _processes(server)
        return {
            "ready_s": server.start_s,
            "processor_s": _processor_s(processes),
            "resident_mib": server.memory_mib()["resident_mib"],
            "threads": sum(process.num_threads() for process in processes),
        }


def _call(store: Path, name: str, callers: int, seconds: float, *flags: str) -> Figures:
    """Calls a model, and measures what callers saw and what the server took."""
    with running_server(ROOT, store, flags) as server, tempfile.TemporaryDirectory() as out:
        task, *options = _TASKS[name]
        report = Path(out) / "report.json"
        command = [sys.executable, "-m", "headway_client", "load", task, *options, "--server", server.address]
        command += ["--concurrency", str(callers), "--duration", str(seconds), "--report", str(report)]
        processes = _processes(server)
        before = _processor_s(processes)
        ended = subprocess.run(command, env=tree_environment(ROOT), capture_output=True, text=True, check=False)
        if ended.returncode:
            raise ContestantError(f"{' '.join(command)}: {ended.stderr}")
        taken = _processor_s(processes) - before
        found = json.loads(report.read_text(encoding="utf-8"))
        share = seconds / (seconds + found["plan"]["warmup_s"])
        return {
            "calls_per_s": found["calls_per_s"],
            "p50_ms": found["latency_ms"]["p50"],
            "p99_ms": found["latency_ms"]["p99"],
            "processor_ms_a_call": 1e3 * taken * share / max(1, found["ok_count"]),
        }


def _processes(server: Server) -> list[psutil.Process]:
    first = psutil.Process(server.process.process_id)
    return [first, *first.children(recursive=True)]


def _processor_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _row(case: Case, rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians of rounds, with the least and the greatest of what is first."""
    curve, name, count = case
    medians = {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}
    first = next(iter(medians))
    ends = [round(end(one[first] for one in rounds), 3) for end in (min, max)]
    return {"curve": curve, "of": name, "count": count, **medians, "range": ends}


if __name__ == "__main__":
    typer.run(main)
