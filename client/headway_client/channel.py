"""How messages reach a server and come back: one channel for blocking programs, one for an event loop.

Both have the same methods, so that the blocking client can be generated from the asyncio one. What differs between
the two libraries of gRPC is here, and so are the files of a call: `Channel` reads them where it is asked, and
`AsyncChannel` in a thread, off the event loop.
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
    """What both channels share: the connection, and whether they are closed."""

    def __init__(self, connection: Connection) -> None:
        """Prepares calls over `connection`."""
        self._connection = connection
        self.is_closed = False

    def _check_open(self) -> None:
        """Checks, before each attempt, that the client was not closed, which may happen while it waits to retry.

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
        """Prepares calls over `connection`, which is made by the first of them."""
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
        """Starts a call that is answered by several messages. Errors are those of `unary`."""
        self._check_open()
        call.read_files()
        rpc = self._channel.unary_stream(call.path, **_codec(call))
        return Rpc(rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata))

    def session(self, call: Call[Any], timeout_s: float | None) -> Rpc:
        """Starts a call of several requests, of which none is sent yet. Errors are those of `unary`."""
        self._check_open()
        call.read_files()
        requests: SimpleQueue[Message | None] = SimpleQueue()
        rpc = self._channel.stream_stream(call.path, **_codec(call))
        metadata = self._connection.call_metadata
        return Rpc(rpc(iter(requests.get, None), timeout=timeout_s, metadata=metadata), requests)

    def connectivity(self) -> grpc.ChannelConnectivity:
        """Returns the state of the connection at this moment."""
        if not self.is_closed:
            # gRPC's own subscription has a thread that fails where the channel is closed.
            with suppress(ValueError):  # closed by another thread
                return _STATES[self._channel._channel.check_connectivity_state(False)]  # type: ignore[attr-defined]  # noqa: SLF001
        return grpc.ChannelConnectivity.SHUTDOWN

    def close(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        self.is_closed = True
        self._channel.close()


class AsyncChannel(_Channel):
    """Sends calls from one event loop: the one that runs when the first is sent."""

    def __init__(self, connection: Connection) -> None:
        """Prepares calls over `connection`, which is made by the first of them."""
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
        """Starts a call that is answered by several messages; one with files starts with the first `read`."""
        rpc = self._open().unary_stream(call.path, **_codec(call))
        return AsyncRpc(call, lambda: rpc(call.request, timeout=timeout_s, metadata=self._connection.call_metadata))

    def session(self, call: Call[Any], timeout_s: float | None) -> AsyncRpc:
        """Starts a call of several requests, of which none is sent yet; one with files starts with the first."""
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
    """A running call whose messages are read one by one, and whose requests may be several."""

    def __init__(self, rpc: Any, requests: SimpleQueue[Message | None] | None = None) -> None:
        """Takes gRPC's stream of responses, and the queue that its requests are taken from."""
        self._rpc = rpc
        self._requests: SimpleQueue[Message | None] = SimpleQueue() if requests is None else requests

    def read(self) -> Any:
        """Returns the next message; None at the end.

        Raises:
            grpc.RpcError: The call failed.
        """
        return next(self._rpc, None)

    def write(self, request: Message) -> None:
        """Sends a further request. If the call has ended, reading says why."""
        self._requests.put(request)

    def cancel(self) -> None:
        """Ends the call if it is still running. Any thread may call this."""
        self._requests.put(None)
        self._rpc.cancel()


class AsyncRpc:
    """A call whose messages are read one by one, and whose requests may be several.

    It runs already, unless files have to be read first: these are read when the first message is asked for.
    """

    def __init__(self, call: Call[Any], start: Callable[[], Any]) -> None:
        """Takes the call, and what starts it and returns gRPC's stream."""
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
        """Sends a further request. If the call has ended, reading says why. Errors are those of `read`."""
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
    """Returns how messages of a call are written and read."""
    return {
        "request_serializer": type(call.request).SerializeToString,
        "response_deserializer": call.response_type.FromString,
    }


async def _read_files(call: Call[Any]) -> None:
    """Reads the files of a call off the event loop."""
    await asyncio.to_thread(call.read_files)


def _raise_if_closed(error: asyncio.CancelledError) -> None:
    """Raises an error of our own for a call that was ended by closing its stream or client.

    gRPC raises the same `CancelledError` for that as for a cancelled task, and a task that nobody cancelled must not
    look cancelled.

    Raises:
        CallCancelledError: The current task was not cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise CallCancelledError("the call was ended by its caller", grpc.StatusCode.CANCELLED) from error
