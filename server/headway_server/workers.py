"""Several processes that answer at one port: how many, what each gets, and the supervisor that keeps them.

The kernel shares connections out among the workers, which all listen at the port (SO_REUSEPORT). Supervisor and worker
talk over a pair of sockets, in lines of JSON: each may ask the other. A worker that has ended is replaced. A supervisor
that has ended takes its workers with it: one that loads is killed, and one that serves drains.

What one worker is told about the models, all follow: calls that change the server take turns, and a worker that starts
takes over from another what such calls have said.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

import structlog
from pydantic import BaseModel

from headway_server.batching.settings import MAX_GRID_PROMPTS, MAX_IMAGES, MAX_TEXTS, BatchingSettings
from headway_server.bundles import Manifest, Task, read_manifest
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import BundleError, BundleRejectedError, DrainingError, ModelNotFoundError, ServerError
from headway_server.runtime import CLOSE_TIMEOUT_S, Runtime, available_bytes, share_memory, usable_cores
from headway_server.serving.counts import Counts
from headway_server.serving.credentials import format_address
from headway_server.serving.families import ServedModel
from headway_server.serving.host import BundleStatus, ModelHost, read_store
from headway_server.serving.images import KeptImage
from headway_server.serving.routes import Alias, Route, Routes
from headway_server.settings import ModelSettings, ServerSettings

if TYPE_CHECKING:
    from headway_server.monitoring.metrics import Sample

Answer: TypeAlias = Callable[[str, list[Any]], Awaitable[Any]]
"""Answers what the other side asks: by its name and its arguments, all of them JSON."""
_Result = TypeVar("_Result")
_Change: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]

_MOST_PARAMETERS: Final = 20_000_000
"""Of a model whose calls cost more around the model than in it; larger ones gain from cores, not from processes."""
_COPIES: Final = 2
"""How often a worker holds weights, where it has lanes."""
_MOST_LINE_BYTES: Final = 2**26
_MOST_TOLD_BYTES: Final = 2**25
"""Of images that one worker tells another in a line: base64 makes four thirds of them."""
_ASK_TIMEOUT_S: Final = 5.0
"""How long a worker has to say what it counts, or what it was asked to serve."""
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
_GOOD_LIFE_S: Final = 60.0
"""A worker that has answered for so long is replaced at once when it ends."""
_GRACE_S: Final = 10.0
"""How much longer than its drain a worker may take to end."""
_FAILED: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_log = structlog.get_logger(__name__)


# How many


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many workers a server has, and why."""

    count: int
    reason: str


def choose_workers(settings: ServerSettings) -> Choice:
    """Decides how many workers there are; reads the manifests of the store where the settings leave it open.

    Raises:
        ServerError: The store cannot be read, or there cannot be several workers here.
    """
    if settings.workers == 1:
        return Choice(count=1, reason="as the settings say")
    if sys.platform != "linux":
        raise ServerError(f"--workers is for Linux, which shares a port out among processes; this is {sys.platform}")
    on_cuda = Runtime(device=settings.device, num_threads=1).device == "cuda"
    if settings.workers != "auto":
        if on_cuda:
            raise ServerError("--workers is for the CPU; one process uses a GPU best, so leave it out")
        return Choice(count=settings.workers, reason="as the settings say")
    if on_cuda:
        return Choice(count=1, reason="one process uses a GPU best")
    return _suiting(settings, _read_manifests(settings))


def _read_manifests(settings: ServerSettings) -> list[Manifest]:
    manifests = []
    for path in read_store(settings)[0]:
        with suppress(BundleError):  # it is rejected when it is loaded
            manifests.append(read_manifest(settings.store / path))
    return manifests


