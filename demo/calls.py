"""Puts examples to a server and prints a line for each; those of the demo fit a page of 100 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import typer
from examples import EXAMPLES, Example, examples_of

from headway_client import CallError, Client, HeadwayError

_UNANSWERED = {
    "FORBIDDEN": "not allowed to this caller",
    "MODEL_NOT_FOUND": "its model is not here",
    "WRONG_TASK": "no model here can do this",
}
"""What a line says in place of an answer, by the reason of an error that is nobody's mistake."""
_COLOURS = {"✓": typer.colors.GREEN, "✗": typer.colors.RED}


class Calls:
    """Calls a server and compares its answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def call_every_rpc(self, images: Iterable[Path] = (), audio: Iterable[Path] = ()) -> list[str]:
        """Puts the examples of every RPC, and the caller's own files, whose answers are not checked.

        Returns:
            The examples that were answered wrongly or failed, with their answers.
        """
        typer.echo(f"{'Call':<24} {'asked':<25} {'answer':<25} {'expected':<15}    time")
        failed = _show(self._client, EXAMPLES)
        return failed + _show(self._client, examples_of(images, audio), are_yours=True)


def _show(client: Client, examples: Iterable[Example], *, are_yours: bool = False) -> list[str]:
    """Prints calls, what was asked, the answer, what was expected and the time of each example.

    An answer that is not checked may be an error, unless it is that of a file of the user's.
    """
    failed, without_model = [], []
    unchecked = "yours" if are_yours else "shown"
    for example in examples:
        began_s = time.perf_counter()
        try:
            answer = example.answer(client, example.asked)
            mark = "·" if not example.expected else "✓" if example.expected in answer else "✗"
        except (HeadwayError, IndexError, OSError) as error:
            reason = error.reason if isinstance(error, CallError) else ""
            mark = "·" if reason in _UNANSWERED or not (example.expected or are_yours) else "✗"
            answer = _UNANSWERED.get(reason, "an empty answer" if isinstance(error, IndexError) else str(error))
            if reason == "WRONG_TASK" and not example.expected:
                without_model.append(example.rpcs)
                continue
        if mark == "✗":
            failed.append(f"{example.rpcs} ({example.asked}): {answer}")
        typer.echo(
            f"{typer.style(mark, fg=_COLOURS.get(mark))} {_cut(example.rpcs, 22)} {_cut(example.asked, 25)} "
            f"{_cut(answer, 25) if example.expected else answer.ljust(25)} {_cut(example.expected or unchecked, 15)} "
            f"{(time.perf_counter() - began_s) * 1e3:4.0f} ms"
        )
    if without_model:
        text = f"No model here can do {', '.join(without_model)}."
        typer.echo(textwrap.fill(text, 100, initial_indent="· ", subsequent_indent="  "))
    return failed


def _cut(text: str, width: int) -> str:
    """Returns a text on one line, of that width."""
    text = " ".join(text.split())
    return f"{text[: width - 1]}…" if len(text) > width else text.ljust(width)
