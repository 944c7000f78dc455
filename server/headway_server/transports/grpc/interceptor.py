"""The edge between gRPC and the serving layer: bytes become a call, its errors become statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, Self, TypeAlias, TypeVar

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2
from grpc_status import rpc_status

from headway_server.errors import CancelledError, InvalidInputError, RequestError, is_failure, no_panics
from headway_server.observers import Call
from headway_server.preprocessing.pool import request_pool
from headway_server.serving.access import Caller, is_local
from headway_server.serving.callers import Callers
from headway_server.serving.calls import REQUEST_ID, Calls, request_id_of
from headway_server.transports.grpc.status import to_status
from headway_server.transports.grpc.wire import check_fields, no_message

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone
Deserializer: TypeAlias = Callable[[bytes], Any]
UnaryMethod: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamMethod: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
Parser: TypeAlias = Callable[[bytes], Awaitable[Any]]
StreamedCallsMethod: TypeAlias = "Callable[[StreamedCalls[Any], Context], Awaitable[None]]"
Request = TypeVar("Request")
Pairs: TypeAlias = list[tuple[str, str]]
Who: TypeAlias = tuple[str, Caller | None]
"""Who calls, by name and with rights, where not everyone has all of them."""

_PARSED_ON_LOOP_BYTES: Final = 64 * 2**10
"""A request of so few bytes is parsed on the event loop, in 3 ms at most; 20 MiB of images take 10 ms."""
_ACCEPTS: Final = "accept-encoding"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of the project's own services, and limits those of others.

    Health and reflection answer while the server drains, and count as no calls. Their streams, which last for as long
    as a caller likes, have places of their own.

    A method with one request is registered as one with a stream of requests, of which it reads the first: so it
    runs before the request is there, and decides how long to wait for it.
    """

    def __init__(
        self,
        calls: Calls,
        callers: Callers,
        *,
        max_request_bytes: Mapping[str, int],
        admin_methods: Container[str] = frozenset(),
        probes: Container[str] = frozenset(),
        verifies_clients: bool = False,
    ) -> None:
        """Prepares to wrap methods.

        Args:
            calls: What every call is held to.
            callers: What waits for callers.
            max_request_bytes: Largest request of each service, by its full name; no other service is a call.
            admin_methods: Full names, `/package.Service/Method`, of the calls that change the server: they need the
                scope `admin`.
            probes: Likewise, of the calls of these services that answer as health does.
            verifies_clients: True if every client has shown a certificate that the server trusts.
        """
        self._admin_methods = admin_methods
        self._probes = probes
        self._verifies_clients = verifies_clients
        self._calls = calls
        self._callers = callers
        self._max_request_bytes = dict(max_request_bytes)
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Gives gRPC the wrapped method; each is wrapped once."""
        method = handler_call_details.method
        if (wrapped := self._handlers.get(method)) is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is not None:
            max_bytes = self._max_request_bytes.get(method.strip("/").partition("/")[0])
            is_call = max_bytes is not None and method not in self._probes
            wrapped = self._wrap(handler, method, max_bytes or 0) if is_call else self._limit(handler, method)
            self._handlers[method] = wrapped
        return wrapped

    def _wrap(self, handler: Handler, method: str, max_bytes: int) -> Handler:
        """Wraps a method that is a call."""
        parse = _parser(handler, method, max_bytes)
        behaviour: Any = handler.unary_stream or handler.unary_unary or handler.stream_stream  # typed for threads
        if handler.request_streaming:
            return _method(self._wrap_streamed_calls(behaviour, parse, method), handler)
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        return _method(wrap(behaviour, parse, method), handler)

    def _wrap_unary(self, behaviour: UnaryMethod, parse: Parser, method: str) -> Behaviour:
        async def call(_: object, context: Context) -> Any:
            pairs, request_id = await _open(context)
            answered: Call | None = None
            try:
                who = self._identify(method, context, pairs, request_id)
                data = await self._receive(method, context, who, pairs, request_id)
                async with self._answer(method, data, who, pairs, request_id) as answered:
                    request = await parse(data)
                    data = b""  # its bytes are in the request now
                    return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except BaseException as error:  # the one place where every error becomes a status
                status = _status_of(error, method, answered, request_id)
            # gRPC keeps the frames of an aborted call, and an error that is being handled, until garbage is collected.
            data = b""
            return await _abort(context, status, request_id)

        return call

    def _wrap_stream(self, behaviour: StreamMethod, parse: Parser, method: str) -> Behaviour:
        async def call(_: object, context: Context) -> None:
            pairs, request_id = await _open(context)
            answered: Call | None = None
            try:
                who = self._identify(method, context, pairs, request_id)
                data = await self._receive(method, context, who, pairs, request_id)
                async with self._answer(method, data, who, pairs, request_id) as answered:
                    request = await parse(data)
                    data = b""
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            await send(self._callers, context, response)
                return
            except grpc.aio.AbortError:
                raise
            except BaseException as error:  # as above
                status = _status_of(error, method, answered, request_id)
            data = b""
            await _abort(context, status, request_id)

        return call

    async def _receive(self, method: str, context: Context, who: Who, pairs: Pairs, request_id: str) -> bytes:
        """Receives the request of a call; one that does not come is a call that was refused."""
        began = time.monotonic()
        try:
            data = await receive(self._callers, context)
        except RequestError as error:
            waited_s = time.monotonic() - began
            caller = (who[1] and who[1].name) or who[0]
            self._calls.note_refusal(
                method, error, metadata=pairs, caller=caller, request_id=request_id, waited_s=waited_s
            )
            raise
        await self._callers.pass_gate()
        return data

    def _wrap_streamed_calls(self, behaviour: StreamedCallsMethod, parse: Parser, method: str) -> Behaviour:
        """Wraps a method each of whose requests is a call; its stream has a place among those that last."""

        # gRPC's own iterator keeps the last message until there is another one.
        async def stream(_: object, context: Context) -> None:
            pairs, request_id = await _open(context)

            def begin(data: bytes) -> AbstractAsyncContextManager[Call]:
                who = self._identify(method, context, pairs, request_id)  # who may have lost the right meanwhile
                return self._answer(method, data, who, pairs, request_id)

            async def next_call() -> StreamedCall[Any] | None:
                data = await context.read()
                return None if data is grpc.aio.EOF else StreamedCall(data, begin, parse, method)

            async def calls() -> AsyncGenerator[StreamedCall[Any], None]:
                while (call := await next_call()) is not None:
                    yield call

            try:
                self._identify(method, context, pairs, request_id)
                with self._callers.lasting(context.peer(), receives=True):
                    await behaviour(StreamedCalls(calls(), partial(send, self._callers, context)), context)
                return
            except grpc.aio.AbortError:
                raise
            except BaseException as error:  # as above
                status = _status_of(error, method, request_id=request_id)
            await _abort(context, status, request_id)

        return stream

    def _identify(self, method: str, context: Context, pairs: Pairs, request_id: str) -> Who:
        """Finds out who calls before the request is received: of those who may not call, nothing is held."""
        peer = context.peer()
        names = _certificate_names(context) if self._verifies_clients else ()
        is_admin = method in self._admin_methods
        caller = names[0] if names else peer
        rights = self._calls.identify(
            method,
            metadata=pairs,
            certificate_names=names,
            is_admin=is_admin,
            is_local=is_admin and is_local(_address(peer)),
            caller=caller,
            request_id=request_id,
        )
        return caller, rights

    def _answer(
        self, method: str, data: bytes, who: Who, pairs: Pairs, request_id: str
    ) -> AbstractAsyncContextManager[Call]:
        """Begins a call. gRPC itself ends one whose deadline has passed."""
        caller, rights = who
        return self._calls.answer(
            method, metadata=pairs, num_bytes=len(data), caller=caller, rights=rights, request_id=request_id
        )

    def _limit(self, handler: Handler, method: str) -> Handler:
        """Wraps a method that is no call."""
        parse = _parser(handler, method, _PARSED_ON_LOOP_BYTES)
        streams = handler.request_streaming
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream

        async def call(requests: Any, context: Context) -> Any:
            lasts = handler.response_streaming
            lasting = self._callers.lasting(context.peer(), receives=streams) if lasts else nullcontext()
            try:
                with lasting:
                    request = (
                        _parsed(requests, parse) if streams else await parse(await receive(self._callers, context))
                    )
                    if not handler.response_streaming:
                        return await behaviour(request, context)
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            await send(self._callers, context, response)
                    return None
            except grpc.aio.AbortError:
                raise
            except BaseException as error:
                status = _status_of(error, method)
            return await _abort(context, status)

        return _method(call, handler)

    def __repr__(self) -> str:
        return f"CallInterceptor({self._calls!r}, {self._callers!r})"


class StreamedCall(Generic[Request]):
    """A request of a stream, which is a call of its own."""

    def __init__(
        self,
        data: bytes,
        begin: Callable[[bytes], AbstractAsyncContextManager[Call]],
        parse: Callable[[bytes], Awaitable[Request]],
        method: str,
    ) -> None:
        self._data = data
        self._begin = begin
        self._parse = parse
        self._method = method
        self._call: Call | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Request]:
        """Surrounds all work that is done for the call; gives its request. Errors are those of `Calls.answer`."""
        data, self._data = self._data, b""  # which is not counted any more when the call has ended
        async with self._begin(data) as self._call:
            with no_panics():
                request = await self._parse(data)
                del data
                yield request

    def status_of(self, error: Exception) -> status_pb2.Status:
        """Describes an error that has ended the call to its caller; logs it if it is the server's own."""
        return to_status(error, self._method, self._call)


