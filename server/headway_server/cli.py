"""`headway-server`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer
from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from headway_server.batching.settings import BatchingSettings
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import HeadwayError
from headway_server.log import configure_logging
from headway_server.runtime import Runtime, describe_cores
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.transports.grpc.server import HeadwayServer, address_problem, format_address

_log = structlog.get_logger(__name__)
_USAGE_ERROR = 2
_STUCK = 1
_GROUPS: dict[str, type[BaseModel]] = {"engine": EngineSettings, "batching": BatchingSettings}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _option(setting: str, text: str) -> Any:
    """Makes an option of a setting, with its default and its name in the environment.

    The option's own default is None: what is not given is left to the environment and then to the settings.
    """
    group, _, name = setting.rpartition(".")
    field = (_GROUPS[group] if group else ServerSettings).model_fields[name]
    shown = "" if field.default is None or field.is_required() else f" [default: {field.default}]"
    variable = f"HEADWAY_{setting.replace('.', '__').upper()}"
    return typer.Option(f"--{name.replace('_', '-')}", help=f"{text}{shown} [env: {variable}]", show_default=False)


@app.command()
def serve(
    store: Annotated[Path | None, _option("store", "Folder that holds the bundles, STORE/MODEL/VERSION/.")] = None,
    host: Annotated[str | None, _option("host", "Address to listen on.")] = None,
    port: Annotated[int | None, _option("port", "Port to listen on; 0 takes a free one.")] = None,
    device: Annotated[str | None, _option("device", "auto, cpu or cuda; auto takes CUDA where it is.")] = None,
    precision: Annotated[
        str | None, _option("precision", "fp32, int8 or fp16; left out, the fastest that suits the device.")
    ] = None,
    threads: Annotated[
        int | None, _option("threads", "Cores that the models keep busy; left out, those this process may use.")
    ] = None,
    lanes: Annotated[
        int | None,
        _option("lanes", "Runs of a model at a time, a core each; left out, one a core. 1 holds weights once."),
    ] = None,
    max_message_mib: Annotated[int | None, _option("max_message_mib", "Largest request, in MiB.")] = None,
    max_text_kib: Annotated[int | None, _option("max_text_kib", "Largest text or prompt, in KiB of UTF-8.")] = None,
    max_image_mib: Annotated[float | None, _option("max_image_mib", "Largest encoded image, in MiB.")] = None,
    max_image_megapixels: Annotated[
        float | None, _option("max_image_megapixels", "Most pixels of an image, in millions.")
    ] = None,
    num_slots: Annotated[
        int | None,
        _option(
            "engine.num_slots",
            "Sequences that a generation or translation model runs at once; left out, 32 or what memory holds.",
        ),
    ] = None,
    num_prefix_slots: Annotated[
        int | None,
        _option(
            "engine.num_prefix_slots",
            "Slots' worth of memory that keeps the beginnings of prompts; left out, one to eight slots.",
        ),
    ] = None,
    max_waiting: Annotated[
        int | None, _option("engine.max_waiting", "Sequences that may wait for a slot; past that calls are refused.")
    ] = None,
    stream_interval_ms: Annotated[
        float | None,
        _option("engine.stream_interval_ms", "Least time between two pieces of a stream; tokens between are joined."),
    ] = None,
    speculation: Annotated[
        str | None,
        _option(
            "engine.speculation",
            "off, or prompt-lookup: draft tokens that a text seems to copy, while one or two sequences run.",
        ),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        _option(
            "batching.max_batch_tokens",
            "Most tokens of a classifier's batch, padding included; left out, 512 on the CPU.",
        ),
    ] = None,
    max_batch_images: Annotated[
        int | None,
        _option("batching.max_batch_images", "Most images of a batch; left out, 2 to 16 on the CPU, by their size."),
    ] = None,
    max_waiting_texts: Annotated[
        int | None,
        _option("batching.max_waiting_texts", "Texts that a classifier admits; past that calls are refused."),
    ] = None,
    max_waiting_images: Annotated[
        int | None, _option("batching.max_waiting_images", "Images that a model admits; past that calls are refused.")
    ] = None,
    max_waiting_mib: Annotated[
        int | None, _option("batching.max_waiting_mib", "MiB of texts or images that a classifier admits.")
    ] = None,
    max_calls: Annotated[
        int | None, _option("max_calls", "Calls that run at a time; past that they are refused unread.")
    ] = None,
    drain_timeout: Annotated[
        float | None, _option("drain_timeout", "Seconds that running calls have to finish after SIGTERM or Ctrl-C.")
    ] = None,
    log_level: Annotated[str | None, _option("log_level", "debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, _option("log_format", "text for people, json for programs.")] = None,
) -> None:
    """Serves the bundles of a store over gRPC."""
    _serve(_settings({name: value for name, value in locals().items() if value is not None}))


def _serve(settings: ServerSettings) -> None:
    """Loads the models and serves them until a signal comes."""
    configure_logging(level=settings.log_level, line_format=settings.log_format)
    if problem := address_problem(settings.host, settings.port):
        address = format_address(settings.host, settings.port)
        _fail(f"cannot listen on {address}: {problem}; stop what listens there or choose another --host or --port")
    try:
        runtime = Runtime(device=settings.device, num_threads=settings.threads, num_lanes=settings.lanes)
        host = ModelHost.open(runtime, settings)
        has_ended = asyncio.run(_run(host, runtime, settings))
    except HeadwayError as error:
        _fail(str(error))
    if not has_ended:  # the interpreter would wait for the thread that hangs
        sys.stderr.flush()
        os._exit(_STUCK)


async def _run(host: ModelHost, runtime: Runtime, settings: ServerSettings) -> bool:
    def announce(port: int) -> None:
        sys.stdout.write(
            f"headway-server ready on {format_address(settings.host, port)} models={len(host.models)} "
            f"rejected={len(host.rejected)} device={runtime.device} threads={runtime.num_threads} "
            f"lanes={runtime.cores.num_lanes}\n"
        )
        sys.stdout.flush()
        _log.info("serving", store=str(settings.store), runtime=repr(runtime), cores=describe_cores())

    return await HeadwayServer(host, settings).run(announce)


def _settings(given: dict[str, Any]) -> ServerSettings:
    """Puts the flags that were given into their groups and adds what the environment says."""
    flags: dict[str, Any] = {}
    for name, value in given.items():
        group = next((group for group, settings in _GROUPS.items() if name in settings.model_fields), None)
        (flags.setdefault(group, {}) if group else flags)[name] = value
    try:
        return ServerSettings(**flags)
    except SettingsError as error:  # a group in the environment that is not JSON
        _fail(f"environment: {error}; set HEADWAY_<GROUP>__<NAME>, as --help lists them")
    except ValidationError as error:
        first = error.errors()[0]
        flag = "--" + str(first["loc"][-1]).replace("_", "-")
        variable = "HEADWAY_" + "__".join(str(part) for part in first["loc"]).upper()
        if first["type"] == "missing":
            _fail(f"{flag} is missing; give it, or set {variable}")
        _fail(f"{flag} ({variable}) is {first['input']!r}: {first['msg']}")


def _fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr."""
    sys.stderr.write(f"headway-server: {message}\n")
    raise typer.Exit(_USAGE_ERROR)
