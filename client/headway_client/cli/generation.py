"""The commands that generate text: generate-text, and chat, a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Annotated, Any

import typer

from headway_client.cli.calls import options_for_stream, print_answers, print_streams
from headway_client.cli.flags import AsJson, BatchSize, ConnectionFlags, File, TextArguments, connected, takes_options
from headway_client.cli.output import (
    as_dict,
    print_answer_json,
    print_heading,
    print_json,
    print_tokens,
    read_inputs,
)
from headway_client.client import Client
from headway_client.errors import CallCancelledError, HeadwayError
from headway_client.options import GenerateTextOptions, StreamChatOptions, StreamGenerateTextOptions
from headway_client.requests import ChatMessage, Picture, Role
from headway_client.results import GeneratedText, TextDelta, ToolCall

Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Print text as it is generated. Default: yes, unless --json."),
]
System = Annotated[str, typer.Option("--system", metavar="TEXT", help="System turn at the beginning.")]
Messages = Annotated[
    list[str] | None,
    typer.Option(
        "--message",
        "-m",
        metavar="ROLE:TEXT",
        help="Turn of the conversation, such as user:TEXT; may be repeated. Without one, turns are read line by line.",
    ),
]


@takes_options
def generate_text(
    texts: TextArguments = None,
    *,
    file: File = None,
    stream: Stream = None,
    batch_size: BatchSize = 16,
    as_json: AsJson = False,
    options: GenerateTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Continue texts."""
    has_samples = options.get("sample_count", 1) != 1
    headed = file is not None or len(texts or ()) != 1 or has_samples

    def show(text: str, result: GeneratedText) -> None:
        if headed:
            print_heading(text, result.sample_index + 1 if has_samples else None)
        typer.echo(result.text)
        _show_tokens(text, result)

    prompts = read_inputs(texts, file)
    if stream or (stream is None and not as_json and not has_samples):
        streamed: StreamGenerateTextOptions = options_for_stream(options, StreamGenerateTextOptions)
        with connected(connection) as client:
            print_streams(
                prompts,
                lambda text: client.stream_generate_text(text, **streamed),
                None if as_json else _show_tokens,
                headed=headed,
            )
        return
    with connected(connection) as client:
        print_answers(
            prompts, batch_size, lambda batch: client.generate_text(batch, **options), None if as_json else show
        )


ChatImages = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Image before the text of the first turn of the user; may be repeated. For models that read images.",
    ),
]


@takes_options
def chat(
    *,
    system: System = "",
    messages: Messages = None,
    images: ChatImages = None,
    as_json: AsJson = False,
    options: StreamChatOptions,
    connection: ConnectionFlags,
) -> None:
    """Talk to a model.

    Reads a line, prints the answer as it is generated, and continues the conversation until the input ends (Ctrl-D).
    Ctrl-C ends an answer early. With --message, answers the given conversation and ends.
    """
    turns = [ChatMessage(Role.SYSTEM, system)] if system else []
    turns += [_parse_turn(message) for message in messages or ()]
    pictures = [Picture(path) for path in images or ()]
    if pictures and messages:
        first = next((index for index, turn in enumerate(turns) if turn.role is Role.USER), None)
        if first is None:
            raise typer.BadParameter("there is no turn of the user to put them into", param_hint="--image")
        turns[first], pictures = _with_pictures(turns[first], pictures), []
    with connected(connection) as client:
        talk = _Talk(client, turns, options, as_json, pictures=pictures)
        if messages:
            talk.answer()
        elif sys.stdin.isatty():
            talk.interactively()
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.reply_to(line.rstrip("\r\n"))


class _Talk:
    """A conversation in progress."""

    def __init__(
        self,
        client: Client,
        turns: list[ChatMessage],
        options: StreamChatOptions,
        as_json: bool,
        *,
        pictures: Sequence[Picture] = (),
    ) -> None:
        self._client = client
        self._pictures = pictures  # of the first turn of the user
        self._turns = turns
        self._options = options
        self._as_json = as_json

    def interactively(self) -> None:
        """Reads turns from a person, who may retry a failed one."""
        with suppress(ImportError):
            import_module("readline")  # makes lines editable
        while True:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                typer.echo()
                return
            if not line.strip():
                continue
            try:
                self.reply_to(line)
            except HeadwayError as error:
                typer.echo(f"headway: {' '.join(str(error).split())}", err=True)
                self._turns.pop()

    def reply_to(self, text: str) -> None:
        """Adds the user's turn and the model's answer to the conversation."""
        turn = ChatMessage(Role.USER, text)
        is_first = all(turn.role is not Role.USER for turn in self._turns)
        self._turns.append(_with_pictures(turn, self._pictures) if is_first else turn)
        self._turns.append(self.answer())

    def answer(self) -> ChatMessage:
        """Prints the model's turn; returns the part that arrived."""
        texts: list[str] = []
        reasoning, calls = "", tuple[ToolCall, ...]()
        with self._client.stream_chat(self._turns, **self._options) as stream, _interruptible(stream.close) as ended:
            try:
                for delta in stream:
                    texts.append(delta.text)
                    self._show(delta)
            except CallCancelledError:
                if not ended():
                    raise
            if ended():
                typer.echo()
            elif self._as_json:
                print_answer_json([[_shown(turn) for turn in self._turns]], stream.answer)
            else:
                typer.echo()
                _show_tokens("", stream.answer[0])
            if not ended():
                reasoning, calls = stream.answer[0].reasoning, stream.answer[0].tool_calls
        if not self._as_json:
            for call in calls:
                typer.echo(f"{call.name} {call.arguments_json}")
        return ChatMessage(Role.ASSISTANT, "".join(texts), reasoning, calls)

    def _show(self, delta: TextDelta) -> None:
        if self._as_json:
            print_json(as_dict(delta))
            return
        if delta.reasoning:
            typer.echo(typer.style(delta.reasoning, dim=True), nl=False, err=True)
        typer.echo(delta.text, nl=False)


@contextmanager
def _interruptible(close: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Makes Ctrl-C end a call by closing it from another thread; yields a function that tells if it did.

    Python raises KeyboardInterrupt anywhere in the main thread. Within gRPC that may be after a lock is taken and
    before the block that releases it: no later call of the channel would end.
    """
    interrupted = Event()
    orders: SimpleQueue[bool] = SimpleQueue()  # a signal handler may put into it at any time

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


def _with_pictures(turn: ChatMessage, pictures: Sequence[Picture]) -> ChatMessage:
    return turn._replace(content=[*pictures, str(turn.content)]) if pictures else turn


def _shown(turn: ChatMessage) -> dict[str, Any]:
    """Returns a turn as JSON: role, content and further fields. A picture is the path of its file."""
    calls = [as_dict(call) for call in turn.tool_calls]
    content = turn.content
    if not isinstance(content, str):
        content = [part if isinstance(part, str) else {"image": str(part.image)} for part in content]  # type: ignore[misc]
    return {
        name: value
        for name, value in {**turn._asdict(), "content": content, "tool_calls": calls}.items()
        if value or name in ("role", "content")
    }


def _parse_turn(message: str) -> ChatMessage:
    role, colon, text = message.partition(":")
    if not colon or role not in set(Role):
        roles = ", ".join(f"{role}:" for role in Role)
        raise typer.BadParameter(f"{message!r} does not begin with {roles}", param_hint="--message")
    return ChatMessage(Role(role), text.lstrip())


def _show_tokens(_prompt: str, result: GeneratedText) -> None:
    """Prints the log-probabilities of a text, if any."""
    print_tokens(result.prompt_tokens)
    print_tokens(result.tokens)
