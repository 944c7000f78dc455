"""The life of every call, whatever its transport: counting, admission, timeouts, observers, draining."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
from typing import Final

import structlog

from headway_server.errors import DeadlineError, DrainingError, ForbiddenError, RequestError
from headway_server.observers import NO_OBSERVER, Call, Observer, current_call, set_current_call
from headway_server.serving.access import ADMIN, Access, Principal
from headway_server.serving.counts import Row
from headway_server.serving.permits import Admission, Permit

REQUEST_ID: Final = "x-request-id"
"""Metadata with the request id of callers and proxies."""
_FORWARDED_FOR: Final = ("forwarded", "x-forwarded-for", "x-real-ip")
_IS_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}").fullmatch

_log = structlog.get_logger(__name__)


def request_id_of(given: str) -> str:
    """Returns the given request id, or a new one if it is empty, too long or not printable ASCII."""
    return given if _IS_REQUEST_ID(given) else f"{random.getrandbits(64):016x}"


@contextmanager
def counted_tokens(num_read: int, num_generated: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Subtracts the current call's tokens from its caller's budget, however the call ends.

    Args:
        num_read: Input tokens.
        num_generated: Returns the output tokens, when the context ends.
    """
    call = current_call()
    rights = None if call is None else call.rights
    if rights is None or not rights.counts_tokens:
        yield
        return
    rights.count_tokens(num_read)
    try:
        yield
    finally:
        rights.count_tokens(num_generated())


def current_caller() -> str:
    """Returns the caller of the current call; empty outside of calls or if unknown."""
    call = current_call()
    return "" if call is None else call.caller


def cache_scope(salt: str = "") -> str:
    """Returns the scope in which the current call shares the prefix cache.

    It is the API key or certificate with the salt. Anonymous callers share by salt, and without one only within their
    connection: by default nobody can detect another's prompts. Behind a proxy, clients are distinguished by its
    forwarding header. Forging that header gains nothing, since the proxy appends the real client.
    """
    call = current_call()
    if call is not None and call.rights is not None and call.rights.name:
        return f"key\n{call.rights.name}\n{salt}"
    if salt or call is None:
        return f"salt\n{salt}"
    forwarded = [str(value) for name, value in call.raw_metadata if name in _FORWARDED_FOR]
    return "\n".join(("caller", call.connection or call.caller, *forwarded))


