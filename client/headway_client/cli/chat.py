"""The command `chat`: a conversation in the terminal, or one answer to a conversation that is given."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from queue import SimpleQueue
from threading import Event, Thread
from typing import Annotated

import typer

from headway_client.cli.generation_flags import GenerationFlags, takes_flags
from headway_client.cli.output import as_dict, print_answer_json, print_json, print_tokens
from headway_client.cli.parameters import connected
from headway_client.client import Client
from headway_client.conversation import ChatMessage, Role
from headway_client.errors import CallCancelledError, HeadwayError

System = Annotated[str, typer.Option("--system", metavar="TEXT", help="What sets the task; comes first.")]
Messages = Annotated[
    list[str] | None,
    typer.Option(
        "--message",
        "-m",
        metavar="ROLE:TEXT",
        help="A turn of the conversation to answer; may be repeated. Without one, turns are read line by line.",
    ),
]


@takes_flags
def chat(*, system: System = "", messages: Messages = None, flags: GenerationFlags) -> None:
    """Talk to a model.

    Reads a line, prints the answer as it appears, and goes on with the conversation so far until the input ends
    (Ctrl-D). Ctrl-C ends an answer early. With --message, answers the conversation that is given, and ends.
    """
    turns = [ChatMessage(Role.SYSTEM, system)] if system else []
    turns += [_turn(message) for message in messages or ()]
    with connected(flags.server, flags.timeout) as client:
        if messages:
            _answer(client, turns, flags)
        elif sys.stdin.isatty():
            _talk(client, turns, flags)
        else:
            for line in sys.stdin:
                if line.strip():
                    turns.append(ChatMessage(Role.USER, line.rstrip("\r\n")))
                    turns.append(ChatMessage(Role.ASSISTANT, _answer(client, turns, flags)))


def _talk(client: Client, turns: list[ChatMessage], flags: GenerationFlags) -> None:
    """Reads turns from a person, who may try again when one fails."""
    with suppress(ImportError):
        import_module("readline")  # lets lines be edited
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not line.strip():
            continue
        turns.append(ChatMessage(Role.USER, line))
        try:
            turns.append(ChatMessage(Role.ASSISTANT, _answer(client, turns, flags)))
        except HeadwayError as error:
            typer.echo(f"headway: {' '.join(str(error).split())}", err=True)
            turns.pop()


def _answer(client: Client, turns: Sequence[ChatMessage], flags: GenerationFlags) -> str:
    """Prints the model's turn and returns what of it has come."""
    texts: list[str] = []
    with client.stream_chat(turns, **flags.options()) as stream, _interruptible(stream.close) as is_interrupted:
        try:
            for piece in stream:
                texts.append(piece.text)
                if flags.as_json:
                    print_json(as_dict(piece))
                else:
                    typer.echo(piece.text, nl=False)
        except CallCancelledError:
            if not is_interrupted():
                raise
        if is_interrupted():
            typer.echo()
            return "".join(texts)
        if flags.as_json:
            print_answer_json([[turn._asdict() for turn in turns]], stream.answer)
        else:
            typer.echo()
            print_tokens(stream.answer[0].prompt_tokens)
            print_tokens(stream.answer[0].tokens)
    return "".join(texts)


@contextmanager
def _interruptible(close: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Lets Ctrl-C end a call by closing it, from another thread, and tells whether it has.

    A KeyboardInterrupt is raised wherever the main thread is. Within gRPC that may be between the taking of a lock and
    the block that releases it, and then no call of the channel ever ends again.
    """
    interrupted = Event()
    orders: SimpleQueue[bool] = SimpleQueue()  # what a signal handler may put into, whatever it has interrupted

    def close_on_order() -> None:
        if orders.get():
            interrupted.set()
            close()

    closer = Thread(target=close_on_order, name="interrupt", daemon=True)
    closer.start()
    before = signal.signal(signal.SIGINT, lambda _number, _frame: orders.put(True))
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)
        orders.put(False)
        closer.join()


def _turn(message: str) -> ChatMessage:
    role, colon, text = message.partition(":")
    if not colon or role not in set(Role):
        raise typer.BadParameter(
            f"{message!r} does not begin with {', '.join(f'{role}:' for role in Role)}", param_hint="--message"
        )
    return ChatMessage(Role(role), text.lstrip())