class StreamedCalls(Generic[Request]):
    """The calls of a stream, as they arrive, and their answers."""

    def __init__(self, calls: AsyncIterator[StreamedCall[Request]], send: Callable[[object], Awaitable[None]]) -> None:
        self._calls = calls
        self._send = send
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self.is_over = False
        """True if the caller has gone, or has not read an answer for too long."""

    def __aiter__(self) -> AsyncIterator[StreamedCall[Request]]:
        return self._calls

    async def send(self, response: object) -> None:
        """Sends a message; may be called by several tasks at a time. Errors are those of `send`."""
        async with self._writing:
            try:
                await self._send(response)
            except RequestError:
                self.is_over = True
                raise
            except grpc.aio.InternalError as error:  # before gRPC has cancelled the method
                self.is_over = True
                raise CancelledError("the caller has gone") from error


async def receive(callers: Callers, context: Context) -> bytes:
    """Receives the request of a call.

    Raises:
        InvalidInputError: The caller sent none.
        RequestError: See `Callers.arriving`.
    """
    with callers.arriving():
        data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidInputError("request", "is missing; send one message")
    assert isinstance(data, bytes), "there is no deserializer"
    return data


async def send(callers: Callers, context: Context, message: object) -> None:
    """Sends a message of a stream; errors are those of `Callers.unread`."""
    with callers.unread():
        await context.write(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """A method with one request, for transports other than gRPC, which hold its calls to limits of their own."""

    request_type: type[Message]
    behaviour: Callable[[Any, Any], Any]
    """Answers a request: a coroutine, or an asynchronous generator of a stream. What it asks of the context, its second
    argument, are `time_remaining` and `invocation_metadata`."""
    parse: Parser
    """Makes a request of its bytes; raises InvalidInputError."""
    is_stream: bool
    is_admin: bool
    """True if it changes the server."""
    max_bytes: int
    """Largest request."""

    @classmethod
    def of(cls, handler: Handler, method: str, *, max_bytes: int, is_admin: bool) -> Self:
        """Describes the method that gRPC knows by its full name `method`."""
        behaviour: Any = handler.unary_stream or handler.unary_unary  # typed for threads
        return cls(
            request_type=GetMessageClass(_input_type(method)),
            behaviour=behaviour,
            parse=_parser(handler, method, max_bytes),
            is_stream=handler.response_streaming,
            is_admin=is_admin,
            max_bytes=max_bytes,
        )


def _method(behaviour: Behaviour, handler: Handler) -> Handler:
    """Makes a method that reads bytes from its context and answers as `handler` does."""
    make: Any = grpc.stream_unary_rpc_method_handler  # typed for the synchronous API
    if handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler
    # Without a deserializer gRPC hands on the bytes; with one, bytes that are no request would become UNKNOWN.
    method: Handler = make(behaviour, request_deserializer=None, response_serializer=handler.response_serializer)
    return method


def _input_type(method: str) -> Descriptor:
    return descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type


def _parser(handler: Handler, method: str, max_bytes: int) -> Parser:
    """Returns what makes a request of a method of its bytes, of which it takes so many."""
    assert handler.request_deserializer is not None, method
    deserialize = handler.request_deserializer
    message = _input_type(method)

    def read(data: bytes) -> Any:
        return _parse(data, deserialize, message)

    async def parse(data: bytes) -> Any:
        _check_size(data, max_bytes)
        if len(data) <= _PARSED_ON_LOOP_BYTES:
            return read(data)
        return await asyncio.get_running_loop().run_in_executor(request_pool(), read, data)

    return parse


async def _open(context: Context) -> tuple[Pairs, str]:
    """Reads what came with a call, and sets what goes with its answer: returns the metadata and the request's id."""
    pairs = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    given, wants_gzip = "", False
    for key, value in pairs:
        if key == REQUEST_ID:
            given = value
        elif key == _ACCEPTS and "gzip" in value:
            wants_gzip = True
    if wants_gzip:
        context.set_compression(grpc.Compression.Gzip)
        await context.send_initial_metadata(())  # with a unary answer's own, gRPC would leave the encoding out
    request_id = request_id_of(given)
    context.set_trailing_metadata(((REQUEST_ID, request_id),))
    return pairs, request_id


def _status_of(error: BaseException, method: str, answered: Call | None = None, request_id: str = "") -> Any:
    """Returns the status of an error, or of a panic; what is neither goes on."""
    if not is_failure(error):
        raise error
    return rpc_status.to_status(to_status(error, method, answered, request_id=request_id))


async def _abort(context: Context, status: Any, request_id: str = "") -> NoReturn:
    """Ends a call with a status."""
    trailers = (*status.trailing_metadata, (REQUEST_ID, request_id)) if request_id else status.trailing_metadata
    await context.abort(status.code, status.details, trailers)


async def _parsed(requests: AsyncIterator[bytes], parse: Parser) -> AsyncGenerator[Any, None]:
    async for request in requests:
        yield await parse(request)


def _check_size(data: bytes, max_bytes: int) -> None:
    """Checks the size of a request, as it is after decompression.

    Raises:
        InvalidInputError: It has more bytes than the service takes.
    """
    if len(data) > max_bytes:
        raise InvalidInputError(
            "request", f"has {len(data)} bytes, the limit of this service is {max_bytes}; send it in several calls"
        )


def _parse(data: bytes, deserialize: Deserializer, message: Descriptor) -> Any:
    """Makes a message of the bytes of a call.

    Raises:
        InvalidInputError: There are too many fields, or the bytes are no such message.
    """
    check_fields(data, message)
    try:
        return deserialize(data)
    except DecodeError as error:
        raise no_message() from error


def _address(peer: str) -> str:
    """Returns the address of gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`, without its port."""
    kind, _, place = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return place.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")


def _certificate_names(context: Context) -> tuple[str, ...]:
    """Returns the subject alternative names of the client's certificate, or its common name where it has none."""
    return tuple(name.decode(errors="replace") for name in context.peer_identities() or ())
