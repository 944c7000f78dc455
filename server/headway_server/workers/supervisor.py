"""The supervisor: starts, restarts and stops the workers of a server."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import secrets
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from headway_server.errors import ServerError
from headway_server.runtime import CLOSE_TIMEOUT_S
from headway_server.serving.addresses import format_address
from headway_server.serving.counts import Counts
from headway_server.serving.image_files import ImageFiles
from headway_server.serving.images import SECRET_BYTES
from headway_server.settings import ServerSettings
from headway_server.workers.folder import IMAGES, private_folder
from headway_server.workers.metrics import metrics_of_all
from headway_server.workers.shares import Choice, share_cores, share_settings
from headway_server.workers.worker import Assignment, Ready

_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
_GOOD_LIFE_S: Final = 60.0
"""Uptime in seconds after which an ended worker is restarted at once."""
_GRACE_S: Final = 10.0
"""Extra seconds after the drain for a worker to end."""
_LONGEST_SWEEP_S: Final = 60.0
_SWEEPS_A_LIFE: Final = 10
"""Sweeps of expired images per time to live."""

_log = structlog.get_logger(__name__)


class _Process:
    """A worker as the supervisor sees it."""

    def __init__(self, index: int, process: Process) -> None:
        self.index = index
        self.process = process
        self.ready: Ready | None = None
        """Set once it answers calls."""
        self.served_at = 0.0
        self.failure: str | None = None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def exit_code(self) -> int:
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def end(self) -> str:
        """Description of its end."""
        code = self.exit_code
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Supervisor:
    """Starts, restarts and stops the workers of a server."""

    def __init__(self, settings: ServerSettings, choice: Choice, folder: Path) -> None:
        """Reserves the ports.

        Args:
            settings: The server's.
            choice: The number of workers.
            folder: The private folder.

        Raises:
            ServerError: A port is taken.
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
        self._stop, self._is_ready, self._has_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._failure = ""
        self._folder = folder
        self._image_secret = secrets.token_bytes(SECRET_BYTES)
        self._images = ImageFiles(
            folder / IMAGES, max_mib=self._settings.max_prepared_mib, ttl_s=self._settings.image_ttl
        )
        self._metrics = metrics_of_all(folder, self._counts)

    def _reserve(self, host: str, port: int) -> int:
        """Reserves a port for the workers without listening; returns its number.

        It is bound so that workers can listen on it, but not another server: as if without SO_REUSEADDR.
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
        """Runs the workers until a signal; returns the exit code.

        Raises:
            ServerError: They cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._signal_serving, signal.SIGHUP)
        if self._settings.metrics_port is not None:
            self._metrics.listen(self._settings.metrics_host, self._settings.metrics_port)
        self._log_shares()
        supervising = [asyncio.create_task(self._supervise(index)) for index in range(self._choice.count)]
        sweeping = asyncio.create_task(self._sweep_images())
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
            await asyncio.wait(supervising, timeout=limit_s)
        finally:
            self._stop.set()
            for worker in self._workers.values():  # loading and hanging workers
                worker.signal(signal.SIGKILL)
            await asyncio.wait(supervising)
            sweeping.cancel()
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
            self._signal_serving(signal.SIGTERM)  # ends their wait for running calls
        self._stop.set()

    def _signal_serving(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.ready is not None:
                worker.signal(number)
            elif number != signal.SIGHUP and self._stop.is_set():
                worker.signal(signal.SIGKILL)  # loading, without calls

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

    async def _supervise(self, index: int) -> None:
        """Starts one worker, and restarts it whenever it ends."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stop.is_set():
            worker = await self._start(index)
            await self._listen(worker)
            self._forget(worker)
            if self._stop.is_set():
                if worker.ready is not None:
                    self._codes.append(worker.exit_code)
                return
            if not self._is_ready.is_set():
                self._failure = self._failure or worker.failure or f"worker {index} ended by {worker.end} at its start"
                self._has_failed.set()
                return
            lived_s = time.monotonic() - worker.served_at if worker.ready is not None else 0.0
            delay_s = 0.0 if lived_s > _GOOD_LIFE_S else backoff_s
            backoff_s = min(2 * delay_s, _LONGEST_BACKOFF_S) or _FIRST_BACKOFF_S
            _log.error(
                "a worker ended and is restarted",
                worker=index,
                pid=worker.process.pid,
                end=worker.end,
                reason=worker.failure,
                delay_s=delay_s,
            )
            self._counts.num_restarts += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay_s)

    async def _start(self, index: int) -> _Process:
        """Starts a worker, which applies earlier changes by calls."""
        self._counts.begin(index)
        isolated = [] if {"", str(os.getcwd())} & set(sys.path) else ["-P"]  # noqa: PTH109 (as sys.path has it)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *isolated, "-m", "headway_server", "worker", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._counts_fd,),
            process_group=0,  # Ctrl-C is for the supervisor, which signals the workers
        )
        worker = self._workers[index] = _Process(index, process)
        if self._stop.is_set():
            worker.signal(signal.SIGKILL)
        assignment = Assignment(
            index=index,
            num_workers=self._choice.count,
            settings=self._shares[index],
            cores=self._cores[index],
            counts=self._counts_fd,
            folder=self._folder,
            image_secret=self._image_secret,
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(assignment))
        process.stdin.close()
        _log.info("starting a worker", worker=index, pid=process.pid)
        return worker

    async def _listen(self, worker: _Process) -> None:
        """Reads a worker's messages until its end."""
        assert worker.process.stdout is not None
        async for line in worker.process.stdout:
            with suppress(ValueError):  # a library's output, before the worker redirects stdout
                match json.loads(line):
                    case {"failed": message}:
                        worker.failure = message
                    case {"serves": fields}:
                        self._note_ready(worker, Ready(**fields))
        await worker.process.wait()

    async def _sweep_images(self) -> None:
        """Removes expired prepared images of all workers."""
        while True:
            await asyncio.sleep(min(self._settings.image_ttl / _SWEEPS_A_LIFE, _LONGEST_SWEEP_S))
            try:
                await asyncio.to_thread(self._images.forget_expired)
            except OSError as error:
                _log.error("expired images cannot be removed", folder=str(self._folder), reason=error.strerror)

    def _forget(self, worker: _Process) -> None:
        del self._workers[worker.index]
        self._counts.forget(worker.index)

    def _serving(self) -> list[_Process]:
        return [worker for worker in self._workers.values() if worker.ready is not None]

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

    def __repr__(self) -> str:
        return f"Supervisor({len(self._serving())} of {self._choice.count} workers serve)"


def supervise(settings: ServerSettings, choice: Choice) -> int:
    """Runs a server of several workers until a signal; returns the exit code.

    Raises:
        ServerError: It cannot start.
    """
    with private_folder(settings.max_prepared_mib * 2**20) as folder:
        return asyncio.run(Supervisor(settings, choice, folder).run())
