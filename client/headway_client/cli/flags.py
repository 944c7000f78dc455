"""Arguments and flags of the commands, their connection and their failures.

The flags of a call are derived from the typed dictionary of its options.
"""

from __future__ import annotations

import inspect
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, is_typeddict

import grpc
import typer

from headway_client.cli.output import check_outputs, shorten
from headway_client.client import Client
from headway_client.connection import ConnectionOptions, settle
from headway_client.errors import CallError, HeadwayError, UnavailableError
from headway_client.options import Tool, options_of

TextArguments = Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Inputs; or use --file or stdin.")]
AudioArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[AUDIO]...", help="Audio files; or use --file or stdin.")
]
ImageArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Image files; or use --file or stdin.")
]
ImageArgument = Annotated[Path | None, typer.Argument(metavar="[IMAGE]", help="Image file; or --image-id.")]
File = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Read inputs from FILE, one per line; - is stdin."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Inputs to send with one call.")]

_TOLD_AFTER_S = 2.0
_REFUSED_S = 3.0
"""How long a command without a timeout of its own waits at a port of this machine where nobody listens."""
_OF_THIS_MACHINE = re.compile(r"(?P<host>localhost|127(\.\d{1,3}){3}|\[::1\]):(?P<port>\d{1,5})")
_LOOKS = 4
"""Checks of the connection within that time; all must find none."""
_WITHOUT_CONNECTION = (grpc.ChannelConnectivity.CONNECTING, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
_ELEMENT = re.compile(r"^(?:texts|prompts|images|questions|contexts)\[(\d+)\]")


class ConnectionFlags(ConnectionOptions, total=False):
    """Flags of every command: the connection and the timeout."""

    server: Annotated[str | None, "Server to call, or several IP addresses. Default: 127.0.0.1:50051."]
    timeout_s: Annotated[float, "Timeout of a call in seconds. Default: 60."]


class _Flag(NamedTuple):
    """Differences of a flag from its option: name, type and value."""

    names: str | None = None
    kind: Any = None
    metavar: str | None = None
    convert: Callable[[Any], Any] | None = None
    envvar: str | None = None
    """Environment variable, read by the client unless a profile replaces it."""
    description: str | None = None


def _parse_metadata(values: list[str]) -> list[tuple[str, str]]:
    pairs = [value.partition("=") for value in values]
    for key, equals, value in pairs:
        if not key or not equals:
            raise typer.BadParameter(
                f"{key + value!r} is not a key and a value, such as tenant=7", param_hint="--metadata"
            )
    return [(key.lower(), value) for key, _, value in pairs]


def _parse_biases(values: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{value!r} is not a token id and a number, such as 17=-5", param_hint="--logit-bias"
            ) from None
    return biases


def _json_reader(flag: str) -> Callable[[str], str]:
    """Returns a reader of a flag's JSON: the value itself, or the content of the file of that name."""

    def read(value: str) -> str:
        if value.lstrip().startswith(("{", "[")):
            return value
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise typer.BadParameter(f"{value}: {reason}", param_hint=flag) from None

    return read


def _read_tools(value: str) -> list[Tool]:
    """Makes tools from a JSON list of objects."""
    try:
        found = json.loads(_json_reader("--tools")(value))
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--tools") from None
    try:
        return [Tool(**{**tool, "parameters": tool.get("parameters") or ""}) for tool in found]
    except (TypeError, AttributeError):
        message = "must be a list of objects with name, description and parameters"
        raise typer.BadParameter(message, param_hint="--tools") from None


_FLAGS: dict[str, _Flag] = {
    "server": _Flag(metavar="HOST:PORT[,HOST:PORT]...", envvar="HEADWAY_SERVER"),
    "profile": _Flag(metavar="NAME", envvar="HEADWAY_PROFILE"),
    "tls": _Flag("--tls/--no-tls", envvar="HEADWAY_TLS"),
    "ca_file": _Flag(metavar="FILE", envvar="HEADWAY_CA_FILE"),
    "client_cert_file": _Flag(metavar="FILE", envvar="HEADWAY_CLIENT_CERT_FILE"),
    "client_key_file": _Flag(metavar="FILE", envvar="HEADWAY_CLIENT_KEY_FILE"),
    "tls_server_name": _Flag(metavar="NAME", envvar="HEADWAY_TLS_SERVER_NAME"),
    "load_balancing": _Flag(envvar="HEADWAY_LOAD_BALANCING"),
    "api_key": _Flag(metavar="KEY", envvar="HEADWAY_API_KEY"),
    "metadata": _Flag(kind=list[str], metavar="KEY=VALUE", convert=_parse_metadata),
    "timeout_s": _Flag("--timeout", metavar="SECONDS"),
    "max_duration_seconds": _Flag("--max-duration", metavar="SECONDS"),
    "stop_strings": _Flag("--stop-string", list[str], "TEXT"),
    "labels": _Flag("--label", list[str], "LABEL"),
    "candidate_labels": _Flag("--candidate-label", list[str], "TEXT"),
    "templates": _Flag("--template", list[str], "TEXT"),
    "targets": _Flag("--target", list[str], "TOKEN"),
    "image_ids": _Flag("--image-id", list[str], "ID"),
    "image": _Flag(kind=str, metavar="FILE", description="Image file to edit."),
    "mask": _Flag(kind=str, metavar="FILE", description="Inpainting mask: image file, white is generated anew."),
    "query_image": _Flag(kind=str, metavar="FILE", description="Image file to compare with."),
    "stop_token_ids": _Flag("--stop-token-id", list[int], "ID"),
    "logit_biases": _Flag("--logit-bias", list[str], "ID=BIAS", _parse_biases),
    "json_schema": _Flag(
        kind=str,
        metavar="FILE|JSON",
        convert=_json_reader("--json-schema"),
        description="JSON Schema of the text: JSON that begins with {, or a file with it.",
    ),
    "tools": _Flag(
        kind=str,
        metavar="FILE|JSON",
        convert=_read_tools,
        description="Tools that the model may call: a JSON list of objects with name, description and parameters, "
        "or a file with it.",
    ),
    "parallel_tool_calls": _Flag("--parallel-tool-calls/--no-parallel-tool-calls"),
    "chat_template_kwargs": _Flag(
        kind=str,
        metavar="FILE|JSON",
        convert=_json_reader("--chat-template-kwargs"),
        description="Variables of the chat template: JSON that begins with {, or a file with it.",
    ),
    "choices": _Flag("--choice", list[str], "TEXT"),
    "layers": _Flag("--layer", list[int], "NUMBER"),
    "heads": _Flag("--head", list[int], "NUMBER"),
    "normalize": _Flag("--normalize/--no-normalize"),
    "phrase_constraints": _Flag("--required-phrase and --forbidden-phrase"),
}
_NOT_FLAGS = {"credentials", "text_pairs", "target_prefixes", "prefixes", "questions", "phrase_constraints", "pages"}
"""Options without a flag, or set by flags of their own in a command."""


def flag_of(name: str) -> str:
    """Returns the flag of an option, such as `--stop-string` of `stop_strings`."""
    return _FLAGS.get(name, _Flag()).names or f"--{name.replace('_', '-')}"


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each argument of a command that is a typed dictionary by a flag for each of its options.

    The command gets a dictionary of the options on the command line.
    """
    own: list[inspect.Parameter] = []
    groups: dict[str, list[inspect.Parameter]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_typeddict(parameter.annotation):
            groups[parameter.name] = _parameters_of(parameter.annotation)
        else:
            own.append(parameter)

    @wraps(command)
    def run(**arguments: Any) -> None:
        given = {group: _given([flag.name for flag in flags], arguments) for group, flags in groups.items()}
        command(**arguments, **given)

    parameters = [*own, *(flag for flags in groups.values() for flag in flags)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters_of(kind: Any) -> list[inspect.Parameter]:
    """Makes a typer parameter for each option of a typed dictionary."""
    parameters = []
    for name, option in options_of(kind).items():
        if name in _NOT_FLAGS:
            continue
        flag = _FLAGS.get(name, _Flag())
        flag_type: Any = flag.kind or (get_args(option.type) or (option.type,))[0]  # the first of a union
        description = flag.description or option.description
        if get_origin(flag_type) is list:
            description += " May be repeated."
        if flag.envvar is not None:
            description += f" [env: {flag.envvar}]"
        made = typer.Option(flag_of(name), help=description, metavar=flag.metavar)
        annotation = Annotated[flag_type | None, made]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return parameters


def _given(names: Sequence[str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes the given options out of a command's arguments."""
    values = {name: arguments.pop(name) for name in names}
    converters = {name: flag.convert for name, flag in _FLAGS.items() if flag.convert is not None}
    return {
        name: converters[name](value) if name in converters else value
        for name, value in values.items()
        if value is not None and value != []
    }


@contextmanager
def connected(connection: ConnectionFlags, *outputs: Path | None) -> Iterator[Client]:
    """Opens a client for a command; checks first that its output files can be written."""
    with reported_failures(connection):
        check_outputs(*outputs)
        if connection.get("timeout_s") is None:
            _wait_for_listener(settle(connection)["server"])
    with reported_failures(connection), Client(**connection) as client, _told_of_waits(client):
        yield client


def _wait_for_listener(server: str) -> None:
    """Waits a little for a server of this machine at whose port nobody listens yet, and ends the command if none comes.

    Servers of other machines may be on their way for longer: the client waits for them until the call's timeout.
    """
    match = _OF_THIS_MACHINE.fullmatch(server)
    if match is None:
        return
    give_up_s = time.monotonic() + _REFUSED_S
    while True:
        try:
            with socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=_REFUSED_S):
                return
        except ConnectionRefusedError:
            if time.monotonic() > give_up_s:
                fail(
                    f"nothing listens at {server}; start a headway-server there, or give --timeout SECONDS to wait "
                    "longer for one that is loading",
                    1,
                )
            time.sleep(_REFUSED_S / 20)
        except OSError:  # gRPC says what is wrong
            return


