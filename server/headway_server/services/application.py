"""The application: the models of a host, the limits of calls, and the doors (transports) they come through."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import structlog

from headway_server.errors import DrainingError
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.runtime import CLOSE_TIMEOUT_S, available_bytes
from headway_server.services.health import Health
from headway_server.services.open_inference import Statistics
from headway_server.services.registry import SERVICES, make_procedures, service_abilities
from headway_server.serving.calls import Calls
from headway_server.serving.counts import Counts
from headway_server.serving.credentials import Credentials
from headway_server.serving.host import ModelHost
from headway_server.serving.peer_waits import PeerWaits, WaitLimits
from headway_server.serving.watchdog import Watchdog
from headway_server.settings import ServerSettings

_log = structlog.get_logger(__name__)

LAST_WORDS_S: Final = 1.0
"""Time for cancelled calls to send their error."""
_HEALTH_INTERVAL_S = 1.0
_SEND_AWAY_PAUSE_S: Final = 0.1
"""Pause before and after connections are sent away, in which arriving calls wait."""
_FEWEST_SLOW: Final = 16
"""Minimum number of calls that may be slow to read their answer, for any memory."""
_SLOW_REQUEST_S: Final = 0.25
"""Seconds after which an arriving request counts with its maximum size."""
_MAX_LASTING: Final = 1024
"""Maximum concurrent health watches and reflection streams."""
_MAX_LASTING_PER_CONNECTION: Final = 16


class Door(Protocol):
    """A transport: it listens, and applies the application's limits to its calls."""

    def listen(self) -> int:
        """Binds its port, and returns it.

        Raises:
            ServerError: The port is taken.
        """

    async def start(self, ports: Sequence[int]) -> None:
        """Starts answering calls, once the models are started; `ports` are those of all doors, in order."""

    async def send_away(self, timeout_s: float) -> None:
        """Asks clients to disconnect, if the protocol can; returns when they are gone, or after the timeout."""

    async def close(self) -> None:
        """Closes its connections; called when no call runs. Calls are answered until then."""


