"""How the demo prints: plain indented lines, with bold headings where the output is a terminal."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from headway_client import Answer, LabelScore, StreamPiece

_INDENT = " " * 12


def section(rpc: str, about: str) -> None:
    """Begins the section of an RPC."""
    typer.echo()
    typer.secho(rpc, bold=True, nl=False)
    typer.echo(f"  {about}")


def line(name: str, text: str) -> None:
    """Prints a named line; the lines of a longer text stand below each other."""
    indented = text.strip("\n").replace("\n", f"\n{_INDENT}")
    typer.echo(f"  {name:<9} {indented}".rstrip())


def stream(name: str, pieces: Iterable[StreamPiece]) -> None:
    """Prints a text while it arrives, piece by piece."""
    typer.echo(f"  {name:<9} ", nl=False)
    begun = False
    try:
        for piece in pieces:
            text = piece.text if begun else piece.text.lstrip("\n")
            begun = begun or bool(text)
            typer.echo(text.replace("\n", f"\n{_INDENT}"), nl=False)
    finally:
        typer.echo()


def labels(scores: Iterable[LabelScore]) -> str:
    """Labels with their probabilities in percent."""
    return ", ".join(f"{score.label} {score.probability:.1%}" for score in scores)


def footer(answer: Answer[object], round_trip_s: float, token_count: int = 0) -> None:
    """Prints which model answered, and where the time went."""
    timings = answer.timings
    line("model", str(answer.model))
    parts = (
        f"{round_trip_s * 1e3:.1f} ms: waiting {timings.queue_s * 1e3:.1f}, "
        f"preprocessing {timings.preprocessing_s * 1e3:.1f}, inference {timings.inference_s * 1e3:.1f}"
    )
    rate = f"; {token_count} tokens, {token_count / round_trip_s:.0f} a second" if token_count else ""
    line("timing", parts + rate)