@contextmanager
def _told_of_waits(client: Client) -> Iterator[None]:
    """Prints a line on stderr if there is no connection for a while: calls keep trying until their timeout."""
    has_ended = Event()
    watch = Thread(target=_watch, args=(client, has_ended), daemon=True)
    watch.start()
    try:
        yield
    finally:
        has_ended.set()
        watch.join()  # before the channel is closed


def _watch(client: Client, has_ended: Event) -> None:
    """Prints a line once a client has waited `_TOLD_AFTER_S` for a connection."""
    num_looks = 0
    while num_looks < _LOOKS and not has_ended.wait(_TOLD_AFTER_S / _LOOKS):
        num_looks = num_looks + 1 if client.connectivity() in _WITHOUT_CONNECTION else 0
    if num_looks == _LOOKS:
        typer.echo(f"headway: waiting for {client.server}; Ctrl-C ends", err=True)


@contextmanager
def reported_failures(connection: ConnectionFlags) -> Iterator[None]:
    """Ends the command with one line on stderr: with exit code 1 if a call failed, with 2 if an input is wrong."""
    try:
        yield
    except UnavailableError as error:
        # A server gives a reason for a refusal. Without a reason nobody answered.
        fail(str(error) if error.reason else f"{error}; {_advice(error, settle(connection))}", 1)
    except HeadwayError as error:
        fail(str(error), 1)
    except BrokenPipeError:  # the reader of the output has gone: the command ends quietly
        raise
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 2)
    except UnicodeDecodeError as error:
        fail(f"the input is not UTF-8 text: {error.reason} at byte {error.start}", 2)
    except (ValueError, ImportError) as error:  # a number out of its field's range; a missing extra
        fail(str(error), 2)


