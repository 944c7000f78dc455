"""The edge between gRPC and the serving layer: bytes become a call, its errors become statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from headway_server.errors import InvalidInputError, is_failure
from headway_server.preprocessing.pool import request_pool
from headway_server.serving.calls import Call, Calls
from headway_server.transports.grpc.status import to_status
from headway_server.transports.grpc.wire import check_fields, no_message

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone
Deserializer: TypeAlias = Callable[[bytes], Any]
UnaryMethod: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamMethod: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]
Parser: TypeAlias = Callable[[bytes], Awaitable[Any]]

_PARSED_ON_LOOP_BYTES: Final = 64 * 2**10
"""A request of so few bytes is parsed on the event loop, in 3 ms at most; 64 MiB of images take 31 ms."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of the project's own services.

    Health and reflection are left alone: they answer while the server drains, and count as no calls.
    """

    def __init__(self, calls: Calls, *, max_request_bytes: Mapping[str, int]) -> None:
        """Prepares to wrap methods.

        Args:
            calls: What every call is held to.
            max_request_bytes: Largest request of each service, by its full name; no other service is wrapped.
        """
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
        if handler is None or max_bytes is None:
            return handler
        self._handlers[method] = wrapped = self._wrap(handler, method, max_bytes)
        return wrapped

    def _wrap(self, handler: Handler, method: str, max_bytes: int) -> Handler:
        assert not handler.request_streaming, method
        assert handler.request_deserializer is not None, method
        deserialize = handler.request_deserializer
        message = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type

        def read(data: bytes) -> Any:
            return _parse(data, deserialize, message)

        async def parse(data: bytes) -> Any:
            _check_size(data, max_bytes)
            if len(data) <= _PARSED_ON_LOOP_BYTES:
                return read(data)
            return await asyncio.get_running_loop().run_in_executor(request_pool(), read, data)

        behaviour: Any = handler.unary_stream or handler.unary_unary  # typed for the synchronous API
        if handler.response_streaming:
            make: Any = grpc.unary_stream_rpc_method_handler
            wrapped: Any = self._wrap_stream(behaviour, parse, method)
        else:
            make = grpc.unary_unary_rpc_method_handler
            wrapped = self._wrap_unary(behaviour, parse, method)
        # Without a deserializer gRPC hands on the bytes; with one, bytes that are no request would become UNKNOWN.
        handler_with_status: Handler = make(
            wrapped, request_deserializer=None, response_serializer=handler.response_serializer
        )
        return handler_with_status

    def _wrap_unary(self, behaviour: UnaryMethod, parse: Parser, method: str) -> UnaryMethod:
        async def call(data: bytes, context: Context) -> Any:
            try:
                async with self._answer(method, data, context):
                    return await behaviour(await parse(data), context)
            except grpc.aio.AbortError:
                raise
            except BaseException as error:  # the one place where every error becomes a status
                if not is_failure(error):
                    raise
                status = to_status(error, method)
            # gRPC keeps the frames of an aborted call, and an error that is being handled, until garbage is collected.
            del data
            return await context.abort_with_status(rpc_status.to_status(status))

        return call

    def _wrap_stream(self, behaviour: StreamMethod, parse: Parser, method: str) -> StreamMethod:
        async def call(data: bytes, context: Context) -> AsyncGenerator[Any, None]:
            try:
                async with (
                    self._answer(method, data, context),
                    aclosing(behaviour(await parse(data), context)) as responses,
                ):
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except BaseException as error:  # as above
                if not is_failure(error):
                    raise
                status = to_status(error, method)
            else:
                return
            del data  # as above
            await context.abort_with_status(rpc_status.to_status(status))

        return call

    def _answer(self, method: str, data: bytes, context: Context) -> AbstractAsyncContextManager[Call]:
        """Begins a call. gRPC itself ends one whose deadline has passed."""
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        return self._calls.answer(method, metadata=metadata, num_bytes=len(data), caller=_machine_of(context.peer()))

    def __repr__(self) -> str:
        return f"CallInterceptor({self._calls!r})"


def _machine_of(peer: str) -> str:
    """Returns the address of a caller without the port, which is another one for each connection."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


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
