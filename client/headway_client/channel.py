"""Transport of messages: one channel for blocking programs, one for an event loop.

Both have the same methods, so that the blocking client can be generated from the asyncio one. The differences between
gRPC's two libraries are here. So is the reading of files: `Channel` reads them in the calling thread, `AsyncChannel` in
another, off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from headway_client.connection import Connection
from headway_client.errors import CallCancelledError, ClientClosedError
from headway_client.requests import Call

_STATES = {state.value[0]: state for state in grpc.ChannelConnectivity}


class _Channel:
    """Connection and closed state of both channels."""

    def __init__(self, connection: Connection) -> None:
        """Prepares calls over `connection`."""
        self._connection = connection
        self.is_closed = False

    def _check_open(self) -> None:
        """Checks before each attempt that the client was not closed, for instance during a retry delay.

        Raises:
            ClientClosedError: The client is closed.
        """
        if self.is_closed:
            raise ClientClosedError(f"the client of {self._connection.server} is closed; make a new one")

    def __repr__(self) -> str:
        """Server and state."""
        return f"<{type(self).__name__} to {self._connection.server} {'closed' if self.is_closed else 'open'}>"


class Channel(_Channel):
    """Sends blocking calls. Threads may share it."""

    def __init__(self, connection: Connection) -> None:
        """Prepares calls over `connection`; the first call connects."""
        super().__init__(connection)
        self._channel = connection.open()

    def unary(self, call: Call[Any], timeout_s: float) -> Any:
        """Sends a call once; returns its response.

        Raises:
            ClientClosedError: The channel is closed.
            OSError: A file of the call cannot be read.
            grpc.RpcError: The call failed.
        """
        self._check_open()
        call.read_files()
        rpc = self._channel.unary_unary(call.path, **_codec(call))
        return rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata)

    def stream(self, call: Call[Any], timeout_s: float) -> Rpc:
        """Starts a call with several responses. Errors are those of `unary`."""
        self._check_open()
        call.read_files()
        rpc = self._channel.unary_stream(call.path, **_codec(call))
        return Rpc(rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata))

    def session(self, call: Call[Any], timeout_s: float | None) -> Rpc:
        """Starts a call with several requests and sends none yet. Errors are those of `unary`."""
        self._check_open()
        call.read_files()
        requests: SimpleQueue[Message | None] = SimpleQueue()
        rpc = self._channel.stream_stream(call.path, **_codec(call))
        metadata = self._connection.call_metadata
        return Rpc(rpc(iter(requests.get, None), timeout=timeout_s, metadata=metadata), requests)

    def connectivity(self) -> grpc.ChannelConnectivity:
        """Returns the state of the connection at this moment."""
        if not self.is_closed:
            # gRPC's own subscription has a thread that fails once the channel is closed.
            with suppress(ValueError):  # closed by another thread
                return _STATES[self._channel._channel.check_connectivity_state(False)]  # type: ignore[attr-defined]  # noqa: SLF001
        return grpc.ChannelConnectivity.SHUTDOWN

    def close(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        self.is_closed = True
        self._channel.close()


class AsyncChannel(_Channel):
    """Sends calls from one event loop, the one of the first call."""

    def __init__(self, connection: Connection) -> None:
        """Prepares calls over `connection`; the first call connects."""
        super().__init__(connection)
        self._channel: grpc.aio.Channel | None = None

    async def unary(self, call: Call[Any], timeout_s: float) -> Any:
        """Sends a call once, as `Channel.unary` does.

        Raises:
            CallCancelledError: The client was closed meanwhile.
            ClientClosedError: The channel is closed.
            OSError: A file of the call cannot be read.
            grpc.RpcError: The call failed.
        """
        channel = self._open()
        if call.files:
            await _read_files(call)
        rpc = channel.unary_unary(call.path, **_codec(call))
        try:
            return await rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata)
        except asyncio.CancelledError as error:
            _raise_if_closed(error)
            raise

    def stream(self, call: Call[Any], timeout_s: float) -> AsyncRpc:
        """Starts a call with several responses; a call with files starts at the first `read`."""
        rpc = self._open().unary_stream(call.path, **_codec(call))
        return AsyncRpc(call, lambda: rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata))

    def session(self, call: Call[Any], timeout_s: float | None) -> AsyncRpc:
        """Starts a call with several requests and sends none yet; a call with files starts at the first."""
        rpc = self._open().stream_stream(call.path, **_codec(call))
        return AsyncRpc(call, lambda: rpc(timeout=timeout_s, metadata=self._connection.call_metadata))

    def connectivity(self) -> grpc.ChannelConnectivity:
        """Returns the state of the connection at this moment."""
        if self.is_closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        return grpc.ChannelConnectivity.IDLE if self._channel is None else self._channel.get_state()

    async def close(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        self._check_open()
        if self._channel is None:
            self._channel = self._connection.open_async()
        return self._channel


class Rpc:
    """A running call. Its messages are read one by one; it may have several requests."""

    def __init__(self, rpc: Any, requests: SimpleQueue[Message | None] | None = None) -> None:
        """Takes gRPC's stream of responses and the queue of its requests."""
        self._rpc = rpc
        self._requests: SimpleQueue[Message | None] = SimpleQueue() if requests is None else requests

    def read(self) -> Any:
        """Returns the next message; None at the end.

        Raises:
            grpc.RpcError: The call failed.
        """
        return next(self._rpc, None)

    def write(self, request: Message) -> None:
        """Sends a further request. If the call has ended, `read` raises the reason."""
        self._requests.put(request)

    def cancel(self) -> None:
        """Ends the call if it is still running. Any thread may call this."""
        self._requests.put(None)
        self._rpc.cancel()