def _suiting(settings: ServerSettings, manifests: Sequence[Manifest]) -> Choice:
    count = settings.threads or usable_cores()
    large = [one.name for one in manifests if one.architecture.parameter_count > _MOST_PARAMETERS]
    if large:
        return Choice(count=1, reason=f"{_names(large)}: more than {_MOST_PARAMETERS:,} parameters, which cores share")
    if generating := [one.name for one in manifests if one.task is Task.GENERATION]:
        return Choice(count=1, reason=f"{_names(generating)}: one process shares slots and prefix cache among callers")
    reason = f"{count} cores, one for each worker, and no model has more than {_MOST_PARAMETERS:,} parameters"
    size = _COPIES * sum(file.size_bytes for manifest in manifests for file in manifest.files.values())
    available = available_bytes("cpu")
    if available is not None and size and count > (fitting := max(1, available // 2 // size)):
        count, reason = fitting, f"half of the memory holds the models {fitting} times"
    return Choice(count=count, reason=reason)


def _names(names: Sequence[str]) -> str:
    several = sorted(set(names))
    return ", ".join(several[:3]) + (", ..." if len(several) > 3 else "")


# What each gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is and has."""

    index: int
    num_workers: int
    settings: ServerSettings
    cores: tuple[int, ...]
    """Those that it runs on."""
    counts: int
    """File descriptor of what all workers count together."""
    supervisor: int
    """Process id."""
    asked_for: Mapping[str, bool]
    """What calls have loaded and unloaded; see `ModelHost.open`."""
    routes: str | None
    """What calls have made of the routes, as JSON; None: they are as the store says."""


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Shares cores out, neighbours together; workers take turns where there are too few."""
    count = len(cores)
    return [
        tuple(cores[index * count // num_workers : (index + 1) * count // num_workers]) or (cores[index % count],)
        for index in range(num_workers)
    ]


def share_settings(settings: ServerSettings, num_workers: int) -> list[ServerSettings]:
    """Returns the settings of each worker: its part of the cores, the slots and what may wait.

    Calls that run and bytes of their requests are no parts: all workers count them together.
    """
    num_cores = settings.threads or usable_cores()
    max_calls, max_bytes = settings.call_limits(available_bytes("cpu"))
    batching, connection = settings.batching, settings.connection

    def part(total: int, least: int = 1) -> int:
        return max(min(least, total), -(-total // num_workers))

    arriving = part(connection.max_arriving_mib, settings.max_message_mib)
    models: dict[str, ModelSettings] = {}
    for name, own in settings.models.items():
        parts = _parts_of_engine(own, part) | _parts_of_batching(own, part)
        models[name] = own.model_copy(update={field: parts[field] for field in parts.keys() & own.model_fields_set})
    common = settings.model_copy(
        update={
            "workers": num_workers,
            "max_calls": max_calls,
            "max_inflight_mib": max(1, max_bytes >> 20),
            "engine": settings.engine.model_copy(update=_parts_of_engine(settings.engine, part)),
            "batching": batching.model_copy(update=_parts_of_batching(batching, part)),
            "connection": connection.model_copy(update={"max_arriving_mib": arriving}),
            "models": models,
        }
    )
    ends = [index * num_cores // num_workers for index in range(num_workers + 1)]
    return [common.model_copy(update={"threads": max(1, end - start)}) for start, end in itertools.pairwise(ends)]


def _parts_of_batching(batching: BatchingSettings, part: Callable[..., int]) -> dict[str, int]:
    return {
        "max_waiting_texts": part(batching.max_waiting_texts, MAX_TEXTS),
        "max_waiting_images": part(batching.max_waiting_images, MAX_IMAGES),
        "max_waiting_prompts": part(batching.max_waiting_prompts, MAX_GRID_PROMPTS),
        "max_waiting_mib": part(batching.max_waiting_mib),
    }


def _parts_of_engine(engine: EngineSettings, part: Callable[..., int]) -> dict[str, int]:
    parts = {"max_waiting": part(engine.max_waiting)}
    if engine.num_slots is not None:
        parts["num_slots"] = part(engine.num_slots)
    if engine.num_prefix_slots:
        parts["num_prefix_slots"] = part(engine.num_prefix_slots)
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the ready line says."""

    address: str
    num_models: int
    num_rejected: int
    device: str
    num_threads: int
    num_lanes: int
    http: str | None = None
    num_workers: int = 1

    def announce(self) -> None:
        """Writes the line to stdout, where nothing else is ever written."""
        workers = f" workers={self.num_workers}" if self.num_workers > 1 else ""
        http = f" http={self.http}" if self.http else ""
        sys.stdout.write(
            f"headway-server ready on {self.address} models={self.num_models} rejected={self.num_rejected} "
            f"device={self.device} threads={self.num_threads} lanes={self.num_lanes}{workers}{http}\n"
        )
        sys.stdout.flush()


# Talking


class NotFollowedError(ServerError):
    """Another process of this server could not do what it was asked to."""


class _Line:
    """One end of a pair of sockets over which each side may ask the other. Belongs to the event loop."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, end: socket.socket) -> None:
        """Answers until the other side has gone; whoever waits for it learns that by ConnectionError."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end, limit=_MOST_LINE_BYTES)
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except (ConnectionError, ValueError):
            pass
        finally:
            self._writer.close()
            self._writer = None
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ConnectionError("has gone"))

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Asks the other side.

        Raises:
            ConnectionError: It has gone.
            NotFollowedError: It could not do that; its own words.
        """
        if self._writer is None:
            raise ConnectionError("has gone")
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"ask": what, "of": number, "with": arguments})
        try:
            return await asked
        finally:
            del self._asked[number]

    def _take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            task = asyncio.create_task(self._reply(message["ask"], message["of"], message["with"]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (asked := self._asked.get(message["of"])) is not None and not asked.done():
            if "problem" in message:
                asked.set_exception(NotFollowedError(message["problem"]))
            else:
                asked.set_result(message["answer"])

    async def _reply(self, what: str, number: int, arguments: list[Any]) -> None:
        reply: dict[str, Any]
        try:
            reply = {"answer": await self._answer(what, arguments)}
        except ServerError as error:
            reply = {"problem": str(error)}
        except Exception:
            _log.exception("could not answer another process of this server", asked=what)
            reply = {"problem": "the server's log says why"}
        self._send({"of": number, **reply})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")


# A worker


class WorkerHost(ModelHost):
    """The models of a worker. What a call changes here changes in all workers, before the call is answered."""

    line: _Line | None = None
    """To the supervisor; None: nobody follows yet."""
    elsewhere: Mapping[str, str] = {}
    """What is wrong with models of other workers."""
    _told: Mapping[str, str] = {}

    async def load(self, name: str, version: str = "") -> ServedModel:
        """See `ModelHost`."""
        return await self._together(partial(super().load, name, version), "load", name, version)

    async def unload(self, name: str, version: str = "", *, timeout_s: float | None = None) -> None:
        """See `ModelHost`."""
        await self._together(partial(super().unload, name, version, timeout_s=timeout_s), "unload", name, version)

    async def scan(self) -> tuple[BundleStatus, ...]:
        """See `ModelHost`."""
        return await self._together(super().scan, "scan")

    async def set_route(self, name: str, route: Route) -> str | None:
        """See `ModelHost`."""
        return await self._together(partial(super().set_route, name, route), "set_route", name, route)

    async def set_alias(self, name: str, alias: Alias | None) -> str | None:
        """See `ModelHost`."""
        return await self._together(partial(super().set_alias, name, alias), "set_alias", name, alias)

    async def _together(self, change: _Change[_Result], what: str, *arguments: Any) -> _Result:
        """Makes a change here and then in all other workers, while no other call changes anything."""
        return await self._run(self._in_turn(change, what, arguments))

    async def _in_turn(self, change: _Change[_Result], what: str, arguments: Sequence[Any]) -> _Result:
        assert self.line is not None, "no call comes before the supervisor is known"
        plain = [each.model_dump() if isinstance(each, BaseModel) else each for each in arguments]
        try:
            await self.line.ask("turn")
            try:
                result = await change()
                await self.line.ask("follow", what, plain)
                return result
            except NotFollowedError as error:
                raise BundleRejectedError(f"done by one worker of this server and not by others: {error}") from error
            finally:
                await self.line.ask("done")
        except ConnectionError as error:
            raise DrainingError("the server is shutting down; nothing is changed any more") from error

    async def follow(self, what: str, arguments: list[Any]) -> None:
        """Makes a change that another worker has made."""
        match what, arguments:
            case "load", [name, version]:
                await super().load(name, version)
            case "unload", [name, version]:
                with suppress(ModelNotFoundError):
                    await super().unload(name, version)
            case "scan", []:
                await super().scan()
            case "set_route", [name, route]:
                await super().set_route(name, Route.model_validate(route))
            case "set_alias", [name, alias]:
                await super().set_alias(name, None if alias is None else Alias.model_validate(alias))

    def ailing(self, *, stall_timeout_s: float) -> dict[str, str]:
        """See `ModelHost`; those of other workers too, so that each speaks for the server."""
        own = super().ailing(stall_timeout_s=stall_timeout_s)
        if own != self._told and self.line is not None:
            self._told = own
            self._spawn(self._tell(own))
        return own | dict(self.elsewhere)

    async def _tell(self, own: Mapping[str, str]) -> None:
        with suppress(ConnectionError):
            assert self.line is not None
            await self.line.ask("ailing", own)

    def state(self) -> dict[str, Any]:
        """Returns what calls have made of the models, for a worker that starts; see `Assignment`."""
        asked_for = {
            path: entry.is_asked_for for path, entry in self._entries.items() if entry.is_asked_for is not None
        }
        return {"asked_for": asked_for, "routes": self.routes.model_dump_json()}


class Worker:
    """What a worker has with its supervisor."""

    def __init__(self, fd: int) -> None:
        """Takes what the supervisor has assigned, and the cores of that; before any thread is there.

        Args:
            fd: File descriptor of its end of the pair of sockets.
        """
        self._end = socket.socket(fileno=fd)
        self._end.set_inheritable(False)
        with self._end.makefile("rb", buffering=0) as stream:
            size = int.from_bytes(_read_exactly(stream, 4))
            assignment: Assignment = pickle.loads(_read_exactly(stream, size))  # noqa: S301 (from the supervisor)
        self._end_with(assignment.supervisor, signal.SIGKILL)
        os.set_inheritable(assignment.counts, False)
        os.sched_setaffinity(0, assignment.cores)
        share_memory(assignment.num_workers)
        self.settings = assignment.settings
        self.index = assignment.index
        self.asked_for = assignment.asked_for
        """See `ModelHost.open`."""
        self.counts = Counts(assignment.counts, index=self.index, num_workers=assignment.num_workers)
        self._supervisor = assignment.supervisor
        self._routes = assignment.routes
        self._line = _Line(self._answer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: asyncio.Task[None] | None = None
        self._serves = asyncio.Event()
        self._host: WorkerHost | None = None
        self._collect: Callable[[], list[Sample]] = list

    def _end_with(self, supervisor: int, number: int) -> None:
        """Has the kernel signal this process when the supervisor ends; 0: not any more."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != supervisor:
            os._exit(_FAILED)

    def fail(self, message: str) -> NoReturn:
        """Tells the supervisor why this worker cannot start, and ends it."""
        self._end.setblocking(True)
        self._end.sendall(json.dumps({"ask": "failed", "of": 0, "with": [message]}).encode() + b"\n")
        raise SystemExit(_FAILED)

    def take_over(self, host: ModelHost) -> None:
        """Takes over the routes that other workers have."""
        if self._routes is not None:
            host.routes = Routes.model_validate_json(self._routes)

    def join(self, host: ModelHost, collect: Callable[[], list[Sample]]) -> None:
        """Begins to talk with the supervisor; called with the event loop running.

        Args:
            host: Its models, which follow those of other workers once they are started.
            collect: Returns this worker's metrics.
        """
        assert isinstance(host, WorkerHost)
        self._host, self._collect = host, collect
        self._loop = asyncio.get_running_loop()
        host.line = self._line
        host.images.elsewhere = self._find_images
        self._run = asyncio.create_task(self._talk())

    async def _talk(self) -> None:
        self._end_with(self._supervisor, 0)  # from here on the end of the talk tells
        await self._line.run(self._end)
        _log.warning("the supervisor has gone")
        os.kill(os.getpid(), signal.SIGTERM)

    def announce(self, ready: Ready) -> None:
        """Tells the supervisor that calls are answered."""
        self._serves.set()
        assert self._host is not None
        self._host._spawn(self._line.ask("serving", asdict(ready)))  # noqa: SLF001 (keeps its tasks)

    def write_metrics(self) -> bytes:
        """Returns the metrics of all workers; called from any thread but the event loop's."""
        assert self._loop is not None, "joined before the HTTP port is open"
        asking = asyncio.run_coroutine_threadsafe(self._line.ask("metrics"), self._loop)
        return str(asking.result(2 * _ASK_TIMEOUT_S)).encode()

    async def _find_images(self, names: Sequence[str]) -> dict[str, KeptImage]:
        """Asks the other workers for images, until there are all or an answer brings no further one."""
        found: dict[str, KeptImage] = {}
        with suppress(ConnectionError, TimeoutError, ServerError):
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                while absent := [name for name in names if name not in found]:
                    if not (told := await self._line.ask("images", absent)):
                        break
                    found |= {name: (b64decode(data), b64decode(key)) for name, (data, key) in told.items()}
        return found

    def _tell_images(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Returns those of the images that are here, as many as go into a line."""
        assert self._host is not None
        told: dict[str, list[str]] = {}
        room = _MOST_TOLD_BYTES
        for name in names:
            kept = self._host.images.look(name)
            if kept is not None and len(kept[0]) <= room:
                room -= len(kept[0])
                told[name] = [b64encode(part).decode() for part in kept]
        return told

    async def _answer(self, what: str, arguments: list[Any]) -> Any:
        assert self._host is not None
        match what, arguments:
            case "images", [names]:
                return self._tell_images(names)
            case "follow", [change, its_arguments]:
                await self._serves.wait()
                await self._host.follow(change, its_arguments)
            case "state", []:
                return self._host.state()
            case "metrics", []:
                return await asyncio.to_thread(self._collect)
            case "elsewhere", [problems]:
                self._host.elsewhere = problems
        return None

    def __repr__(self) -> str:
        return f"Worker({self.index})"


def _read_exactly(stream: Any, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            raise SystemExit(_FAILED)  # the supervisor has gone
        parts += part
    return parts


# The supervisor


class _Process:
    """A worker as the supervisor sees it."""

    def __init__(self, index: int, process: subprocess.Popen[bytes], answer: Callable[[_Process], Answer]) -> None:
        self.index = index
        self.process = process
        self.line = _Line(answer(self))
        self.ready: Ready | None = None
        """Once it answers calls."""
        self.served_at = 0.0
        self.failure: str | None = None
        self.has_turn = False
        self.ailing: Mapping[str, str] = {}

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def end(self) -> str:
        """How it has ended."""
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Supervisor:
    """Starts the workers of a server, keeps them, and ends them."""

    def __init__(self, settings: ServerSettings, choice: Choice) -> None:
        """Reserves the ports.

        Raises:
            ServerError: One is taken.
        """
        self._choice = choice
        self._reserved: list[socket.socket] = []
        ports = {
            name: self._reserve(settings.host, port)
            for name in ("port", "http_port", "health_port")
            if (port := getattr(settings, name)) is not None
        }
        self._settings = settings.model_copy(update=ports)
        self._cores = share_cores(sorted(os.sched_getaffinity(0)), choice.count)
        self._shares = share_settings(self._settings, choice.count)
        self._counts_fd = Counts.create(choice.count)
        self._counts = Counts(self._counts_fd, index=0, num_workers=choice.count)
        self._workers: dict[int, _Process] = {}
        self._codes: list[int] = []
        self._num_restarts = 0
        self._turn = asyncio.Lock()
        self._stop, self._is_ready, self._has_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        from headway_server.monitoring.metrics import WorkersMetrics  # noqa: PLC0415 (where there are workers alone)

        self._metrics = WorkersMetrics(self._collect)

    def _reserve(self, host: str, port: int) -> int:
        """Keeps a port for the workers, without listening at it; returns its number.

        It is bound so that workers can listen there, and as if without SO_REUSEADDR, so that another server cannot.
        """
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            reserved = socket.socket(family, kind, protocol)
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError as error:
            raise ServerError(f"cannot listen on {format_address(host, port)}: {error.strerror or error}") from error
        return int(reserved.getsockname()[1])

    async def run(self) -> int:
        """Starts the workers and keeps them until a signal comes; returns the exit code.

        Raises:
            ServerError: They cannot start.
        """
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._signal_serving, signal.SIGHUP)
        if self._settings.metrics_port is not None:
            self._metrics.listen(self._settings.metrics_host, self._settings.metrics_port)
        self._log_shares()
        keeping = [asyncio.create_task(self._keep(index)) for index in range(self._choice.count)]
        try:
            await self._first_of(self._is_ready, self._has_failed, self._stop)
            if self._has_failed.is_set():
                raise ServerError(self._failure)
            if not self._is_ready.is_set():
                sys.stderr.write("headway-server: stopped before it was ready\n")
                return 0
            await self._stop.wait()
            _log.info("draining all workers", workers=len(self._workers))
            self._signal_serving(signal.SIGTERM)
            limit_s = self._settings.drain_timeout + CLOSE_TIMEOUT_S + _GRACE_S
            await asyncio.wait(keeping, timeout=limit_s)
        finally:
            self._stop.set()
            for worker in self._workers.values():  # those that load, and those that hang
                worker.signal(signal.SIGKILL)
            await asyncio.wait(keeping)
            self._metrics.close()
        _log.info("all workers have stopped", codes=self._codes)
        return int(any(self._codes))

    async def _first_of(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._signal_serving(signal.SIGTERM)  # which ends their wait for running calls
        self._stop.set()

    def _signal_serving(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.ready is not None:
                worker.signal(number)
            elif number != signal.SIGHUP and self._stop.is_set():
                worker.signal(signal.SIGKILL)  # it loads, and nobody waits for it

    def _log_shares(self) -> None:
        _log.info("workers", count=self._choice.count, reason=self._choice.reason)
        for index, cores in enumerate(self._cores):
            share = self._shares[index]
            _log.info(
                "share of a worker",
                worker=index,
                cores=",".join(map(str, cores)),
                threads=share.threads,
                slots=share.engine.num_slots or "by memory",
                max_waiting=share.engine.max_waiting,
                max_waiting_texts=share.batching.max_waiting_texts,
                max_waiting_mib=share.batching.max_waiting_mib,
                max_arriving_mib=share.connection.max_arriving_mib,
                max_calls_together=share.max_calls,
                max_inflight_mib_together=share.max_inflight_mib,
            )

    async def _keep(self, index: int) -> None:
        """Keeps one worker: starts it, and another one in its place whenever it ends."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            worker, end = await self._start(index)
            await worker.line.run(end)
            await asyncio.to_thread(worker.process.wait)
            self._forget(worker)
            if self._stop.is_set():
                if worker.ready is not None:
                    self._codes.append(worker.process.returncode)
                return
            if not self._is_ready.is_set():
                self._failure = self._failure or worker.failure or f"worker {index} ended by {worker.end} at its start"
                self._has_failed.set()
                return
            lived_s = time.monotonic() - worker.served_at if worker.ready is not None else 0.0
            delay_s = 0.0 if lived_s > _GOOD_LIFE_S else backoff_s
            backoff_s = min(2 * delay_s, _LONGEST_BACKOFF_S) or _FIRST_BACKOFF_S
            _log.error(
                "a worker has ended and is replaced",
                worker=index,
                pid=worker.process.pid,
                end=worker.end,
                reason=worker.failure,
                delay_s=delay_s,
            )
            self._num_restarts += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)

    async def _start(self, index: int) -> tuple[_Process, socket.socket]:
        """Starts a worker, which takes over what calls have changed, while no call changes anything."""
        async with self._turn:
            state = await self._state()
            ours, theirs = socket.socketpair()
            assignment = pickle.dumps(
                Assignment(
                    index=index,
                    num_workers=self._choice.count,
                    settings=self._shares[index],
                    cores=self._cores[index],
                    counts=self._counts_fd,
                    supervisor=os.getpid(),
                    asked_for=state["asked_for"],
                    routes=state["routes"],
                )
            )
            isolated = [] if {"", str(os.getcwd())} & set(sys.path) else ["-P"]  # noqa: PTH109 (as sys.path has it)
            process = subprocess.Popen(  # noqa: S603, ASYNC220 (this program; a start takes a millisecond)
                [sys.executable, *isolated, "-m", "headway_server", "worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._counts_fd),
                process_group=0,  # Ctrl-C is for the supervisor, which tells the workers
            )
            theirs.close()
            with suppress(BrokenPipeError):  # it has ended at once
                ours.sendall(len(assignment).to_bytes(4) + assignment)
            ours.setblocking(False)
            worker = self._workers[index] = _Process(index, process, self._answer_of)
            if self._stop.is_set():
                worker.signal(signal.SIGKILL)
        _log.info("starting a worker", worker=index, pid=process.pid)
        return worker, ours

    async def _state(self) -> dict[str, Any]:
        """Returns what calls have made of the models, as a worker knows it that serves."""
        for worker in self._serving():
            with suppress(ConnectionError, TimeoutError, ServerError):
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    state: dict[str, Any] = await worker.line.ask("state")
                    return state
        return {"asked_for": {}, "routes": None}

    def _forget(self, worker: _Process) -> None:
        del self._workers[worker.index]
        self._counts.forget(worker.index)
        if worker.has_turn:
            self._turn.release()
        if worker.ailing:
            self._tell_elsewhere()

    def _serving(self) -> list[_Process]:
        return [worker for worker in self._workers.values() if worker.ready is not None]

    # What workers ask

    def _answer_of(self, worker: _Process) -> Answer:
        async def answer(what: str, arguments: list[Any]) -> Any:
            match what, arguments:
                case "failed", [message]:
                    worker.failure = message
                case "serving", [fields]:
                    self._note_ready(worker, Ready(**fields))
                case "turn", []:
                    await self._give_turn(worker)
                case "follow", [change, its_arguments]:
                    await self._have_followed(worker, change, its_arguments)
                case "done", []:
                    worker.has_turn = False
                    self._turn.release()
                case "metrics", []:
                    return (await asyncio.to_thread(self._metrics.write)).decode()
                case "images", [names]:
                    return await self._find_images(worker, names)
                case "ailing", [problems]:
                    worker.ailing = problems
                    self._tell_elsewhere()
            return None

        return answer

    async def _give_turn(self, worker: _Process) -> None:
        await self._turn.acquire()
        if self._workers.get(worker.index) is worker:
            worker.has_turn = True
        else:  # it has ended while it waited
            self._turn.release()

    def _note_ready(self, worker: _Process, ready: Ready) -> None:
        worker.ready, worker.served_at = ready, time.monotonic()
        serving = self._serving()
        _log.info("a worker is ready", worker=worker.index, pid=worker.process.pid, ready=len(serving))
        if self._stop.is_set():
            worker.signal(signal.SIGTERM)
        elif len(serving) == self._choice.count and not self._is_ready.is_set():
            total = [worker.ready for worker in serving if worker.ready is not None]
            Ready(
                address=ready.address,
                num_models=min(one.num_models for one in total),
                num_rejected=max(one.num_rejected for one in total),
                device=ready.device,
                num_threads=sum(one.num_threads for one in total),
                num_lanes=sum(one.num_lanes for one in total),
                http=ready.http,
                num_workers=len(total),
            ).announce()
            self._is_ready.set()

    async def _have_followed(self, leader: _Process, change: str, arguments: list[Any]) -> None:
        """Has all workers but one make a change, those too that are still loading.

        Raises:
            ServerError: One could not.
        """
        others = [worker for worker in self._workers.values() if worker is not leader]
        limit_s = self._settings.versions.load_timeout + self._settings.drain_timeout
        found = await asyncio.gather(
            *(asyncio.wait_for(worker.line.ask("follow", change, arguments), limit_s) for worker in others),
            return_exceptions=True,
        )
        problems = [
            f"worker {worker.index}: {problem or 'did not answer'}"
            for worker, problem in zip(others, found, strict=True)
            if isinstance(problem, BaseException) and not isinstance(problem, ConnectionError)
        ]
        if problems:
            raise ServerError("; ".join(problems))

    async def _find_images(self, asking: _Process, names: list[str]) -> dict[str, Any]:
        """Asks the other workers for images in turn; returns those of the first that has any."""
        for worker in self._serving():
            if worker is not asking:
                with suppress(ConnectionError, ServerError):
                    if found := await worker.line.ask("images", names):
                        return dict(found)
        return {}

    def _tell_elsewhere(self) -> None:
        for worker in self._serving():
            problems = {
                f"worker {other.index}: {path}": problem
                for other in self._serving()
                if other is not worker
                for path, problem in other.ailing.items()
            }
            task = asyncio.ensure_future(worker.line.ask("elsewhere", problems))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _collect(self) -> tuple[dict[int, list[Sample]], int]:
        """Asks the workers for their metrics; called from any thread but the event loop's."""
        assert self._loop is not None
        asking = asyncio.run_coroutine_threadsafe(self._ask_metrics(), self._loop)
        return asking.result(2 * _ASK_TIMEOUT_S), self._num_restarts

    async def _ask_metrics(self) -> dict[int, list[Sample]]:
        workers = self._serving()
        found = await asyncio.gather(
            *(asyncio.wait_for(worker.line.ask("metrics"), _ASK_TIMEOUT_S) for worker in workers),
            return_exceptions=True,
        )
        return {
            worker.index: metrics
            for worker, metrics in zip(workers, found, strict=True)
            if not isinstance(metrics, BaseException)
        }

    def __repr__(self) -> str:
        return f"Supervisor({len(self._serving())} of {self._choice.count} workers serve)"


def supervise(settings: ServerSettings, choice: Choice) -> int:
    """Runs a server of several workers until a signal comes; returns the exit code.

    Raises:
        ServerError: It cannot start.
    """
    return asyncio.run(Supervisor(settings, choice).run())
