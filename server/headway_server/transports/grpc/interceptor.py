"""The edge between gRPC and the serving layer: bytes become a call, its errors become statuses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from headway_server.errors import CancelledError, InvalidInputError, RequestError, is_failure
from headway_server.observers import Call
from headway_server.services.procedure import PARSED_ON_LOOP_BYTES, Procedure, StreamedCall, StreamedCalls
from headway_server.services.status import to_status
from headway_server.services.wire import check_fields, no_message
from headway_server.serving.access import Principal, is_local
from headway_server.serving.calls import REQUEST_ID, Calls, request_id_of
from headway_server.serving.peer_waits import PeerWaits

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamMethod: TypeAlias = Callable[[AsyncIterator[Any], Context], AsyncGenerator[Any, None]]
Pairs: TypeAlias = list[tuple[str, str]]
Who: TypeAlias = tuple[str, Principal | None]
"""The caller: name and, with access control, rights."""

_ACCEPTS: Final = "accept-encoding"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Serves the procedures over gRPC, and limits the methods of other services.

    Probes and reflection answer while the server drains, and do not count as calls. Their long-lived streams have
    separate limits. To gRPC, a method with one request is a method with a stream of requests. It starts before the
    request is received, reads the first one, and enforces a timeout.
    """

    def __init__(
        self, calls: Calls, callers: PeerWaits, procedures: Mapping[str, Procedure], *, verifies_clients: bool = False
    ) -> None:
        """Prepares the methods.

        Args:
            calls: Running calls and their limits.
            callers: Timeouts of slow callers.
            procedures: The methods by their full names. They are looked up here and not registered with gRPC. A
                registered method has a task that waits for calls, and gRPC goes through all tasks at each call: 23 µs
                for 34 methods, and 12 µs for two.
            verifies_clients: True if every client has a verified certificate.
        """
        self._verifies_clients = verifies_clients
        self._calls = calls
        self._callers = callers
        self._handlers = {name: self._own(procedure) for name, procedure in procedures.items()}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the wrapped method; each is wrapped once."""
        method = handler_call_details.method
        if (wrapped := self._handlers.get(method)) is not None:
            return wrapped
        handler = await continuation(handler_call_details)
        if handler is not None:
            wrapped = self._handlers[method] = self._foreign(handler, method)
        return wrapped

    def _own(self, procedure: Procedure) -> Handler:
        """Wraps a procedure as a method."""
        if procedure.is_probe:
            behaviour = self._limit(_probe_of(procedure), procedure.name, lasts=procedure.is_stream)
        elif procedure.takes_stream:
            behaviour = self._wrap_streamed_calls(procedure)
        else:
            behaviour = self._wrap_stream(procedure) if procedure.is_stream else self._wrap_unary(procedure)
        return _handler(behaviour, is_stream=procedure.is_stream, serialize=_serialized)

    def _foreign(self, handler: Handler, method: str) -> Handler:
        """Wraps a method of another service: reflection, a bidirectional stream."""
        assert handler.stream_stream is not None, method
        assert handler.request_deserializer is not None, method
        read, answer = handler.request_deserializer, cast("StreamMethod", handler.stream_stream)  # typed for threads
        message = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type

        def behaviour(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[Any, None]:
            return answer(_parsed(requests, read, message), context)

        return _handler(
            self._limit(behaviour, method, lasts=True, receives=True),
            is_stream=True,
            serialize=handler.response_serializer,
        )

    def _wrap_unary(self, procedure: Procedure) -> Behaviour:
        method = procedure.name

        async def call(_: object, context: Context) -> Any:
            pairs, request_id = await _open(context)
            answered: Call | None = None
            try:
                who = self._identify(procedure, context, pairs, request_id)
                data = await self._receive(method, context, who, pairs, request_id)
                async with self._answer(method, data, who, pairs, request_id) as answered:
                    request = await procedure.parse(data)
                    data = b""  # parsed into the request
                    return await procedure.answer(request, deadline_of(context))
            except BaseException as error:  # the only place where errors become statuses
                status = _status_of(error, method, answered, request_id)
            # gRPC keeps the frames of an aborted call, and an error that is being handled, until garbage is collected.
            data = b""
            return await _abort(context, status, request_id)

        return call

    def _wrap_stream(self, procedure: Procedure) -> Behaviour:
        method = procedure.name

        async def call(_: object, context: Context) -> None:
            pairs, request_id = await _open(context)
            answered: Call | None = None
            try:
                who = self._identify(procedure, context, pairs, request_id)
                data = await self._receive(method, context, who, pairs, request_id)
                async with self._answer(method, data, who, pairs, request_id) as answered:
                    request = await procedure.parse(data)
                    data = b""
                    async with aclosing(procedure.answer(request, deadline_of(context))) as responses:
                        async for response in responses:
                            await send(self._callers, context, response)
                return
            except BaseException as error:  # as above
                status = _status_of(error, method, answered, request_id)
            data = b""
            await _abort(context, status, request_id)

        return call

    async def _receive(self, method: str, context: Context, who: Who, pairs: Pairs, request_id: str) -> bytes:
        """Receives the request of a call; a missing one is reported as a refused call."""
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
        await self._callers.wait_while_paused()
        return data

    def _wrap_streamed_calls(self, procedure: Procedure) -> Behaviour:
        """Wraps a method with a call for each request; its stream counts as long-lived."""
        method = procedure.name

        # gRPC's own iterator references the last message until the next one.
        async def stream(_: object, context: Context) -> None:
            pairs, request_id = await _open(context)

            def begin(data: bytes) -> AbstractAsyncContextManager[Call]:
                who = self._identify(procedure, context, pairs, request_id)  # rights may be revoked meanwhile
                return self._answer(method, data, who, pairs, request_id)

            async def next_call() -> StreamedCall[Any] | None:
                data = await context.read()
                return None if data is grpc.aio.EOF else StreamedCall(data, begin, procedure)

            async def calls() -> AsyncGenerator[StreamedCall[Any], None]:
                while (call := await next_call()) is not None:
                    yield call

            try:
                self._identify(procedure, context, pairs, request_id)
                with self._callers.lasting(context.peer(), receives=True):
                    await procedure.answer(
                        StreamedCalls(
                            calls=calls(),
                            write=partial(_write, self._callers, context),
                            metadata=dict(pairs),
                            deadline=deadline_of(context),
                        )
                    )
                return
            except BaseException as error:  # as above
                status = _status_of(error, method, request_id=request_id)
            await _abort(context, status, request_id)

        return stream

    def _identify(self, procedure: Procedure, context: Context, pairs: Pairs, request_id: str) -> Who:
        """Identifies the caller before the request is received, so that refused callers take no memory."""
        peer = context.peer()
        names = _certificate_names(context) if self._verifies_clients else ()
        is_admin = procedure.is_admin
        caller = names[0] if names else peer
        rights = self._calls.identify(
            procedure.name,
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
        """Begins a call. gRPC itself enforces deadlines."""
        caller, rights = who
        return self._calls.answer(
            method, metadata=pairs, num_bytes=len(data), caller=caller, rights=rights, request_id=request_id
        )

    def _limit(
        self,
        behaviour: Callable[[Any, Context], Any],
        method: str,
        *,
        lasts: bool,
        receives: bool = False,
    ) -> Behaviour:
        """Wraps a method that does not count as a call.

        Args:
            behaviour: The method, with the bytes of the request or an iterator of requests, and the context.
            method: Its full name.
            lasts: True if its answer is a stream.
            receives: True if it takes a stream of requests.
        """

        async def call(requests: Any, context: Context) -> Any:
            lasting = self._callers.lasting(context.peer(), receives=receives) if lasts else nullcontext()
            try:
                with lasting:
                    answered = behaviour(requests if receives else await receive(self._callers, context), context)
                    if not lasts:
                        return await answered
                    async with aclosing(answered) as responses:
                        async for response in responses:
                            await send(self._callers, context, response)
                    return None
            except grpc.aio.AbortError:
                raise
            except BaseException as error:
                status = _status_of(error, method)
            return await _abort(context, status)

        return call

    def __repr__(self) -> str:
        return f"CallInterceptor({self._calls!r}, {self._callers!r})"


async def receive(callers: PeerWaits, context: Context) -> bytes:
    """Receives the request of a call.

    Raises:
        InvalidInputError: The caller sent none.
        RequestError: See `PeerWaits.arriving`.
    """
    with callers.arriving():
        data = await context.read()
    if data is grpc.aio.EOF:
        raise InvalidInputError("request", "is missing; send one message")
    assert isinstance(data, bytes), "there is no deserializer"
    return data


async def send(callers: PeerWaits, context: Context, message: object) -> None:
    """Sends a message of a stream; errors are those of `PeerWaits.unread`."""
    with callers.unread():
        await context.write(message)


def _handler(behaviour: Behaviour, *, is_stream: bool, serialize: Callable[[Any], bytes] | None) -> Handler:
    """Returns a method that reads bytes from its context."""
    make: Any = grpc.stream_unary_rpc_method_handler  # typed for the synchronous API
    if is_stream:
        make = grpc.stream_stream_rpc_method_handler
    # Without a deserializer gRPC passes bytes on; with one, invalid bytes would become UNKNOWN.
    handler: Handler = make(behaviour, request_deserializer=None, response_serializer=serialize)
    return handler


def deadline_of(context: Context) -> float | None:
    """Returns the deadline by `time.monotonic`; None without one."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _probe_of(procedure: Procedure) -> Callable[[bytes, Context], Any]:
    """Returns a method on bytes for a probe."""
    if procedure.is_stream:

        async def answer_in_parts(data: bytes, context: Context) -> AsyncGenerator[Any, None]:
            async with aclosing(procedure.answer(await procedure.parse(data), deadline_of(context))) as responses:
                async for response in responses:
                    yield response

        return answer_in_parts

    async def answer(data: bytes, context: Context) -> Any:
        return await procedure.answer(await procedure.parse(data), deadline_of(context))

    return answer


