"""The commands that measure a server under load and compare reports: load, load-compare."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from headway_client.cli.flags import AsJson, ConnectionFlags, fail, reported_failures, takes_options
from headway_client.cli.output import check_outputs, print_json, print_table
from headway_client.cli.output import read_inputs as read_lines
from headway_client.connection import DEFAULT_TIMEOUT_S
from headway_client.options import ModelOptions
from headway_load import (
    FIRST_RATE_PER_S,
    MAX_CONCURRENCY,
    MAX_DURATION_S,
    MAX_OUTSTANDING,
    MAX_PROCESSES,
    MAX_RATE_PER_S,
    Arrivals,
    Inputs,
    LoadPlan,
    LoadProcesses,
    LoadTask,
    Objective,
    Outcome,
    Probe,
    Report,
    Snapshot,
    best,
    compare,
    find_max,
    format_report,
    make_page,
    make_plan,
    make_report,
    make_workload,
    read_inputs,
    read_report,
    read_scenario,
    read_times,
)

_MISSED = 3
"""Exit code of a test with a missed objective."""
_STDIN = Path("-")
_MODES = {"rate_per_s", "ramp_to_per_s", "replay_s", "concurrency"}
"""Fields of a plan that exclude each other; a flag for one replaces all."""
_LIVE_COLUMNS = ("ok", "failed", "p50, ms", "p99, ms", "first token p95, ms")

HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")]


@takes_options
def load(
    task: Annotated[
        LoadTask | None, typer.Argument(metavar="[TASK]", help=f"Task to call: {', '.join(LoadTask)}.")
    ] = None,
    *,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", metavar="FILE", help="TOML file of several workloads, see docs.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", max=MAX_RATE_PER_S, help="Open loop: calls per second.")
    ] = None,
    ramp_to: Annotated[
        float | None, typer.Option("--ramp-to", max=MAX_RATE_PER_S, help="Open loop: rate at the end.")
    ] = None,
    arrivals: Annotated[Arrivals | None, typer.Option("--arrivals", help="Open loop: spacing of the calls.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Open loop: call times in seconds, one per line of FILE."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, max=MAX_CONCURRENCY, help="Closed loop: callers.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration", metavar="SECONDS", max=MAX_DURATION_S, help="Length of the measured phase. Default: 10."
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            "--warmup", metavar="SECONDS", min=0, max=MAX_DURATION_S, help="Length of the warm-up phase. Default: 2."
        ),
    ] = None,
    max_outstanding: Annotated[
        int | None,
        typer.Option(
            "--max-outstanding", min=1, max=MAX_OUTSTANDING, help="Open loop: most calls at a time. Default: 256."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the arrival times. Default: drawn and printed.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Call the streaming RPC. Default: only for generate-text and chat."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Inputs of a call. Default: 1.")] = None,
    call_options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Option of the call, such as max_new_tokens=32. May be repeated.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Inputs or image files, line by line, .jsonl, or a folder; - is stdin. Default: built-in inputs.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="OBJECTIVE", help='Objective, such as "p99<200ms". May be repeated.'),
    ] = None,
    search: Annotated[bool, typer.Option("--find-max", help="Find the highest rate that meets every --slo.")] = False,
    max_probes: Annotated[int, typer.Option("--max-probes", min=1, max=100, help="Most rates to try.")] = 12,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=MAX_PROCESSES, help="Processes that make the calls.")
    ] = 1,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")] = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
    options: ModelOptions,
    connection: ConnectionFlags,
) -> None:
    """Measure a server under load.

    With a rate, latency counts from the time a call was due, so that a stall of the server shows in full. Ctrl-C ends
    the test early and reports the measurements so far. The exit code is 1 if no call was answered, 3 if an objective
    was missed.
    """
    with reported_failures(connection):
        plan: dict[str, Any] = {"seed": secrets.randbelow(2**32), "timeout_s": DEFAULT_TIMEOUT_S}
        of_a_task = {"stream": stream, "batch_size": batch_size, "options": {**_parse_options(call_options), **options}}
        given = {name: value for name, value in of_a_task.items() if value not in (None, {})}
        if scenario is not None:
            plan |= read_scenario(scenario)
            if task is not None or file is not None or given:
                raise ValueError("a scenario has its own tasks; leave out the task and its flags")
        elif task is not None:
            plan["workloads"] = (make_workload(task, _inputs(task, file), **given),)
        else:
            raise ValueError(f"there is nothing to call; give a --scenario, or a task: {', '.join(LoadTask)}")
        if search and rate is None and replay is None and concurrency is None:
            rate = plan.get("rate_per_s", FIRST_RATE_PER_S)
        if rate is not None or replay is not None or concurrency is not None:
            plan = {name: value for name, value in plan.items() if name not in _MODES}
        flags = {
            "rate_per_s": rate,
            "ramp_to_per_s": ramp_to,
            "arrivals": arrivals,
            "replay_s": None if replay is None else read_times(replay),
            "concurrency": concurrency,
            "duration_s": duration,
            "warmup_s": warmup,
            "max_outstanding": max_outstanding,
            "seed": seed,
            "timeout_s": connection.get("timeout_s"),
            "objectives": tuple(map(Objective.parse, slo)) if slo else None,
        }
        made = make_plan(**plan | {name: value for name, value in flags.items() if value is not None})
        if search and (made.rate_per_s is None or made.ramp_to_per_s is not None or not made.objectives):
            raise ValueError("--find-max needs a --slo, and a --rate without --ramp-to if you name the first rate")
        check_outputs(report, html)
        typer.echo(made.describe(), err=True)
        started_at = datetime.now(UTC)
        with LoadProcesses(dict(connection), processes) as running:
            outcome, probes = _measure(made, running, max_probes if search else 0)
            result = make_report(outcome, running.server, started_at, processes=processes, probes=probes)
        _write(result, report, html, as_json=as_json)
    if not result["ok_count"] + result["completed_count"]:
        fail(f"no call to {result['server']} was answered", 1)
    if not (best(probes) if search else all(each["met"] for each in result["objectives"])):
        raise typer.Exit(_MISSED)


def load_compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Report that `headway load --report` wrote.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another one.")],
    *,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare two reports of the load tester."""
    with reported_failures({}):
        check_outputs(html)
        reports = {_name(before, after): read_report(before), _name(after, before): read_report(after)}
        if len(reports) == 1:
            raise ValueError(f"{before} is given twice; name two reports")
        rows = list(compare(*reports.values()))
        if html is not None:
            html.write_text(make_page(reports), encoding="utf-8")
        if as_json:
            for row in rows:
                print_json(dict(zip(("workload", "figure", "before", "after", "change_percent"), row, strict=True)))
            return
        print_table(
            [
                ("figure", *reports, "change"),
                *(
                    (": ".join(filter(None, names)), _shown(was), _shown(now), _shown(change, "+.1f", " %"))
                    for *names, was, now, change in rows
                ),
            ]
        )