class AsyncRpc:
    """A call. Its messages are read one by one; it may have several requests.

    It runs from the start, unless it has files: these are read at the first `read`.
    """

    def __init__(self, call: Call[Any], start: Callable[[], Any]) -> None:
        """Takes the call, and the function that starts it and returns gRPC's stream."""
        self._call = call
        self._start = start
        self._rpc: Any = None if call.files else start()
        self._is_cancelled = False

    async def read(self) -> Any:
        """Returns the next message; None at the end.

        Raises:
            CallCancelledError: The call was ended by closing its stream or client.
            OSError: A file of the call cannot be read.
            grpc.RpcError: The call failed.
        """
        await self._wait_for_files()
        try:
            message = await self._rpc.read()
        except asyncio.CancelledError as error:
            _raise_if_closed(error)
            raise
        return None if message is grpc.aio.EOF else message

    async def write(self, request: Message) -> None:
        """Sends a further request. If the call has ended, `read` raises the reason. Errors are those of `read`."""
        await self._wait_for_files()
        try:
            with suppress(asyncio.InvalidStateError):
                await self._rpc.write(request)
        except asyncio.CancelledError as error:
            _raise_if_closed(error)
            raise

    def cancel(self) -> None:
        """Ends the call if it is still running."""
        self._is_cancelled = True
        if self._rpc is not None:
            self._rpc.cancel()

    async def _wait_for_files(self) -> None:
        if self._rpc is None:
            await _read_files(self._call)
            if self._is_cancelled:
                raise CallCancelledError("the call was ended by its caller", grpc.StatusCode.CANCELLED)
            self._rpc = self._start()


def _codec(call: Call[Any]) -> dict[str, Callable[..., Any]]:
    """Returns the serializers of a call's messages."""
    return {
        "request_serializer": type(call.request).SerializeToString,
        "response_deserializer": call.response_type.FromString,
    }


async def _read_files(call: Call[Any]) -> None:
    """Reads the files of a call off the event loop."""
    await asyncio.to_thread(call.read_files)


def _raise_if_closed(error: asyncio.CancelledError) -> None:
    """Raises an error of this package for a call that ended because its stream or client was closed.

    gRPC raises `CancelledError` for both that and a cancelled task. A task that nobody cancelled must not look
    cancelled.

    Raises:
        CallCancelledError: The current task was not cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise CallCancelledError("the call was ended by its caller", grpc.StatusCode.CANCELLED) from error
