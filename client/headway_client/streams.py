"""Text that arrives piece by piece, from a blocking or an asyncio call.

A stream that fails before its first message is tried again as a unary call would be; after it never, because the
pieces that were handed out cannot be taken back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio

from headway_client.calls import Piece, StreamCall
from headway_client.errors import CallCancelledError, ProtocolError, StreamNotFinishedError, from_rpc_error
from headway_client.results import Answer, StreamPiece
from headway_client.retry import Attempts

MessageT = TypeVar("MessageT", bound=Piece)
MessageT_co = TypeVar("MessageT_co", bound=Piece, covariant=True)
ResultT = TypeVar("ResultT")


class StreamRpc(Protocol[MessageT_co]):
    """The parts of gRPC's blocking stream that are used here."""

    def __next__(self) -> MessageT_co:
        """The next message."""

    def cancel(self) -> bool:
        """Ends the call."""


class AsyncStreamRpc(Protocol[MessageT_co]):
    """The parts of gRPC's asyncio stream that are used here."""

    async def read(self) -> MessageT_co | object:
        """The next message, or `grpc.aio.EOF`."""

    def cancel(self) -> bool:
        """Ends the call."""


class _StreamState(Generic[MessageT, ResultT]):
    """What both kinds of stream know and decide alike."""

    def __init__(self, call: StreamCall[MessageT, ResultT], attempts: Attempts) -> None:
        self._call = call
        self._attempts = attempts
        self._message_count = 0
        self._new_token_count = 0
        self._answer: Answer[ResultT] | None = None
        self._closed = False

    @property
    def answer(self) -> Answer[ResultT]:
        """The whole result, with model and timings; there once the stream has ended.

        Raises:
            StreamNotFinishedError: The last message has not arrived.
        """
        if self._answer is None:
            raise StreamNotFinishedError("the answer is there after the last piece; read the stream to its end first")
        return self._answer

    def __repr__(self) -> str:
        """State and progress of the stream."""
        state = "finished" if self._answer else "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._call.path} {state}, {self._new_token_count} tokens>"

    def _accept(self, message: MessageT) -> StreamPiece:
        self._message_count += 1
        self._new_token_count = message.new_token_count
        self._answer = self._call.read(message)
        return StreamPiece(message.text_delta, message.new_token_count, self._call.read_tokens(message))

    def _end(self) -> None:
        """Checks that a stream that ended well was whole."""
        self._closed = True
        if self._answer is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without its result")

    def _delay_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the call is opened again; raises the error where it is final."""
        failure = from_rpc_error(error)
        delay_s = self._attempts.delay_s(failure) if self._message_count == 0 and not self._closed else None
        if delay_s is None:
            self._closed = True
            raise failure from error
        return delay_s


class TextStream(_StreamState[MessageT, ResultT]):
    """Iterator over the pieces of a text; leaving its `with` block early cancels the call.

    ```python
    with client.stream_generate("Once upon a time") as stream:
        for piece in stream:
            print(piece.text, end="", flush=True)
    print(stream.answer.model)
    ```
    """

    def __init__(
        self,
        call: StreamCall[MessageT, ResultT],
        attempts: Attempts,
        open_rpc: Callable[[float], StreamRpc[MessageT]],
    ) -> None:
        """Starts the call; `open_rpc` takes the seconds it may last."""
        super().__init__(call, attempts)
        self._open_rpc = open_rpc
        self._rpc = open_rpc(attempts.remaining_s())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamPiece:
        """The next piece.

        Raises:
            CallError: The call failed.
            ProtocolError: The stream ended without its result.
        """
        if self._closed:
            raise StopIteration
        while True:
            try:
                return self._accept(next(self._rpc))
            except StopIteration:
                self._end()
                raise
            except grpc.RpcError as error:
                time.sleep(self._delay_after(error))
            self._reopen()

    def _reopen(self) -> None:
        self._rpc = self._open_rpc(self._attempts.remaining_s())
        if self._closed:  # by another thread, while this one slept
            self._rpc.cancel()

    def close(self) -> None:
        """Ends the call, if it is still running; the server stops working on it. May be called from any thread."""
        self._closed = True
        self._rpc.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncTextStream(_StreamState[MessageT, ResultT]):
    """Asynchronous iterator over the pieces of a text; leaving its `async with` block early cancels the call."""

    def __init__(
        self,
        call: StreamCall[MessageT, ResultT],
        attempts: Attempts,
        open_rpc: Callable[[float], AsyncStreamRpc[MessageT]],
    ) -> None:
        """Starts the call; `open_rpc` takes the seconds it may last."""
        super().__init__(call, attempts)
        self._open_rpc = open_rpc
        self._rpc = open_rpc(attempts.remaining_s())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamPiece:
        """The next piece.

        Raises:
            CallError: The call failed.
            ProtocolError: The stream ended without its result.
        """
        if self._closed:
            raise StopAsyncIteration
        while True:
            try:
                message = await self._rpc.read()
            except grpc.RpcError as error:
                await asyncio.sleep(self._delay_after(error))
            except asyncio.CancelledError as error:
                self._closed = True
                raise_if_closed(error)
                raise
            else:
                if message is grpc.aio.EOF:
                    self._end()
                    raise StopAsyncIteration
                return self._accept(message)  # type: ignore[arg-type]  # read() has no narrower type than object
            self._rpc = self._open_rpc(self._attempts.remaining_s())

    async def aclose(self) -> None:
        """Ends the call, if it is still running; the server stops working on it."""
        self._closed = True
        self._rpc.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def raise_if_closed(error: asyncio.CancelledError) -> None:
    """Tells a call that was ended by closing its stream or client from a task that was cancelled.

    gRPC raises the same `CancelledError` for both; a task that nobody cancelled must not look as if it were.

    Raises:
        CallCancelledError: The current task was not cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise CallCancelledError("the call was ended by its caller", grpc.StatusCode.CANCELLED) from error