class Calls:
    """The running calls. For the event loop's thread only.

    All transports share one object, and so the limits and the drain.
    """

    def __init__(
        self,
        *,
        max_calls: int | None = None,
        max_bytes: int | None = None,
        access: Access | None = None,
        observer: Observer = NO_OBSERVER,
        counted: Row | None = None,
    ) -> None:
        """Starts with no call.

        Args:
            max_calls: Limit of concurrent calls; None: no limit.
            max_bytes: Limit of the bytes of their requests; None: no limit. A larger request is admitted alone.
            access: Access control; None: anyone may call, and only this machine may change the server.
            observer: Observes every call.
            counted: Counts of calls shared by the workers; None: a single process.
        """
        self._access = access
        self._admission = Admission(
            limit=max_calls, noun="calls", owner="the server", max_bytes=max_bytes, counted=counted
        )
        self._observer = observer
        self._ids = itertools.count(1)
        self._num_running = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """The number of running calls."""
        return self._num_running

    @property
    def is_draining(self) -> bool:
        """True once new calls are refused."""
        return self._is_draining

    def answer(
        self,
        method: str,
        *,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        num_bytes: int = 0,
        timeout_s: float | None = None,
        caller: str = "",
        connection: str = "",
        rights: Principal | None = None,
        request_id: str = "",
    ) -> AbstractAsyncContextManager[Call]:
        """Returns the context of a call, from the receipt of its request.

        Args:
            method: Full name of the RPC or path of the route.
            metadata: Metadata of the request; keys in lower case.
            num_bytes: Size of the received request.
            timeout_s: Timeout in seconds; None: no limit, or the transport enforces the deadline itself.
            caller: Peer, such as host and port of its connection; empty if unknown.
            connection: Id of the connection; empty if `caller` identifies it.
            rights: Result of `identify`; None: identify the caller by the metadata.
            request_id: By which the caller or its proxy knows the call; empty where it was given none.

        Raises:
            UnknownCallerError: The caller is not known.
            BudgetError: The caller's budget is used up.
            DrainingError: The server is shutting down.
            OverloadedError: The limit of calls or of their bytes is reached.
            DeadlineError: The timeout is over.
        """
        call = Call(
            call_id=next(self._ids),
            method=method,
            num_bytes=num_bytes,
            raw_metadata=metadata,
            started_at=time.monotonic(),
            request_id=request_id,
            caller=caller,
            connection=connection,
        )
        return _Answering(self, call, rights, timeout_s)

    def begin(self, call: Call, rights: Principal | None) -> Permit:
        """Begins a call; `end` must follow, even after an error. Errors are those of `answer`."""
        self._num_running += 1
        self._idle.clear()
        set_current_call(call)
        self._observer.call_started(call)
        if self._is_draining:
            raise DrainingError("the server is shutting down; call another one, or this one when it is back")
        self._use_budget(call, rights)
        return self._admission.admit(1, call.num_bytes)

    def end(self, call: Call, error: BaseException | None) -> None:
        """Ends a call that has begun, with the error that ended it."""
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()
        for callback in call.callbacks:
            callback()
        self._observer.call_finished(call, error=error, duration_s=time.monotonic() - call.started_at)

    def identify(
        self,
        method: str,
        *,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        certificate_names: Sequence[str] = (),
        is_admin: bool = False,
        is_local: bool = False,
        caller: str = "",
        request_id: str = "",
    ) -> Principal | None:
        """Identifies the caller, before a request is received; None without access control.

        Args:
            method: Full name of the RPC or path of the route.
            metadata: Metadata of the request; keys in lower case.
            certificate_names: Names in the peer's certificate, if the transport has verified one.
            is_admin: True for a call that changes the server.
            is_local: True if the peer is on this machine. Such peers may change a server without access control.
            caller: Peer, as far as the transport knows.
            request_id: By which the caller or its proxy knows the call.

        Raises:
            UnknownCallerError: The caller is not known.
            ForbiddenError: The caller may not change the server.
        """
        try:
            if self._access is None:
                if is_admin and not is_local:
                    raise ForbiddenError(
                        "only callers on the server's own machine may change it; start it with --access-file, and call "
                        f"it with a key that has the scope {ADMIN}"
                    )
                return None
            found = self._access.identify(metadata, certificate_names)
            caller = found.name or caller
            if is_admin:
                found.check_admin()
                _log.info("call that changes the server", method=method, caller=found.name, request_id=request_id)
        except RequestError as error:
            self.note_refusal(method, error, metadata=metadata, caller=caller, request_id=request_id)
            raise
        return found

    def note_refusal(
        self,
        method: str,
        error: RequestError,
        *,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        caller: str = "",
        request_id: str = "",
        waited_s: float = 0.0,
    ) -> None:
        """Reports to the observer a call refused before `answer`.

        Args:
            method: Full name of the RPC or path of the route.
            error: Why.
            metadata: Metadata of the request; keys in lower case.
            caller: Peer, if known.
            request_id: By which the caller or its proxy knows the call.
            waited_s: Time since the transport received it.
        """
        call = Call(
            call_id=next(self._ids),
            method=method,
            raw_metadata=metadata,
            started_at=time.monotonic() - waited_s,
            request_id=request_id,
            caller=caller,
        )
        self._observer.call_started(call)
        self._observer.call_finished(call, error=error, duration_s=waited_s)

    def _use_budget(self, call: Call, rights: Principal | None) -> None:
        """Charges a call to its caller's budget."""
        if rights is None:
            if self._access is None:
                return
            rights = self._access.identify(call.raw_metadata)
        call.caller = rights.name or call.caller
        began_at = rights.begin()
        call.rights = rights
        call.callbacks.append(lambda: rights.end(began_at))

    def refuse_new(self) -> None:
        """Refuses new calls with DrainingError; running calls continue."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Waits until no call is running."""
        await self._idle.wait()

    def __repr__(self) -> str:
        return f"Calls({self._num_running} running{', draining' if self._is_draining else ''})"


class _Answering(AbstractAsyncContextManager[Call]):
    """The context of a call; a class of its own, because a generator costs every call three microseconds."""

    __slots__ = ("_call", "_calls", "_limit", "_outer", "_permit", "_rights", "_timeout_s")

    def __init__(self, calls: Calls, call: Call, rights: Principal | None, timeout_s: float | None) -> None:
        self._calls = calls
        self._call = call
        self._rights = rights
        self._timeout_s = timeout_s
        self._permit: Permit | None = None
        self._limit: asyncio.Timeout | None = None
        self._outer: Call | None = None

    async def __aenter__(self) -> Call:
        self._outer = current_call()
        try:
            self._permit = self._calls.begin(self._call, self._rights)
            if self._timeout_s is not None:
                self._limit = await asyncio.timeout(self._timeout_s).__aenter__()
        except BaseException as error:
            self._end(error)
            raise
        return self._call

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._limit is None:
            self._end(error)
            return
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            failure = DeadlineError(f"the call took longer than its {self._timeout_s:g} s")
            self._end(failure)
            raise failure from late
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        # A stream may be closed in another context than that of its start, where a token cannot be reset.
        set_current_call(self._outer)
        if self._permit is not None:
            self._permit.release()
        # A stream is closed when its client disconnects.
        self._calls.end(self._call, asyncio.CancelledError() if isinstance(error, GeneratorExit) else error)
