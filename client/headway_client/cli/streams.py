"""Prints streams, for the commands that have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer

from headway_client.cli.output import as_dict, heading, print_answer_json, print_json
from headway_client.cli.parameters import named_inputs
from headway_client.streams import TextStream

ResultT = TypeVar("ResultT")


def print_streams(
    inputs: Iterable[str],
    open_stream: Callable[[str], TextStream[Any, ResultT]],
    as_json: bool,
    *,
    headed: bool = False,
    after: Callable[[str, ResultT], None] | None = None,
) -> None:
    """Prints the pieces of one text after another; as JSON, an object for every piece and one for the answer.

    Args:
        inputs: The inputs.
        open_stream: Begins the call for one of them.
        as_json: Whether JSON is wanted.
        headed: Whether each text has a heading.
        after: Prints what else came with a text, from its input and its result.
    """
    for text in inputs:
        if headed and not as_json:
            typer.echo(heading(text))
        with named_inputs([text]), open_stream(text) as stream:
            for piece in stream:
                if as_json:
                    print_json(as_dict(piece))
                else:
                    typer.echo(piece.text, nl=False)
            if as_json:
                print_answer_json([text], stream.answer)
                continue
            typer.echo()
            if after is not None:
                after(text, stream.answer[0])
