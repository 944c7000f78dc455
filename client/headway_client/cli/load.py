"""The command that measures a server under load."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headway_client.async_client import AsyncClient
from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.inputs import read_inputs
from headway_client.cli.output import print_json
from headway_client.cli.parameters import fail, reported_failures
from headway_client.load.plan import (
    MAX_CONCURRENCY,
    MAX_DURATION_S,
    MAX_OUTSTANDING,
    MAX_RATE_PER_S,
    LoadPlan,
    LoadTask,
)
from headway_client.load.report import format_report, make_report
from headway_client.load.runner import LoadRunner
from headway_client.load.samples import sample_inputs
from headway_client.load.sender import Input, Sender
from headway_client.retry import NO_RETRIES

TaskName = Annotated[LoadTask, typer.Argument(metavar="TASK", help="generate, translate, classify or label.")]
Rate = Annotated[
    float | None, typer.Option("--rate", max=MAX_RATE_PER_S, help="Open loop: calls begun a second (Poisson).")
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", min=1, max=MAX_CONCURRENCY, help="Closed loop: callers.")
]
Duration = Annotated[
    float, typer.Option("--duration", metavar="SECONDS", max=MAX_DURATION_S, help="Length of the measured phase.")
]
Warmup = Annotated[
    float, typer.Option("--warmup", metavar="SECONDS", min=0, max=MAX_DURATION_S, help="Phase before it.")
]
Outstanding = Annotated[
    int, typer.Option("--max-outstanding", min=1, max=MAX_OUTSTANDING, help="Open loop: most calls at a time.")
]
ArrivalSeed = Annotated[int | None, typer.Option("--seed", help="Of the open loop's times. Default: drawn, printed.")]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Call the streaming RPC. Default: yes for generate, else no."),
]
InputsPerCall = Annotated[int, typer.Option("--batch-size", min=1, max=256, help="Inputs of a call.")]
BeamSize = Annotated[int | None, typer.Option("--beam-size", metavar="N", help="Beams of each translation.")]
InputFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Inputs, one a line (for label: image files); - is stdin. Default: built-in."),
]
Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")]


def load(
    task: TaskName,
    *,
    rate: Rate = None,
    concurrency: Concurrency = None,
    duration: Duration = 10.0,
    warmup: Warmup = 2.0,
    max_outstanding: Outstanding = 256,
    seed: ArrivalSeed = None,
    stream: Stream = None,
    batch_size: InputsPerCall = 1,
    file: InputFile = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    max_new_tokens: parameters.MaxNewTokens = None,
    beam_size: BeamSize = None,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    report: Report = None,
    as_json: parameters.AsJson = False,
) -> None:
    """Measure a server under load.

    Latency counts from the time a call was due, so a stall of the server shows in full. Ctrl-C ends the test early
    and reports what was measured. The exit code is 1 if no call was answered.
    """
    with reported_failures(server):
        plan = LoadPlan(
            task=task,
            rate_per_s=rate,
            concurrency=concurrency,
            duration_s=duration,
            warmup_s=warmup,
            max_outstanding=max_outstanding,
            seed=secrets.randbelow(2**32) if seed is None else seed,
            batch_size=batch_size,
            stream=stream if stream is not None else task is LoadTask.GENERATE and batch_size == 1,
            timeout_s=timeout,
            model=model,
            model_version=model_version,
            max_new_tokens=max_new_tokens,
            beam_size=beam_size,
        )
        inputs = _inputs(task, file)
        typer.echo(plan.describe(), err=True)
        started_at = datetime.now(UTC)
        runner = asyncio.run(_run(plan, inputs, server))
        _print(runner, make_report(runner, server, started_at), report, as_json)
    if runner.recorder.ok_count + runner.recorder.completed_count == 0:
        fail(f"no call to {server} was answered", 1)


def _inputs(task: LoadTask, file: Path | None) -> Sequence[Input]:
    """The inputs of the user, or the built-in ones."""
    if file is None:
        return sample_inputs(task)
    lines = list(read_inputs(None, file))
    if task is LoadTask.LABEL:
        return [Path(line).read_bytes() for line in lines]
    return lines


async def _run(plan: LoadPlan, inputs: Sequence[Input], server: str) -> LoadRunner:
    """Runs the plan, showing its progress.

    Raises:
        HeadwayError: The call that is made beforehand failed: the server is not there, or refuses such requests.
    """
    async with AsyncClient(server, timeout_s=plan.timeout_s, retry=NO_RETRIES) as client:
        sender = Sender(client, plan, inputs)
        await sender.probe()
        runner = LoadRunner(plan, sender)
        with suppress(NotImplementedError):  # an event loop without signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, runner.stop)
        progress = asyncio.create_task(_show_progress(runner))
        try:
            await runner.run()
        finally:
            progress.cancel()
            with suppress(asyncio.CancelledError):
                await progress
    return runner


async def _show_progress(runner: LoadRunner) -> None:
    """Redraws a line on stderr until it is cancelled; nothing where stderr is no terminal."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        line = progress.add_task("", total=1.0)
        while True:
            recorder = runner.recorder
            progress.update(
                line,
                completed=runner.progress(),
                description=f"{recorder.ok_count} ok, {sum(recorder.error_counts.values())} failed, "
                f"{recorder.outstanding_count} outstanding, p50 {recorder.latency.percentile_ms(50):.1f} ms, "
                f"p99 {recorder.latency.percentile_ms(99):.1f} ms",
            )
            progress.refresh()
            await asyncio.sleep(0.25)


def _print(runner: LoadRunner, report: dict[str, object], file: Path | None, as_json: bool) -> None:
    """Writes the report where it was asked for."""
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(report)
        return
    for line in format_report(runner):
        typer.echo(line)
    sys.stdout.flush()