def _inputs(task: LoadTask, file: Path | None) -> Inputs:
    """Returns the user's inputs, or the built-in ones."""
    if file != _STDIN:
        return read_inputs(task, file)
    lines = list(read_lines(None, file))
    return Inputs([Path(line).read_bytes() for line in lines] if task.takes_images else lines)


def _parse_options(given: list[str] | None) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} has no value; write it as max_new_tokens=32")
        try:
            options[name] = json.loads(value)
        except ValueError:  # a text without quotes
            options[name] = value
    return options


def _measure(plan: LoadPlan, running: LoadProcesses, max_probes: int) -> tuple[Outcome, list[Probe]]:
    """Runs the plan, or searches the highest rate with it; returns the outcome and all probes."""
    last: list[Outcome] = []

    def run(plan: LoadPlan) -> Outcome:
        with _live(plan) as show:
            last[:] = [running.run(plan, show)]
        return last[0]

    if not max_probes:
        return run(plan), []
    probes = find_max(plan, run, max_probes, lambda probe: typer.echo(str(probe), err=True))
    highest = best(probes)
    return (highest or probes[-1]).outcome if probes else last[0], probes


@contextmanager
def _live(plan: LoadPlan) -> Iterator[Callable[[Snapshot], None] | None]:
    """Shows the test's progress on stderr, if it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(snapshot: Snapshot) -> None:
            table = Table("workload", *(Column(name, justify="right") for name in _LIVE_COLUMNS), box=None)
            for workload, each in zip(plan.workloads, snapshot.workloads, strict=True):
                counts = (each.completed_count, each.failed_count)
                times = (each.p50_ms, each.p99_ms, each.first_token_p95_ms if workload.stream else None)
                cells = [*(_shown(count, ",") for count in counts), *(_shown(time_ms, ".1f") for time_ms in times)]
                table.add_row(workload.name, *cells)
            bar = ProgressBar(total=1.0, completed=snapshot.progress, width=40)
            live.update(Group(bar, table, f"{snapshot.outstanding_count} outstanding"), refresh=True)

        yield show


def _write(result: Report, report: Path | None, html: Path | None, *, as_json: bool) -> None:
    if report is not None:
        report.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(make_page({"report": result}), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        typer.echo("\n".join(format_report(result)))
        sys.stdout.flush()


def _name(file: Path, other: Path) -> str:
    """Returns the name of a report's file, with its folder if the other one has the same."""
    return str(file) if file.name == other.name else file.name


def _shown(value: float | None, form: str = ",.4g", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
