"""python -m tests.drills NAME: does something to a server; the last line is one JSON object."""

import json
import sys
from typing import Annotated

import typer
from tests.drills.hold import hold
from tests.drills.load_agreement import agreement
from tests.drills.mutated import mutated
from tests.drills.overload import SERVICES, overload
from tests.drills.server import DrillError
from tests.drills.soak import soak
from tests.drills.stop import kill, stop
from tests.drills.surroundings import surroundings

app = typer.Typer(add_completion=False, help=__doc__)
Seconds = Annotated[float, typer.Option(min=1, max=3600, help="How long the drill goes on, about.")]


@app.command("overload")
def _overload(
    service: Annotated[str, typer.Option(help=f"One of {', '.join(SERVICES)}.")] = "generation",
    seconds: Seconds = 30,
    factor: Annotated[float, typer.Option(min=1, max=10, help="Times the peak.")] = 3,
    deadline: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds that each call has; left out: as suits the service.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of the server.")] = 1,
) -> None:
    """More calls than the server can answer."""
    _say(overload(service, seconds, factor=factor, deadline_s=deadline, threads=threads))


@app.command("stop")
def _stop(seconds: Seconds = 20) -> None:
    """SIGTERM under mixed load."""
    _say(stop(seconds))


@app.command("kill")
def _kill(seconds: Seconds = 20) -> None:
    """Kill -9 under load, and a new start."""
    _say(kill(seconds))


@app.command("hold")
def _hold(seconds: Seconds = 30) -> None:
    """Callers that open much, send half, read nothing, or go away."""
    _say(hold(seconds))


@app.command("mutated")
def _mutated(
    calls: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 7,
) -> None:
    """Calls that are random, cut off or mutated, of every method."""
    _say(mutated(calls, seed))


@app.command("surroundings")
def _surroundings() -> None:
    """A log that cannot be written, a full disk, a clock that jumps, peers that vanish."""
    _say(surroundings())


@app.command("soak")
def _soak(
    small_calls: Annotated[int, typer.Option(min=0, help="Small calls that are made first.")] = 20_000,
    mixed_seconds: Annotated[float, typer.Option(min=0, help="Then calls of every task, for so long.")] = 120,
    small_rate: Annotated[
        float | None, typer.Option(min=1, help="Small calls a second; left out: as many as 8 callers get answered.")
    ] = None,
    mixed_rate: Annotated[float, typer.Option(min=1, help="Calls of every task a second.")] = 60,
    minute: Annotated[float, typer.Option(min=5, max=600, help="Seconds that are measured and told as one.")] = 60,
) -> None:
    """Many calls to one server, in which nothing grows; a line a minute."""
    _say(
        soak(
            num_small_calls=small_calls,
            mixed_s=mixed_seconds,
            small_rate_per_s=small_rate,
            mixed_rate_per_s=mixed_rate,
            minute_s=minute,
        )
    )


@app.command("agreement")
def _agreement(rounds: Annotated[int, typer.Option(min=1, max=100)] = 5, seconds: Seconds = 5) -> None:
    """The load tester's figures beside those of independent clients."""
    _say(agreement(rounds, seconds))


def _say(result: object) -> None:
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    try:
        app()
    except DrillError as error:
        sys.exit(f"drill: {error}")
