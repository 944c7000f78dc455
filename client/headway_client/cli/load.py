"""The command that measures a server under load: load."""

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
from headway_client.cli.flags import AsJson, ConnectionFlags, fail, reported_failures, takes_options
from headway_client.cli.output import print_json, read_inputs
from headway_client.connection import DEFAULT_TIMEOUT_S
from headway_client.load import (
    MAX_CONCURRENCY,
    MAX_DURATION_S,
    MAX_OUTSTANDING,
    MAX_RATE_PER_S,
    Input,
    LoadPlan,
    LoadRunner,
    LoadTask,
    Sender,
    format_report,
    make_report,
    sample_inputs,
)
from headway_client.options import ModelOptions
from headway_client.retry import NO_RETRIES


@takes_options
def load(
    task: Annotated[LoadTask, typer.Argument(metavar="TASK", help=f"What to call: {', '.join(LoadTask)}.")],
    *,
    rate: Annotated[
        float | None, typer.Option("--rate", max=MAX_RATE_PER_S, help="Open loop: calls per second (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, max=MAX_CONCURRENCY, help="Closed loop: callers.")
    ] = None,
    duration: Annotated[
        float, typer.Option("--duration", metavar="SECONDS", max=MAX_DURATION_S, help="Length of the measured phase.")
    ] = 10.0,
    warmup: Annotated[
        float,
        typer.Option("--warmup", metavar="SECONDS", min=0, max=MAX_DURATION_S, help="Length of the phase before."),
    ] = 2.0,
    max_outstanding: Annotated[
        int, typer.Option("--max-outstanding", min=1, max=MAX_OUTSTANDING, help="Open loop: most calls at a time.")
    ] = 256,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the open loop's arrival times. Default: drawn and printed.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Call the streaming RPC. Default: for generate-text, else not."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, max=256, help="Inputs of a call.")] = 1,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", help="Most tokens of a text.")] = None,
    beam_size: Annotated[int | None, typer.Option("--beam-size", help="Width of a translation's beam search.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Inputs or image files, one per line; - is stdin. Default: built-in inputs."),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")] = None,
    as_json: AsJson = False,
    options: ModelOptions,
    connection: ConnectionFlags,
) -> None:
    """Measure a server under load.

    Latency counts from the time a call was due, so that a stall of the server shows in full. Ctrl-C ends the test early
    and reports what was measured. The exit code is 1 if no call was answered.
    """
    with reported_failures(connection):
        plan = LoadPlan(
            task=task,
            rate_per_s=rate,
            concurrency=concurrency,
            duration_s=duration,
            warmup_s=warmup,
            max_outstanding=max_outstanding,
            seed=secrets.randbelow(2**32) if seed is None else seed,
            batch_size=batch_size,
            stream=stream if stream is not None else task is LoadTask.GENERATE_TEXT and batch_size == 1,
            timeout_s=connection.setdefault("timeout_s", DEFAULT_TIMEOUT_S),
            max_new_tokens=max_new_tokens,
            beam_size=beam_size,
            **options,
        )
        inputs = _inputs(task, file)
        typer.echo(plan.describe(), err=True)
        started_at = datetime.now(UTC)
        client = AsyncClient(**connection, retry=NO_RETRIES)
        runner = asyncio.run(_run(plan, inputs, client))
        result = make_report(runner, client.server, started_at)
        if report is not None:
            report.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if as_json:
            print_json(result)
        else:
            typer.echo("\n".join(format_report(runner)))
            sys.stdout.flush()
    if runner.recorder.ok_count + runner.recorder.completed_count == 0:
        fail(f"no call to {client.server} was answered", 1)


def _inputs(task: LoadTask, file: Path | None) -> Sequence[Input]:
    """Returns the user's inputs, or the built-in ones."""
    if file is None:
        return sample_inputs(task)
    lines = list(read_inputs(None, file))
    return [Path(line).read_bytes() for line in lines] if task.takes_images else lines


async def _run(plan: LoadPlan, inputs: Sequence[Input], client: AsyncClient) -> LoadRunner:
    """Runs the plan, and shows its progress.

    Raises:
        HeadwayError: The call before the test failed: the server cannot be reached or refuses such requests.
    """
    async with client:
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
    """Draws a line on stderr, if it is a terminal, until it is cancelled."""
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