def _advice(error: UnavailableError, connection: Mapping[str, Any]) -> str:
    """Suggests the likely cause if nobody answered."""
    running = f"is a headway-server running at {connection['server']}?"
    if "CERTIFICATE_VERIFY_FAILED" in error.message:
        return "give the authority of the server's certificate by --ca-file"
    if "WRONG_VERSION_NUMBER" in error.message:
        return "the server does not encrypt; leave out --tls and certificate files"
    if "Socket closed" not in error.message or connection.get("client_cert_file"):
        return running
    if connection.get("tls") or connection.get("ca_file"):
        return f"{running} If it requires a client certificate, give --client-cert-file and --client-key-file"
    return f"{running} If it encrypts, give --tls or --ca-file"


@contextmanager
def named_inputs(inputs: Sequence[str], *, shared: Sequence[str] = ()) -> Iterator[None]:
    """Adds the command's input to an error about an element, such as `images[3]`; not where the field is `shared`."""
    try:
        yield
    except CallError as error:
        fields = [violation.field for violation in error.field_violations]
        elements = [_ELEMENT.search(field) for field in fields if field.partition("[")[0] not in shared]
        named = [inputs[int(index[1])] for index in elements if index and int(index[1]) < len(inputs)]
        if not named:
            raise
        fail(f"{error} (that is {', '.join(repr(shorten(text)) for text in named)})", 1)


def fail(message: str, exit_code: int) -> NoReturn:
    """Prints one line on stderr and ends the command."""
    typer.echo(f"headway: {' '.join(message.split())}", err=True)
    raise typer.Exit(exit_code)
