"""Text that arrives delta by delta, from a blocking or an asyncio call.

A stream that fails before its first message is retried as a unary call would be. A later failure is final, because
the deltas that were handed out cannot be taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from headway_client.errors import CallCancelledError, ProtocolError, StreamNotFinishedError, from_rpc_error
from headway_client.requests import Call
from headway_client.results import Answer, TextDelta, TokenLogProbability, read
from headway_client.retry import Attempts

ResultT = TypeVar("ResultT")


class _Stream(Generic[ResultT]):
    """What both kinds of stream share."""

    def __init__(self, call: Call[Answer[ResultT] | None], attempts: Attempts) -> None:
        self._call = call
        self._attempts = attempts
        self._has_begun = False
        self._new_token_count = 0
        self._answer: Answer[ResultT] | None = None
        self._closed = False

    @property
    def answer(self) -> Answer[ResultT]:
        """The whole result with model and timings, once the stream has ended.

        Raises:
            StreamNotFinishedError: The last message has not arrived.
        """
        if self._answer is None:
            raise StreamNotFinishedError("the answer arrives with the last message; read the stream to its end first")
        return self._answer

    def _accept(self, message: Any) -> TextDelta:
        self._has_begun = True
        self._new_token_count = message.new_token_count
        self._answer = self._call.read(message)
        tokens = tuple(read(TokenLogProbability, token) for token in getattr(message, "tokens", ()))
        return TextDelta(message.text_delta, message.new_token_count, tokens)

    def _end(self) -> None:
        """Checks that a stream that ended without an error is complete."""
        self._closed = True
        self._attempts.note_success()
        if self._answer is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without its result")

    def _delay_after(self, error: grpc.RpcError) -> float:
        """Returns the seconds to wait before the call is opened again; raises the error if it is final."""
        failure = from_rpc_error(error)
        delay_s = None if self._has_begun or self._closed else self._attempts.delay_s(failure)
        if delay_s is None:
            self._closed = True
            raise failure from error
        return delay_s

    def __repr__(self) -> str:
        """State and progress."""
        state = "finished" if self._answer else "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._call.path} {state}, {self._new_token_count} tokens>"


class TextStream(_Stream[ResultT]):
    """Iterator over the deltas of a text. Leaving its `with` block early cancels the call.

    ```python
    with client.stream_generate_text("Once upon a time") as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(stream.answer.model)
    ```
    """

    def __init__(
        self, call: Call[Answer[ResultT] | None], attempts: Attempts, open_rpc: Callable[[float], Any]
    ) -> None:
        """Starts the call. `open_rpc` takes the seconds that it may last and returns gRPC's stream of messages."""
        super().__init__(call, attempts)
        self._open_rpc = open_rpc
        self._rpc = open_rpc(attempts.remaining_s())
        self._closing = threading.Event()
        self._lock = threading.Lock()  # between opening the call again and closing

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TextDelta:
        """Returns the next delta.

        Raises:
            CallError: The call failed, or was closed while it waited for the next delta.
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
                delay_s = self._delay_after(error)
            self._closing.wait(delay_s)
            with self._lock:
                if self._closed:
                    raise CallCancelledError("the stream was closed", grpc.StatusCode.CANCELLED)
                self._rpc = self._open_rpc(self._attempts.remaining_s())

    def close(self) -> None:
        """Ends the call if it is still running, so that the server stops working on it. Any thread may call this."""
        with self._lock:
            self._closed = True
            self._rpc.cancel()
        self._closing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncTextStream(_Stream[ResultT]):
    """Asynchronous iterator over the deltas of a text. Leaving its `async with` block early cancels the call."""

    def __init__(
        self, call: Call[Answer[ResultT] | None], attempts: Attempts, open_rpc: Callable[[float], Any]
    ) -> None:
        """Starts the call. `open_rpc` takes the seconds that it may last and returns gRPC's stream of messages."""
        super().__init__(call, attempts)
        self._open_rpc = open_rpc
        self._rpc = open_rpc(attempts.remaining_s())
        self._closing = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        """Returns the next delta.

        Raises:
            CallError: The call failed, or was closed while it waited for the next delta.
            ProtocolError: The stream ended without its result.
        """
        if self._closed:
            raise StopAsyncIteration
        while True:
            try:
                message = await self._rpc.read()
            except grpc.RpcError as error:
                delay_s = self._delay_after(error)
            except asyncio.CancelledError as error:
                self._closed = True
                raise_if_closed(error)
                raise
            else:
                if message is grpc.aio.EOF:
                    self._end()
                    raise StopAsyncIteration
                return self._accept(message)
            await self._pause(delay_s)
            self._rpc = self._open_rpc(self._attempts.remaining_s())

    async def _pause(self, delay_s: float) -> None:
        """Waits before the next attempt.

        Raises:
            CallCancelledError: The stream was closed meanwhile.
        """
        try:
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        except TimeoutError:
            return
        raise CallCancelledError("the stream was closed", grpc.StatusCode.CANCELLED)

    async def aclose(self) -> None:
        """Ends the call if it is still running, so that the server stops working on it."""
        self._closed = True
        self._closing.set()
        self._rpc.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def raise_if_closed(error: asyncio.CancelledError) -> None:
    """Raises an error of our own for a call that was ended by closing its stream or client.

    gRPC raises the same `CancelledError` for that as for a cancelled task, and a task that nobody cancelled must not
    look cancelled.

    Raises:
        CallCancelledError: The current task was not cancelled.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise CallCancelledError("the call was ended by its caller", grpc.StatusCode.CANCELLED) from error
