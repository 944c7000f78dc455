"""The edge between gRPC and the serving layer: bytes become a call, its errors become statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from headway_server.errors import DrainingError, InvalidInputError
from headway_server.observers import Call
from headway_server.serving.calls import Calls
from headway_server.transports.grpc.status import to_status

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone
Deserializer: TypeAlias = Callable[[bytes], Any]
UnaryMethod: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamMethod: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]
StreamedCallsMethod: TypeAlias = "Callable[[StreamedCalls[Any], Context], Awaitable[None]]"
Request = TypeVar("Request")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of the project's own services.

    Health and reflection are left alone: they answer while the server drains, and count as no calls.
    """

    def __init__(
        self, calls: Calls, *, max_request_bytes: Mapping[str, int], probes: Container[str] = frozenset()
    ) -> None:
        """Prepares to wrap methods.

        Args:
            calls: What every call is held to.
            max_request_bytes: Largest request of each service, by its full name; no other service is wrapped.
            probes: Methods of these services that are left alone as health is.
        """
        self._probes = probes
        self._calls = calls
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
        max_bytes = self._max_request_bytes.get(method.strip("/").partition("/")[0])
        if handler is None or max_bytes is None or method in self._probes:
            return handler
        self._handlers[method] = wrapped = self._wrap(handler, method, max_bytes)
        return wrapped

    def _wrap(self, handler: Handler, method: str, max_bytes: int) -> Handler:
        assert handler.request_deserializer is not None, method
        deserialize = handler.request_deserializer

        def parse(data: bytes) -> Any:
            return _parse(data, deserialize, max_bytes)

        behaviour: Any = handler.unary_stream or handler.unary_unary or handler.stream_stream  # typed for threads
        if handler.request_streaming:
            make: Any = grpc.stream_stream_rpc_method_handler
            wrapped: Any = self._wrap_streamed_calls(behaviour, parse, method)
        elif handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
            wrapped = self._wrap_stream(behaviour, parse, method)
        else:
            make = grpc.unary_unary_rpc_method_handler
            wrapped = self._wrap_unary(behaviour, parse, method)
        # Without a deserializer gRPC hands on the bytes; with one, bytes that are no request would become UNKNOWN.
        handler_with_status: Handler = make(
            wrapped, request_deserializer=None, response_serializer=handler.response_serializer
        )
        return handler_with_status

    def _wrap_unary(self, behaviour: UnaryMethod, parse: Deserializer, method: str) -> UnaryMethod:
        async def call(data: bytes, context: Context) -> Any:
            answered: Call | None = None
            try:
                async with self._answer(method, data, context) as answered:
                    return await behaviour(parse(data), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the one place where every error becomes a status
                await context.abort_with_status(rpc_status.to_status(to_status(error, method, answered)))

        return call

    def _wrap_stream(self, behaviour: StreamMethod, parse: Deserializer, method: str) -> StreamMethod:
        async def call(data: bytes, context: Context) -> AsyncGenerator[Any, None]:
            answered: Call | None = None
            try:
                async with (
                    self._answer(method, data, context) as answered,
                    aclosing(behaviour(parse(data), context)) as responses,
                ):
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # as above
                await context.abort_with_status(rpc_status.to_status(to_status(error, method, answered)))

        return call

    def _wrap_streamed_calls(
        self, behaviour: StreamedCallsMethod, parse: Deserializer, method: str
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        """Wraps a method each of whose requests is a call; while the server drains it gets no more of them."""
        cut_off = DrainingError("the server is shutting down; open the stream to another one, or when it is back")

        async def stream(messages: AsyncIterator[bytes], context: Context) -> None:
            is_whole = asyncio.Event()

            async def calls() -> AsyncGenerator[StreamedCall[Any], None]:
                async for data in _until(messages, self._calls.wait_draining, is_whole):
                    yield StreamedCall(
                        partial(self._answer, method, data, context), parse=partial(parse, data), method=method
                    )

            try:
                async with aclosing(calls()) as incoming:
                    await behaviour(StreamedCalls(incoming, context), context)
                if not is_whole.is_set():
                    raise cut_off
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # as above
                await context.abort_with_status(rpc_status.to_status(to_status(error, method)))

        return stream

    def _answer(self, method: str, data: bytes, context: Context) -> AbstractAsyncContextManager[Call]:
        """Begins a call. gRPC itself ends one whose deadline has passed."""
        return self._calls.answer(method, metadata=context.invocation_metadata() or (), num_bytes=len(data))

    def __repr__(self) -> str:
        return f"CallInterceptor({self._calls!r})"


class StreamedCall(Generic[Request]):
    """A request of a stream, which is a call of its own."""

    def __init__(
        self,
        begin: Callable[[], AbstractAsyncContextManager[Call]],
        *,
        parse: Callable[[], Request],
        method: str,
    ) -> None:
        self._begin = begin
        self._parse = parse
        self._method = method
        self._call: Call | None = None

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[Request]:
        """Surrounds all work that is done for the call; gives its request. Errors are those of `Calls.answer`."""
        async with self._begin() as self._call:
            yield self._parse()

    def status_of(self, error: Exception) -> status_pb2.Status:
        """Describes an error that has ended the call to its caller; logs it if it is the server's own."""
        return to_status(error, self._method, self._call)


class StreamedCalls(Generic[Request]):
    """The calls of a stream, as they arrive, and their answers."""

    def __init__(self, calls: AsyncIterator[StreamedCall[Request]], context: Context) -> None:
        self._calls = calls
        self._context = context
        self._writing = asyncio.Lock()  # gRPC takes one message at a time

    def __aiter__(self) -> AsyncIterator[StreamedCall[Request]]:
        return self._calls

    async def send(self, response: object) -> None:
        """Sends a message; may be called by several tasks at a time."""
        async with self._writing:
            await self._context.write(response)


async def _until(
    messages: AsyncIterator[bytes], wait_end: Callable[[], Coroutine[Any, Any, object]], is_whole: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """Yields messages until there are no more, which sets `is_whole`, or `wait_end` returns."""
    end = asyncio.create_task(wait_end())
    try:
        while not end.done():
            following = asyncio.ensure_future(anext(messages, None))
            await asyncio.wait({following, end}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                # What waits for a message of gRPC is not to be cancelled; it ends with the stream.
                following.add_done_callback(lambda done: done.cancelled() or done.exception())
                return
            if (message := following.result()) is None:
                is_whole.set()
                return
            yield message
    finally:
        end.cancel()


def _parse(data: bytes, deserialize: Deserializer, max_bytes: int) -> Any:
    """Makes a message of the bytes of a call.

    Raises:
        InvalidInputError: There are too many, or they are no such message.
    """
    if len(data) > max_bytes:
        raise InvalidInputError(
            "request", f"has {len(data)} bytes, the limit of this service is {max_bytes}; send it in several calls"
        )
    try:
        return deserialize(data)
    except DecodeError as error:
        raise InvalidInputError(
            "request", "is not a message of this method; send what its .proto file says, with strings in UTF-8"
        ) from error
