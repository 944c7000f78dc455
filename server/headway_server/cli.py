"""`headway-server`: reads the settings, loads the models and serves them until a signal comes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import NoReturn

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from headway_server import keys
from headway_server.configuration import (
    Sources,
    command_line,
    explain,
    explain_arguments,
    format_settings,
    misspelt_variable,
    nearest_name,
)
from headway_server.errors import ServerError
from headway_server.log import configure_logging
from headway_server.monitoring import Monitoring
from headway_server.observers import NO_OBSERVER, WriteMetrics, joined
from headway_server.runtime import Runtime, describe_cores
from headway_server.services import Statistics
from headway_server.services.application import Application, Door
from headway_server.serving.addresses import address_problem, format_address
from headway_server.serving.credentials import Credentials
from headway_server.serving.host import ModelHost, read_store
from headway_server.settings import ServerSettings
from headway_server.transports.grpc import GrpcServer
from headway_server.workers import Ready, Worker, choose_workers, supervise

if sys.platform == "win32":
    from asyncio import run as _run_loop
else:
    from uvloop import run as _run_loop  # up to 6 % more calls a second: docs/decisions/event-loop.md

_log = structlog.get_logger(__name__)
_USAGE_ERROR = 2
_STUCK = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves the bundles of a store over gRPC; `arguments` stand in for those of the command line."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case ["--version"]:
            sys.stdout.write(f"headway-server {version('headway-server')}\n")
        case ["keys", *rest]:
            keys.main(rest)
        case ["config", *rest]:
            _print_settings(rest)
        case ["worker", supervisor]:  # how a supervisor starts its workers
            _work(Worker(int(supervisor)))
        case rest:
            _start(_read_settings(rest))


def _print_settings(arguments: Sequence[str]) -> None:
    """Prints the settings of a server and their sources, once they are checked."""
    settings = _read_settings(arguments)
    try:
        Credentials(settings)
        paths, _ = read_store(settings)
        choice = choose_workers(settings)
    except ServerError as error:
        _fail(str(error))
    if settings.workers == "auto":
        sys.stderr.write(f"headway-server: workers: auto is {choice.count} here: {choice.reason}\n")
    for name, problem in _absent_models(settings, paths):
        sys.stderr.write(f"headway-server: models.{name}: {problem}\n")
    sys.stdout.write(format_settings(settings, Sources(ServerSettings, arguments)))


def _start(settings: ServerSettings) -> None:
    """Serves in this process, or in several as the settings say."""
    _configure_logging(settings)
    _check_ports(settings)
    try:
        choice = choose_workers(settings)
        if choice.count > 1:
            raise SystemExit(supervise(settings, choice))
        if settings.workers == "auto":
            _log.info("workers", count=1, reason=choice.reason)
            settings = settings.model_copy(update={"workers": 1})
        _serve(settings)
    except ServerError as error:
        _fail(str(error))


def _work(worker: Worker) -> None:
    """Serves as one of several processes."""
    _configure_logging(worker.settings, worker.index)
    try:
        _serve(worker.settings, worker)
    except ServerError as error:
        worker.fail(str(error))


def _configure_logging(settings: ServerSettings, worker: int | None = None) -> None:
    if hasattr(signal, "SIGHUP"):  # a server that starts looks at its store anyway
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    configure_logging(
        level=settings.log_level, line_format=settings.log_format, texts=settings.log_texts, worker=worker
    )


def _check_ports(settings: ServerSettings) -> None:
    ports = {
        "--host or --port": settings.port,
        "--health-port": settings.health_port,
        "--http-port": settings.http_port,
    }
    for flags, port in ports.items():
        if port is not None and (problem := address_problem(settings.host, port)):
            address = format_address(settings.host, port)
            _fail(f"cannot listen on {address}: {problem}; stop what listens there or choose another {flags}")


def _serve(settings: ServerSettings, worker: Worker | None = None) -> None:
    """Loads the models and serves them until a signal comes.

    Args:
        settings: Of the server, or of the worker.
        worker: Which of several processes this is; None: the only one.

    Raises:
        ServerError: It cannot start.
    """
    Credentials(settings)  # reads files that may be wrong: fail before models are loaded
    monitoring = Monitoring.open(settings, listens=worker is None)
    runtime = Runtime(
        device=settings.device,
        num_threads=settings.threads,
        num_lanes=settings.lanes,
        map_weights=settings.map_weights,
    )
    statistics = Statistics() if settings.open_inference else None
    observer = joined((monitoring.observer, statistics or NO_OBSERVER))
    if worker is None:
        host = ModelHost.open(runtime, settings, observer=observer)
    else:
        host = worker.open_host(runtime, observer)
    for name, problem in _absent_models(settings, (bundle.path for bundle in host.bundles)):
        _log.warning(problem, model=name)
    counts = None if worker is None else worker.counts
    make = partial(Application, host, settings, observer=observer, statistics=statistics, counts=counts)
    has_ended = _run_loop(_run(make, runtime, monitoring, worker))
    monitoring.close()
    if worker is not None:
        worker.close()
    if not has_ended:  # the interpreter might wait for the thread that hangs
        sys.stderr.flush()
        os._exit(_STUCK)


def _absent_models(settings: ServerSettings, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields models with settings but no bundle, each with a warning: the name may be misspelt."""
    names = {path.partition("/")[0] for path in paths}
    for name in sorted(settings.models.keys() - names):
        yield name, "settings of a model that is not in the store" + nearest_name(name, names)