async def _parsed(
    requests: AsyncIterator[bytes], read: Callable[[bytes], Any], message: Descriptor
) -> AsyncGenerator[Any, None]:
    """Parses requests.

    Raises:
        InvalidInputError: The bytes are not a request.
    """
    async for data in requests:
        if len(data) > PARSED_ON_LOOP_BYTES:
            raise InvalidInputError("request", f"has {len(data)} bytes, the limit is {PARSED_ON_LOOP_BYTES}")
        check_fields(data, message)
        try:
            request = read(data)
        except DecodeError as error:
            raise no_message() from error
        yield request


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


async def _write(callers: PeerWaits, context: Context, message: object) -> None:
    """Sends a message of a stream as `send` does, with an error for a disconnected client.

    Raises:
        CancelledError: The client disconnected.
        RequestError: See `PeerWaits.unread`.
    """
    try:
        await send(callers, context, message)
    except grpc.aio.InternalError as error:
        raise CancelledError("the caller has gone") from error


async def _open(context: Context) -> tuple[Pairs, str]:
    """Reads the metadata of a call and sets those of its answer; returns the metadata and the request id."""
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
    """Returns the status of an error or a panic; raises anything else."""
    if not is_failure(error):
        raise error
    return rpc_status.to_status(to_status(error, method, answered, request_id=request_id))


async def _abort(context: Context, status: Any, request_id: str = "") -> NoReturn:
    """Ends a call with a status."""
    trailers = (*status.trailing_metadata, (REQUEST_ID, request_id)) if request_id else status.trailing_metadata
    await context.abort(status.code, status.details, trailers)


def _address(peer: str) -> str:
    """Returns the address in gRPC's name of a peer, such as `ipv4:127.0.0.1:4711`, without the port."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")


def _certificate_names(context: Context) -> tuple[str, ...]:
    """Returns the subject alternative names of the client's certificate, or else its common name."""
    return tuple(name.decode(errors="replace") for name in context.peer_identities() or ())
