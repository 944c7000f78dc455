"""The edge between HTTP and the serving layer: from a request's bytes to a call, and from errors to answers of an API.

An API has handlers, and a `Form` of its errors. The edge identifies the caller before it reads a body, and reads at
most the API's limit. It runs all work within `Calls.answer`, and cancels the call when its client closes the
connection.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send

from headway_server.errors import (
    CancelledError,
    InvalidInputError,
    MediaTypeError,
    RequestError,
    RequestTooLargeError,
    is_failure,
    no_panics,
)
from headway_server.observers import Call
from headway_server.preprocessing.pool import request_pool
from headway_server.services.status import to_status
from headway_server.serving.access import Principal, is_local
from headway_server.serving.calls import REQUEST_ID, Calls, request_id_of
from headway_server.serving.peer_waits import PeerWaits
from headway_server.transports.http.status import Failure

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
Parsed = TypeVar("Parsed")

PARSED_ON_LOOP_BYTES: Final = 64 * 2**10
"""Limit of bodies parsed on the event loop in bytes, if they have few elements."""
_PARSED_ON_LOOP_ELEMENTS: Final = 2_048
"""The same limit in commas; unknown elements take eight microseconds each to be reported."""
MAX_OBJECTS: Final = 8_192
"""Limit of objects in a JSON body. The largest conversation has 1,024."""
MAX_ELEMENTS: Final = 65_536
"""Limit of elements in a JSON body, of all arrays and objects."""
_READ_TO_ITS_END_BYTES: Final = 64 * 2**10
"""Limit up to which the rest of a refused request is read, so that its connection can be reused."""
_TRUNCATED: Final = b"x-truncated-texts"
_NO_ENCODING: Final = "identity"
_ENCODINGS: Final = ("gzip", "deflate")
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""Makes zlib read both."""
_JSON: Final = b"application/json"
FORM_DATA: Final = b"multipart/form-data"
_SENT_UNASKED: Final = frozenset({b"", b"text/plain", b"application/x-www-form-urlencoded", FORM_DATA})
"""Media types that browsers let any page send without a preflight (CORS-safelisted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A received request."""

    headers: Mapping[str, str]
    """Headers, with names in lower case."""
    path: Mapping[str, str]
    """Parameters of the path."""
    body: bytes

    async def parse(self, read: Callable[[bytes], Parsed]) -> Parsed:
        """Parses a JSON body after counting its elements; a large one off the event loop.

        Raises:
            InvalidInputError: There are too many.
        """

        def checked() -> Parsed:
            check_elements(self.body)
            return read(self.body)

        if len(self.body) <= PARSED_ON_LOOP_BYTES and self.body.count(b",") <= _PARSED_ON_LOOP_ELEMENTS:
            return checked()
        return await asyncio.get_running_loop().run_in_executor(request_pool(), checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete answer."""

    body: bytes = b""
    status: int = 200
    media_type: bytes = _JSON
    headers: Headers = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A streamed answer. Its status is sent with the first part, so an earlier error has its own status."""

    parts: AsyncGenerator[bytes, None]
    media_type: bytes
    headers: Headers = field(default=((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")))
    cut: Callable[[Failure], bytes] | None = None
    """Returns the last part if the stream fails; None: as the API's form does."""


Handler: TypeAlias = Callable[[Request], Awaitable[Reply | Stream]]


class Form(Protocol):
    """Format of an API's errors."""

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:
        """Returns the answer to a failed call with these request headers."""

    def cut(self, failure: Failure) -> bytes:
        """Returns the last part of a failed stream."""


class Edge:
    """Common parts of all endpoints."""

    def __init__(self, calls: Calls, callers: PeerWaits, *, origins: Collection[str]) -> None:
        """Prepares to create endpoints.

        Args:
            calls: Running calls and their limits.
            callers: Timeouts of slow callers.
            origins: Allowed CORS origins besides the server's own; `*`: all.
        """
        self.calls = calls
        self.callers = callers
        self._origins = origins

    def allows(self, origin: str) -> bool:
        """True if another origin's pages may call."""
        return "*" in self._origins or origin in self._origins

    def fail(self, error: BaseException, method: str, call: Call | None, request_id: str) -> Failure:
        """Describes an error to the caller; logs server errors."""
        return Failure.of(error, to_status(error, method, call, request_id=request_id))

    def __repr__(self) -> str:
        return f"Edge({self.calls!r}, {self.callers!r})"


class Endpoint:
    """An ASGI application for the calls of one method."""

    def __init__(
        self,
        edge: Edge,
        method: str,
        handler: Handler,
        form: Form,
        *,
        max_bytes: int = 0,
        media_types: frozenset[bytes] = frozenset({_JSON}),
        is_admin: bool = False,
        is_probe: bool = False,
        timeout_of: Callable[[Mapping[str, str]], float | None] = lambda _: None,
        name_of: Callable[[str], str] = str,
    ) -> None:
        """Describes the method.

        Args:
            edge: The common part of all endpoints.
            method: Name in metrics, traces and logs.
            handler: Answers it.
            form: Format of its errors.
            max_bytes: Largest body; 0: no body.
            media_types: Accepted media types of its body; an empty one means none given.
            is_admin: True if it changes the server.
            is_probe: True for a probe, which does not count as a call and uses no budget.
            timeout_of: Reads the caller's timeout in seconds from the headers; may raise InvalidInputError.
            name_of: Translates a task's field name in an error to the API's.
        """
        self._edge = edge
        self._method = method
        self._handler = handler
        self._form = form
        self._max_bytes = max_bytes
        self._media_types = media_types
        self._is_admin = is_admin
        self._is_probe = is_probe
        self._timeout_of = timeout_of
        self._name_of = name_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one call."""
        exchange = _Exchange(self._edge, scope, receive, send)
        call: Call | None = None
        try:
            timeout_s = self._timeout_of(exchange.headers)
            rights = self._identify(exchange)
            body = await self._receive(exchange, rights)
            request = Request(headers=exchange.headers, path=scope.get("path_params", {}), body=body)
            if self._is_probe:
                await exchange.reply(await self._probe(request))
                return
            async with (
                exchange.watched(),
                self._edge.calls.answer(
                    self._method,
                    metadata=exchange.pairs,
                    num_bytes=len(body),
                    timeout_s=timeout_s,
                    caller=exchange.caller,
                    connection=exchange.connection,
                    rights=rights,
                    request_id=exchange.request_id,
                ) as call,
            ):
                exchange.call = call
                with no_panics():
                    reply = await self._handler(request)
                    if isinstance(reply, Stream):
                        await exchange.stream(reply)
            await (exchange.end() if isinstance(reply, Stream) else exchange.reply(reply))
            return
        except asyncio.CancelledError:
            if not exchange.is_over:
                raise
            exchange.forgive()
            return
        except BaseException as error:  # the only place where errors become answers
            if not is_failure(error):
                raise
            renamed = error.renamed(self._name_of) if isinstance(error, InvalidInputError) else error
            failure = self._edge.fail(renamed, self._method, call, exchange.request_id)
        # Outside of the handler, where the error's frames no longer reference the request.
        await exchange.fail(failure, self._form)

    async def _probe(self, request: Request) -> Reply:
        reply = await self._handler(request)
        assert isinstance(reply, Reply), "a probe is not a stream"
        return reply

    def _identify(self, exchange: _Exchange) -> Principal | None:
        """Identifies the caller before the body is read, so that refused callers take no memory."""
        return self._edge.calls.identify(
            self._method,
            metadata=exchange.pairs,
            certificate_names=exchange.certificate_names,
            is_admin=self._is_admin,
            is_local=self._is_admin and exchange.is_local,
            caller=exchange.caller,
            request_id=exchange.request_id,
        )

    async def _receive(self, exchange: _Exchange, rights: Principal | None) -> bytes:
        """Receives the body of a call; a missing or unsupported one is reported as a refused call."""
        began = time.monotonic()
        try:
            if self._max_bytes:
                exchange.check_media_type(self._media_types)
            return await exchange.read(self._max_bytes)
        except RequestError as error:
            self._edge.calls.note_refusal(
                self._method,
                error,
                metadata=exchange.pairs,
                caller=(rights and rights.name) or exchange.caller,
                request_id=exchange.request_id,
                waited_s=time.monotonic() - began,
            )
            raise

    def __repr__(self) -> str:
        return f"Endpoint({self._method})"


class _Exchange:
    """A request and its answer."""

    def __init__(self, edge: Edge, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge = edge
        self._scope = scope
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._has_started = self._has_read = False
        self._cut: Callable[[Failure], bytes] | None = None
        self.is_over = False
        """True if the client disconnected."""
        self.call: Call | None = None
        """The call, once it is admitted."""
        self.pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self.headers = dict(self.pairs)
        self.request_id = request_id_of(self.headers.get(REQUEST_ID, ""))
        client = scope.get("client")
        self.certificate_names: tuple[str, ...] = scope["state"].get("certificate_names", ())
        self.caller = self.certificate_names[0] if self.certificate_names else (client[0] if client else "")
        self.connection = "" if self.certificate_names or not client else f"{client[0]}:{client[1]}"

    @property
    def is_local(self) -> bool:
        """True if the caller is on this machine and addresses it by a local name.

        This protects against DNS rebinding: a foreign page's name may resolve to this machine.
        """
        host = (self._scope.get("client") or ("unknown",))[0]
        origin = self.headers.get("origin")
        names = [self.headers.get("host", "")]
        if origin is not None and not self._edge.allows(origin):
            names.append(_netloc_of(origin))
        return is_local(host) and all(is_local(_host_of(name)) for name in names)

    @property
    def is_foreign(self) -> bool:
        """True if the request is from a page of an origin that is neither the server's nor allowed."""
        origin = self.headers.get("origin")
        own = self.headers.get("host")
        return origin is not None and _netloc_of(origin) != own and not self._edge.allows(origin)

    def check_media_type(self, accepted: frozenset[bytes]) -> None:
        """Checks the body's media type. Browsers send some types from foreign pages without a preflight.

        Raises:
            MediaTypeError: The type is not accepted, or comes from a foreign page, or the compression is unknown.
        """
        given = self.headers.get("content-type", "").partition(";")[0].strip().lower().encode("latin-1")
        if given in _SENT_UNASKED and self.is_foreign:
            raise MediaTypeError(
                "content-type",
                f"is {given[:100].decode()!r}, from a page of another origin; send it from a program, or have the "
                "origin listed in --http-cors-origins",
            )
        if given not in accepted:
            listed = " or ".join(sorted(name.decode() for name in accepted if name))
            raise MediaTypeError("content-type", f"is {given[:100].decode('latin-1')!r}; send {listed}")
        if (encoding := self._encoding) not in (_NO_ENCODING, *_ENCODINGS):
            known = " or ".join(_ENCODINGS)
            raise MediaTypeError("content-encoding", f"is {encoding[:100]!r}; send {known}, or the body uncompressed")

    async def read(self, max_bytes: int) -> bytes:
        """Reads the body, decompressed.

        Raises:
            CancelledError: The client disconnected.
            InvalidInputError: It is not compressed as its header says.
            RequestTooLargeError: It has more than `max_bytes`, and stays unread or compressed.
            RequestError: See `PeerWaits.arriving`.
        """
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            _refuse_size(int(length), max_bytes)
        parts: list[bytes] = []
        size, has_more = 0, bool(length.strip("0")) or "transfer-encoding" in self.headers
        with self._edge.callers.arriving():
            while has_more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self.is_over = True
                    raise CancelledError("the caller has gone")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                has_more = message.get("more_body", False)
                if size > max_bytes:
                    _refuse_size(size, max_bytes)
            self._has_read = True
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            if not body or self._encoding == _NO_ENCODING:
                return body
            del parts
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(request_pool(), _decompress, body, max_bytes)

    @property
    def _encoding(self) -> str:
        given: str = self.headers.get("content-encoding", _NO_ENCODING)
        return given.strip().lower()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancels the task if the client closes the connection."""

        def note(watch: asyncio.Task[Any]) -> None:
            if not watch.cancelled() and self._task is not None:
                self.is_over = True
                self._task.cancel()

        watch = asyncio.ensure_future(self._wait_for_end())
        watch.add_done_callback(note)
        try:
            yield
        finally:
            watch.remove_done_callback(note)
            watch.cancel()

    async def _wait_for_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def forgive(self) -> None:
        """Reverts the task's cancellation."""
        if self._task is not None:
            self._task.uncancel()

    async def reply(self, reply: Reply) -> None:
        """Sends an answer."""
        headers = [
            (b"content-type", reply.media_type),
            (b"content-length", str(len(reply.body)).encode()),
            *reply.headers,
        ]
        if not self._has_read and self._rest_bytes() > _READ_TO_ITS_END_BYTES:
            headers.append((b"connection", b"close"))
        await self._start(reply.status, headers)
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, stream: Stream) -> None:
        """Sends an answer in parts; errors are those of `PeerWaits.unread` and of the parts."""
        self._cut = stream.cut
        async with aclosing(stream.parts) as parts:
            async for part in parts:
                if not self._has_started:
                    await self._start(200, [(b"content-type", stream.media_type), *stream.headers])
                with self._edge.callers.unread():
                    await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Ends an answer in parts."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, failure: Failure, form: Form) -> None:
        """Sends an error; a client that does not read is disconnected."""
        if self.is_over:
            return
        if not self._has_started:
            await self.reply(form.refuse(failure, self.headers))
        elif (connection := self._scope["state"].get("connection")) is not None and connection.is_unread:
            connection.abort()
        else:
            await self._send({"type": "http.response.body", "body": (self._cut or form.cut)(failure)})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        headers.append((REQUEST_ID.encode(), self.request_id.encode()))
        if self.call is not None and self.call.num_truncated:
            headers.append((_TRUNCATED, str(self.call.num_truncated).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _rest_bytes(self) -> float:
        """Returns the size of an unread body."""
        if "transfer-encoding" in self.headers:
            return math.inf
        length = self.headers.get("content-length", "0")
        return int(length) if length.isdecimal() else math.inf


def _netloc_of(origin: str) -> str:
    """Returns `host:port` of an origin; empty if it has none, such as `null`."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host_of(name: str) -> str:
    """Returns host of `host:port`, with or without brackets."""
    try:
        host = urlsplit(f"//{name}").hostname if "@" not in name else None
    except ValueError:
        host = None
    return host or "unknown"


def _decompress(body: bytes, max_bytes: int) -> bytes:
    """Decompresses a body, of which at most one byte beyond the limit is made."""
    reader = zlib.decompressobj(wbits=_ANY_HEADER)
    try:
        whole = reader.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidInputError("request", f"is not compressed as content-encoding says ({error})") from None
    if len(whole) > max_bytes:
        _refuse_size(len(whole), max_bytes)
    if not reader.eof or reader.unused_data:
        raise InvalidInputError("request", "is compressed in part, or goes on behind its compressed end; send it whole")
    return whole


def _refuse_size(size: int, limit: int) -> NoReturn:
    raise RequestTooLargeError(
        "request", f"has {size} bytes or more, the limit of this method is {limit}; send it in several calls"
    )


def check_elements(body: bytes) -> None:
    """Counts the elements of a JSON body before it is parsed; takes less than a millisecond a MiB.

    An element takes two bytes in JSON and more than a hundred as an object. Commas and brackets within strings are not
    counted: escaped backslashes and quotes are removed first, and the text between two quotes is a string.

    Raises:
        InvalidInputError: There are more than `MAX_OBJECTS` objects or `MAX_ELEMENTS` elements.
    """
    most = len(body) // 2
    if most <= MAX_OBJECTS:
        return
    if body.count(b'"') > 4 * MAX_ELEMENTS:
        _refuse_elements("strings", 2 * MAX_ELEMENTS)
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if outside.count(b"{") > MAX_OBJECTS:
        _refuse_elements("objects", MAX_OBJECTS)
    if outside.count(b",") + outside.count(b"[") > MAX_ELEMENTS:
        _refuse_elements("elements", MAX_ELEMENTS)


def _refuse_elements(noun: str, limit: int) -> NoReturn:
    raise InvalidInputError(
        "request",
        f"has more than {limit} {noun}; send several calls, fewer elements, or tensors in the binary form of the Open "
        "Inference Protocol",
    )


def to_json(value: Any) -> bytes:
    """Formats a value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