async def _run(
    make: Callable[[], Application], runtime: Runtime, monitoring: Monitoring, worker: Worker | None
) -> bool:
    """Serves until a signal comes; returns True if every thread has ended."""
    application = make()
    host, settings = application.host, application.settings

    def announce() -> None:
        _spare_long_lived_objects()
        port, *others = application.ports
        ready = Ready(
            address=format_address(settings.host, port),
            num_models=len(host.models),
            num_rejected=len(host.rejected),
            device=runtime.device,
            num_threads=runtime.num_threads,
            num_lanes=runtime.num_lanes,
            http=format_address(settings.host, others[0]) if others else None,
        )
        if worker is None:
            ready.announce()
        else:
            worker.announce(ready)
        _log.info("serving", store=str(settings.store), runtime=repr(runtime), cores=describe_cores())

    write_metrics = monitoring.write_metrics
    if worker is not None:
        await worker.report_metrics(monitoring.collect)
        write_metrics = worker.write_metrics
    application.doors.append(GrpcServer(application))
    if settings.http_port is not None:
        application.doors.append(_open_http(application, write_metrics if settings.http_metrics else None))
    monitoring.start(host, application.calls, runtime.cores)
    return await application.run(announce)


def _spare_long_lived_objects() -> None:
    """Has full collections of garbage pass over what a server keeps, which held the event loop for 0.1 s each.

    A model that is unloaded is freed without the collector.
    """
    gc.collect()
    gc.freeze()


def _open_http(application: Application, write_metrics: WriteMetrics | None) -> Door:
    """Opens the HTTP port.

    Raises:
        ServerError: Its libraries are not installed.
    """
    try:
        from headway_server.transports.http import HttpServer  # noqa: PLC0415 (an extra brings its libraries)
    except ImportError as error:
        raise ServerError(
            f"--http-port needs Starlette and uvicorn ({error}); install headway-server[http], or leave it out"
        ) from error
    return HttpServer(application, write_metrics=write_metrics)


def _read_settings(arguments: Sequence[str]) -> ServerSettings:
    """Reads command line, environment and file; ends the program with one line where something is wrong."""
    try:
        if problem := misspelt_variable(ServerSettings):
            _fail(problem)
        return CliApp.run(ServerSettings, list(arguments), cli_settings_source=command_line(ServerSettings))
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
