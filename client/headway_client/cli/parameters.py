"""Arguments and options that several commands share, and how a command connects and fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from headway_client.cli.output import shorten
from headway_client.client import Client
from headway_client.errors import CallError, HeadwayError, UnavailableError

Texts = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; or use --file or stdin.")]
Images = Annotated[list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Image files; or use --file or stdin.")]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read inputs from FILE, one a line; - is stdin."),
]
Server = Annotated[str, typer.Option("--server", metavar="HOST:PORT", envvar="HEADWAY_SERVER", help="Server to call.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="Longest time of a call.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
ModelName = Annotated[str, typer.Option("--model", metavar="NAME", help="Model to use.")]
ModelVersion = Annotated[str, typer.Option("--model-version", metavar="VERSION", help="Version of the model.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Shorten an input that is too long.")]
Pairs = Annotated[bool, typer.Option("--pairs", help="Inputs are two texts each, with a tab between them.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Inputs sent with one call.")]
TopLabels = Annotated[
    int | None,
    typer.Option("--top-k", min=0, help="Labels to ask for; 0 is all. Default: all, of which three are printed."),
]
MaxNewTokens = Annotated[int | None, typer.Option("--max-new-tokens", help="Most tokens to produce.")]

_INDEX = re.compile(r"^(?:texts|prompts|images)\[(\d+)\]")


@contextmanager
def connected(server: str, timeout_s: float) -> Iterator[Client]:
    """A client for the length of a command; a failed call becomes one line on stderr and exit code 1."""
    with reported_failures(server), Client(server, timeout_s=timeout_s) as client:
        yield client


@contextmanager
def reported_failures(server: str) -> Iterator[None]:
    """Tells a failure in one line: of a call with exit code 1, of an input or an option with 2."""
    try:
        yield
    except UnavailableError as error:
        # A server that is there and turns the call away says why; without a reason nobody answered.
        fail(str(error) if error.reason else f"{error}; is a headway-server running at {server}?", 1)
    except HeadwayError as error:
        fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has gone, which ends the command quietly
        raise
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except UnicodeDecodeError as error:
        fail(f"the input is not UTF-8 text: {error.reason} at byte {error.start}", 2)
    except ValueError as error:  # a number that its field cannot hold
        fail(str(error), 2)


@contextmanager
def named_inputs(inputs: Sequence[str]) -> Iterator[None]:
    """Adds to an error about an element, such as `images[3]`, which of the command's inputs it was."""
    try:
        yield
    except CallError as error:
        fields = [_INDEX.search(violation.field) for violation in error.field_violations]
        named = [inputs[int(index[1])] for index in fields if index and int(index[1]) < len(inputs)]
        if not named:
            raise
        fail(f"{error} (that is {', '.join(repr(shorten(text)) for text in named)})", 1)


def fail(message: str, exit_code: int) -> NoReturn:
    """Prints one line on stderr and ends the command."""
    typer.echo(f"headway: {' '.join(message.split())}", err=True)
    raise typer.Exit(exit_code)
