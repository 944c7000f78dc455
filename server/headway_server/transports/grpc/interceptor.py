"""What happens around every call: refused while the server drains, counted, read, its errors made statuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from headway_server.errors import DrainingError, InvalidInputError
from headway_server.transports.grpc.status import to_status

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs alone
Deserializer: TypeAlias = Callable[[bytes], Any]
UnaryMethod: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamMethod: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]

_OWN_PREFIX = "/headway."  # health and reflection look after themselves, and answer while the server drains


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of the project's own services."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._num_running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls that have begun and not ended."""
        return self._num_running

    def refuse_new_calls(self) -> None:
        """Answers every further call UNAVAILABLE; those that run go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Waits until no call is running."""
        await self._idle.wait()

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
        if handler is None or not method.startswith(_OWN_PREFIX):
            return handler
        self._handlers[method] = wrapped = self._wrap(handler, method)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        assert not handler.request_streaming, method
        assert handler.request_deserializer is not None, method
        behaviour: Any = handler.unary_stream or handler.unary_unary  # typed for the synchronous API
        if handler.response_streaming:
            make: Any = grpc.unary_stream_rpc_method_handler
            wrapped: Any = self._wrap_stream(behaviour, handler.request_deserializer, method)
        else:
            make = grpc.unary_unary_rpc_method_handler
            wrapped = self._wrap_unary(behaviour, handler.request_deserializer, method)
        # Without a deserializer gRPC hands on the bytes: what it makes of bytes that are no request is UNKNOWN.
        handler_with_status: Handler = make(
            wrapped, request_deserializer=None, response_serializer=handler.response_serializer
        )
        return handler_with_status

    def _wrap_unary(self, behaviour: UnaryMethod, deserialize: Deserializer, method: str) -> UnaryMethod:
        async def call(data: bytes, context: Context) -> Any:
            with self._counted():
                try:
                    self._check_draining()
                    return await behaviour(_parse(data, deserialize), context)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # the one place where every error becomes a status
                    await context.abort_with_status(rpc_status.to_status(to_status(error, method)))

        return call

    def _wrap_stream(self, behaviour: StreamMethod, deserialize: Deserializer, method: str) -> StreamMethod:
        async def call(data: bytes, context: Context) -> AsyncGenerator[Any, None]:
            with self._counted():
                try:
                    self._check_draining()
                    async with aclosing(behaviour(_parse(data, deserialize), context)) as responses:
                        async for response in responses:
                            yield response
                except grpc.aio.AbortError:
                    raise
                except Exception as error:  # as above
                    await context.abort_with_status(rpc_status.to_status(to_status(error, method)))

        return call

    def _check_draining(self) -> None:
        if self._draining:
            raise DrainingError("the server is shutting down; call another one, or this one when it is back")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    def __repr__(self) -> str:
        return f"CallInterceptor({self._num_running} calls running{', draining' if self._draining else ''})"


def _parse(data: bytes, deserialize: Deserializer) -> Any:
    """Makes a message of the bytes of a call.

    Raises:
        InvalidInputError: They are no such message.
    """
    try:
        return deserialize(data)
    except DecodeError as error:
        raise InvalidInputError(
            "request", "is not a message of this method; send what its .proto file says, with strings in UTF-8"
        ) from error
