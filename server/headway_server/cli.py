"""`headway-server`: reads the settings, loads the models and serves them until a signal comes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from headway_server import keys
from headway_server.configuration import (
    Sources,
    explain,
    explain_arguments,
    format_settings,
    misspelt_variable,
    nearest_name,
)
from headway_server.errors import ServerError
from headway_server.log import configure_logging
from headway_server.monitoring import Monitoring
from headway_server.observers import NO_OBSERVER, joined
from headway_server.runtime import Runtime, describe_cores
from headway_server.serving.host import ModelHost, read_store
from headway_server.settings import ServerSettings
from headway_server.transports.grpc import (
    Beside,
    Doors,
    HeadwayServer,
    Statistics,
    address_problem,
    format_address,
    to_status,
)

if sys.platform == "win32":
    from asyncio import run as _run_loop
else:
    from uvloop import run as _run_loop  # up to 6 % more calls a second, docs/decisions/event-loop.md

_log = structlog.get_logger(__name__)
_USAGE_ERROR = 2
_STUCK = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the bundles of a store over gRPC; `arguments` stand in for those of the command line."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case ["keys", *rest]:
            keys.main(rest)
        case ["config", *rest]:
            _print_settings(rest)
        case rest:
            _serve(_read_settings(rest))


def _print_settings(arguments: Sequence[str]) -> None:
    """Prints the settings that a server would have, and where each was taken from, if it could start with them."""
    settings = _read_settings(arguments)
    try:
        Doors(settings)
        paths, _ = read_store(settings)
    except ServerError as error:
        _fail(str(error))
    for name, problem in _absent_models(settings, paths):
        sys.stderr.write(f"headway-server: models.{name}: {problem}\n")
    sys.stdout.write(format_settings(settings, Sources(ServerSettings, arguments)))


def _serve(settings: ServerSettings) -> None:
    """Loads the models and serves them until a signal comes."""
    if hasattr(signal, "SIGHUP"):  # a server that starts looks at its store anyway
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging(level=settings.log_level, line_format=settings.log_format, texts=settings.log_texts)
    ports = {
        "--host or --port": settings.port,
        "--health-port": settings.health_port,
        "--http-port": settings.http_port,
    }
    for flags, port in ports.items():
        if port is not None and (problem := address_problem(settings.host, port)):
            address = format_address(settings.host, port)
            _fail(f"cannot listen on {address}: {problem}; stop what listens there or choose another {flags}")
    try:
        Doors(settings)  # whose files may be wrong, which is better known before models are loaded
        monitoring = Monitoring.open(settings)
        runtime = Runtime(device=settings.device, num_threads=settings.threads, num_lanes=settings.lanes)
        statistics = Statistics() if settings.open_inference else None
        observer = joined((monitoring.observer, statistics or NO_OBSERVER))
        host = ModelHost.open(runtime, settings, observer=observer)
        for name, problem in _absent_models(settings, (bundle.path for bundle in host.bundles)):
            _log.warning(problem, model=name)
        server = partial(HeadwayServer, host, settings, observer=observer, statistics=statistics)
        has_ended = _run_loop(_run(server, host, runtime, settings, monitoring))
        monitoring.close()
    except ServerError as error:
        _fail(str(error))
    if not has_ended:  # the interpreter might wait for the thread that hangs
        sys.stderr.flush()
        os._exit(_STUCK)


def _absent_models(settings: ServerSettings, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the models that have settings and no bundle, which may be misspelt, with a line about each."""
    names = {path.partition("/")[0] for path in paths}
    for name in sorted(settings.models.keys() - names):
        yield name, "settings of a model that the store does not have" + nearest_name(name, names)


async def _run(
    make_server: Callable[[], HeadwayServer],
    host: ModelHost,
    runtime: Runtime,
    settings: ServerSettings,
    monitoring: Monitoring,
) -> bool:
    """Serves until a signal comes; returns True if every thread has ended."""

    def announce(port: int) -> None:
        http = f" http={format_address(settings.host, server.port_beside)}" if server.port_beside else ""
        sys.stdout.write(
            f"headway-server ready on {format_address(settings.host, port)} models={len(host.models)} "
            f"rejected={len(host.rejected)} device={runtime.device} threads={runtime.num_threads} "
            f"lanes={runtime.num_lanes}{http}\n"
        )
        sys.stdout.flush()
        _log.info("serving", store=str(settings.store), runtime=repr(runtime), cores=describe_cores())

    server = make_server()
    if settings.http_port is not None:
        server.beside = _open_http(host, settings, server, monitoring)
    monitoring.start(host, server.calls, runtime.cores)
    return await server.run(announce)


def _open_http(host: ModelHost, settings: ServerSettings, server: HeadwayServer, monitoring: Monitoring) -> Beside:
    """Makes the HTTP port.

    Raises:
        ServerError: Its libraries are not installed.
    """
    try:
        from headway_server.transports.http import HttpServer  # noqa: PLC0415 (an extra brings its libraries)
    except ImportError as error:
        raise ServerError(
            f"--http-port needs Starlette and uvicorn ({error}); install headway-server[http], or leave it out"
        ) from error
    return HttpServer(
        host,
        settings,
        calls=server.calls,
        callers=server.callers,
        describe=to_status,
        procedures=server.procedures,
        tls=server.doors.tls,
        write_metrics=monitoring.write_metrics if settings.http_metrics else None,
    )


def _read_settings(arguments: Sequence[str]) -> ServerSettings:
    """Reads command line, environment and file; ends the program with one line where something is wrong."""
    try:
        if problem := misspelt_variable(ServerSettings):
            _fail(problem)
        return CliApp.run(ServerSettings, list(arguments))
    except ServerError as error:
        _fail(str(error))
    except SettingsError as error:
        _fail(explain_arguments(error, ServerSettings))
    except ValidationError as error:
        _fail(explain(error, ServerSettings, Sources(ServerSettings, arguments)))


def _fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr."""
    sys.stderr.write(f"headway-server: {message}\n")
    raise SystemExit(_USAGE_ERROR)