class Application:
    """Answers calls from the models of a host. Belongs to the event loop.

    Attributes:
        host: Its models.
        settings: Settings of the server.
        doors: Transports; to be set before `start`.
        ports: Ports of the doors, in order, once they listen.
        credentials: API keys and certificates.
        calls: Running calls.
        callers: Timeouts of slow callers.
        health: Health of the services.
        procedures: Methods of the services by full name, `/package.Service/Method`.
    """

    def __init__(
        self,
        host: ModelHost,
        settings: ServerSettings,
        *,
        observer: Observer = NO_OBSERVER,
        statistics: Statistics | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Makes an application without doors.

        Args:
            host: Its models, loaded and not started.
            settings: Settings of the server.
            observer: Notified of every call.
            statistics: Statistics of the Open Inference Protocol, an observer of host and calls; None: no statistics.
            counts: Counters shared by all workers of the server; None: there is one worker.

        Raises:
            AccessError: A file of the settings, with keys or certificates, cannot be used.
        """
        self.host = host
        self.settings = settings
        self.doors: list[Door] = []
        self.ports: list[int] = []
        self.credentials = Credentials(settings, counts)
        max_calls, max_bytes = settings.call_limits(available_bytes("cpu"))
        max_arriving = settings.connection.max_arriving(settings.max_message_bytes)
        self.callers = PeerWaits(
            requests=WaitLimits(
                timeout_s=settings.connection.request_timeout,
                max_slow=max_arriving,
                slow_s=_SLOW_REQUEST_S,
                max_waits=max_calls,
            ),
            answers=WaitLimits(
                timeout_s=settings.connection.unread_timeout, max_slow=max(_FEWEST_SLOW, max_calls // 4)
            ),
            max_lasting=_MAX_LASTING,
            max_lasting_per_connection=_MAX_LASTING_PER_CONNECTION,
            max_receiving=max_arriving,
        )
        self.calls = Calls(
            max_calls=max_calls,
            max_bytes=max_bytes,
            access=self.credentials.access,
            observer=observer,
            counted=None if counts is None else counts.server,
        )
        _log.info("calls", max_calls=max_calls, max_inflight_mib=max_bytes >> 20, max_arriving=max_arriving)
        self.health = Health()
        self.procedures = make_procedures(
            host, settings, is_draining=lambda: self.calls.is_draining, statistics=statistics
        )
        self._unhealthy: dict[str, str] = {}
        self._health_watch: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._watchdog: Watchdog | None = None

    async def start(self) -> int:
        """Binds the ports, starts the models and answers calls; returns the first door's port.

        Raises:
            ServerError: A port is taken.
        """
        self.ports = [door.listen() for door in self.doors]
        self.host.start()
        self._update_health()
        for door in self.doors:
            await door.start(self.ports)
        self._health_watch = asyncio.create_task(self._watch_health())
        self._tasks = [
            asyncio.create_task(self.credentials.watch()),
            asyncio.create_task(self.callers.watch()),
        ]
        return self.ports[0]

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if self._watchdog is not None:
                self._watchdog.beat()
            self._update_health()

    def _update_health(self) -> None:
        """Reports SERVING for the server as a whole, and for every service that has a healthy model.

        A model that has stopped or hangs makes the server as a whole unhealthy, so that an orchestrator restarts it.
        That holds even if another model has the same task, since callers name the model they want.
        """
        limit = self.settings.stall_timeout
        unhealthy = self.host.unhealthy(stall_timeout_s=limit)
        for path in unhealthy.keys() - self._unhealthy.keys():
            _log.error("a model is out of order; restart the server", model=path, reason=unhealthy[path])
        for path in self._unhealthy.keys() - unhealthy.keys():
            _log.info("a model is in order again", model=path)
        self._unhealthy = unhealthy
        abilities = self.host.serving(stall_timeout_s=limit)
        self.health.set("", is_serving=not unhealthy)
        for service in SERVICES:
            wanted = service_abilities(service.descriptor)
            self.health.set(service.descriptor.full_name, is_serving=not wanted or bool(wanted & abilities))

    async def stop(self, hurry: asyncio.Event | None = None) -> bool:
        """Disconnects idle clients, waits for running calls up to the drain timeout, and closes.

        Health is NOT_SERVING from the beginning. Arriving calls then wait for a moment instead of being refused. gRPC
        cancels calls that arrive between its GOAWAY and the client's receipt of it, and waiting callers send no new
        calls. New connections are refused afterwards.

        Args:
            hurry: When set, ends the wait for running calls.

        Returns:
            True if every thread has ended; False if a run hangs and its thread was abandoned.
        """
        if self._health_watch is not None:
            self._health_watch.cancel()  # closing models are not unhealthy
        timeout_s = self.settings.drain_timeout
        pause_s = 0.0 if hurry is not None and hurry.is_set() else _SEND_AWAY_PAUSE_S
        self.health.close()
        _log.info("draining", running_calls=self.calls.num_running, timeout_s=timeout_s)
        self.callers.pause()
        self.calls.refuse_new()
        await asyncio.sleep(pause_s)
        longest_s = timeout_s + CLOSE_TIMEOUT_S + LAST_WORDS_S
        going = [asyncio.create_task(door.send_away(longest_s)) for door in self.doors]
        await asyncio.sleep(pause_s)
        self.callers.resume()
        await self._wait_for_calls(hurry)
        has_ended = await asyncio.to_thread(self.host.close)  # waits for running steps
        self.callers.end_lasting(DrainingError("the server is shutting down"))
        for door in self.doors:
            await door.close()
        for task in going:
            await task
        for task in self._tasks:
            task.cancel()
        _log.info("stopped")
        return has_ended

    async def _wait_for_calls(self, hurry: asyncio.Event | None) -> None:
        """Waits until no call runs, the drain timeout passes, or `hurry` is set."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.calls.wait_idle())]
        if hurry is not None:
            waits.append(asyncio.ensure_future(hurry.wait()))
        await asyncio.wait(waits, timeout=self.settings.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.calls.num_running:
            _log.warning("cutting off calls", running_calls=self.calls.num_running)

    async def run(self, announce: Callable[[], None]) -> bool:
        """Serves until SIGTERM or SIGINT, then stops; a second signal ends the wait for running calls.

        Args:
            announce: Called when the server is ready.

        Returns:
            True if every thread has ended.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.host.scan_soon)
        await self.start()
        announce()
        if limit_s := self.settings.stall_timeout:
            self._watchdog = Watchdog(self.host.stalled, limit_s=limit_s, ends=self.settings.stall_exit)
            self._watchdog.start()
        await stop.wait()
        if self._watchdog is not None:
            self._watchdog.stop()
        return await self.stop(hurry)

    def __repr__(self) -> str:
        return f"Application({self.host!r}, {self.calls!r})"
