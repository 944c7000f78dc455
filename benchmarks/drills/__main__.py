"""python -m benchmarks.drills NAME: does something to a server; the last line is one JSON object."""

import json
import sys
from typing import Annotated

import typer

from benchmarks.drills.hold import hold
from benchmarks.drills.load_agreement import agreement
from benchmarks.drills.mutated import mutated
from benchmarks.drills.overload import overload
from benchmarks.drills.server import DrillError
from benchmarks.drills.soak import Kind, soak
from benchmarks.drills.stop import kill, stop
from benchmarks.drills.surroundings import surroundings

app = typer.Typer(add_completion=False, help=__doc__)
Seconds = Annotated[float, typer.Option(min=1, max=3600, help="How long the drill goes on, about.")]


@app.command("overload")
def _overload(
    service: Annotated[str, typer.Option(help="generation, translation, texts or images.")] = "generation",
    seconds: Seconds = 30,
    factor: Annotated[float, typer.Option(min=1, max=10, help="Times the capacity.")] = 3,
    deadline: Annotated[float, typer.Option(min=0.01, help="Seconds that each call has.")] = 5,
) -> None:
    """More calls than the server can answer."""
    _say(overload(service, seconds, factor=factor, deadline_s=deadline))


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
    kind: Annotated[Kind, typer.Option(help="What is called.")] = Kind.MIXED,
    seconds: Annotated[float, typer.Option(min=20, max=3600, help="How long it is measured.")] = 300,
) -> None:
    """Minutes of calls, in which nothing grows."""
    _say(soak(kind, seconds))


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
