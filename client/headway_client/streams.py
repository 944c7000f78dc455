"""What arrives part by part, from a blocking or an asyncio call: deltas of a text, segments, steps to an image.

A stream that fails before its first message is retried as a unary call would be. A later failure is final, because
the deltas that were handed out cannot be taken back.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from headway_client.errors import CallCancelledError, ProtocolError, StreamNotFinishedError
from headway_client.requests import NO_CALL, Call, Place, SegmentPrompt, click
from headway_client.results import (
    Answer,
    DrawingProgress,
    DrawnImage,
    Mask,
    ModelReference,
    SpeechDelta,
    SpeechSegment,
    SynthesizedSpeech,
    TextDelta,
    TokenLogProbability,
    read,
    read_timings,
)
from headway_client.retry import Attempts

ResultT = TypeVar("ResultT")
PartT = TypeVar("PartT")
Later: TypeAlias = Call[Answer[ResultT] | None] | Callable[[], Call[Answer[ResultT] | None]]
"""A call, or what makes it and may read files."""


class _Stream(ABC, Generic[ResultT, PartT]):
    """What all kinds of stream share: parts that arrive one by one, and the answer, which is whole with the last."""

    def __init__(self, call: Call[Answer[ResultT] | None], attempts: Attempts) -> None:
        self._call = call
        self._attempts = attempts
        self._num_parts = 0
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

    def _accept(self, message: Any) -> PartT | None:
        """Reads a message; None if it holds no part."""
        self._num_parts += 1
        return self._read(message)

    @abstractmethod
    def _read(self, message: Any) -> PartT | None:
        """Takes a part from a message, and the answer from the last."""

    @property
    @abstractmethod
    def _progress(self) -> str:
        """How much has arrived, in words."""

    def _end(self) -> None:
        """Checks that a stream that ended without an error is complete."""
        self._closed = True
        self._attempts.note_success()
        if self._answer is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without its result")

    def _delay_after(self, error: grpc.RpcError) -> float:
        """Returns the seconds to wait before the call is opened again; raises the error if it is final."""
        failure = self._call.error(error)
        delay_s = None if self._num_parts or self._closed else self._attempts.delay_s(failure)
        if delay_s is None:
            self._closed = True
            raise failure from error
        return delay_s

    def __repr__(self) -> str:
        """State and progress."""
        state = "finished" if self._answer else "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._call.path} {state}, {self._progress}>"


class _BlockingStream(_Stream[ResultT, PartT]):
    """Iterator over the parts. Leaving its `with` block early cancels the call."""

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

    def __next__(self) -> PartT:
        """Returns the next part.

        Raises:
            CallError: The call failed, or was closed while it waited for the next part.
            ProtocolError: The stream ended without its result.
        """
        if self._closed:
            raise StopIteration
        while True:
            try:
                part = self._accept(next(self._rpc))
                if part is not None:
                    return part
                continue
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


class _AsyncStream(_Stream[ResultT, PartT]):
    """Asynchronous iterator over the parts. Leaving its `async with` block early cancels the call."""

    def __init__(self, call: Later[ResultT], attempts: Attempts, open_rpc: Callable[[Call[Any], float], Any]) -> None:
        """Starts the call; one that has to be made first starts when the first part is asked for.

        `open_rpc` takes the call and the seconds that it may last, and returns gRPC's stream of messages.
        """
        self._make = None if isinstance(call, Call) else call
        super().__init__(call if isinstance(call, Call) else NO_CALL, attempts)
        self._open_rpc = open_rpc
        self._rpc: Any = None if self._make is not None else open_rpc(self._call, attempts.remaining_s())
        self._closing = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PartT:
        """Returns the next part.

        Raises:
            CallError: The call failed, or was closed while it waited for the next part.
            ProtocolError: The stream ended without its result.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._make is not None:
            make, self._make = self._make, None
            self._call = await asyncio.to_thread(make)
            self._rpc = self._open_rpc(self._call, self._attempts.remaining_s())
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
                part = self._accept(message)
                if part is not None:
                    return part
                continue
            await self._pause(delay_s)
            self._rpc = self._open_rpc(self._call, self._attempts.remaining_s())

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
        if self._rpc is not None:
            self._rpc.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Text(_Stream[ResultT, TextDelta]):
    _new_token_count = 0

    @property
    def _progress(self) -> str:
        return f"{self._new_token_count} tokens"

    def _read(self, message: Any) -> TextDelta:
        self._new_token_count = message.new_token_count
        self._answer = self._call.read(message)
        tokens = tuple(read(TokenLogProbability, token) for token in getattr(message, "tokens", ()))
        segments = tuple(read(SpeechSegment, segment) for segment in getattr(message, "segments", ()))
        return TextDelta(message.text_delta, message.new_token_count, tokens, segments)


class _Segments(_Stream[Mask, Mask]):
    def __init__(self, call: Any, attempts: Attempts, *more: Any) -> None:  # of the other base
        super().__init__(call, attempts, *more)
        self._masks: list[Mask] = []

    @property
    def _progress(self) -> str:
        return f"{len(self._masks)} segments"

    def _read(self, message: Any) -> Mask | None:
        if message.HasField("mask"):
            self._masks.append(read(Mask, message.mask))
            return self._masks[-1]
        model = read(ModelReference, message.model)
        self._answer = Answer(tuple(self._masks), model, read_timings(message.timings))
        return None


class _Speech(_Stream[SynthesizedSpeech, SpeechDelta]):
    _num_bytes = 0

    @property
    def _progress(self) -> str:
        return f"{self._num_bytes} bytes of samples"

    def _read(self, message: Any) -> SpeechDelta:
        self._answer = self._call.read(message)
        self._num_bytes += len(message.pcm)
        return SpeechDelta(message.pcm, message.sampling_rate, message.new_token_count)


class _Drawing(_Stream[DrawnImage, DrawingProgress]):
    _progress_so_far = DrawingProgress(0, 0, b"")

    @property
    def _progress(self) -> str:
        return f"{self._progress_so_far.made_step_count} of {self._progress_so_far.step_count} steps"

    def _read(self, message: Any) -> DrawingProgress:
        self._answer = self._call.read(message)
        self._progress_so_far = DrawingProgress(message.made_step_count, message.step_count, message.preview_png)
        return self._progress_so_far


class TextStream(_Text[ResultT], _BlockingStream[ResultT, TextDelta]):
    """Iterator over the deltas of a text. Leaving its `with` block early cancels the call.

    ```python
    with client.stream_generate_text("Once upon a time") as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(stream.answer.model)
    ```
    """


class AsyncTextStream(_Text[ResultT], _AsyncStream[ResultT, TextDelta]):
    """Asynchronous iterator over the deltas of a text. Leaving its `async with` block early cancels the call."""


class SpeechStream(_Speech, _BlockingStream[SynthesizedSpeech, SpeechDelta]):
    """Iterator over the samples of a spoken text. Leaving its `with` block early cancels the call."""


class AsyncSpeechStream(_Speech, _AsyncStream[SynthesizedSpeech, SpeechDelta]):
    """Asynchronous iterator over samples of a spoken text. Leaving its `async with` block early cancels the call."""


class DrawingStream(_Drawing, _BlockingStream[DrawnImage, DrawingProgress]):
    """Iterator over the steps of an image. Leaving its `with` block early cancels the call."""


class AsyncDrawingStream(_Drawing, _AsyncStream[DrawnImage, DrawingProgress]):
    """Asynchronous iterator over the steps of an image. Leaving its `async with` block early cancels the call."""


class SegmentStream(_Segments, _BlockingStream[Mask, Mask]):
    """Iterator over the segments of an image. Leaving its `with` block early cancels the call."""


class AsyncSegmentStream(_Segments, _AsyncStream[Mask, Mask]):
    """Asynchronous iterator over the segments of an image. Leaving its `async with` block early cancels the call."""


class SegmentSession:
    """An image that is pointed at by one click after another. Leaving its `with` block ends it.

    ```python
    with client.segment_interactively("photo.jpg") as session:
        print(session.add(points=[(120, 80)])[0].area)
        print(session.add(outside_points=[(20, 30)])[0].area)
    ```
    """

    def __init__(self, call: Call[Answer[Mask]], open_rpc: Callable[[Iterator[Message]], Any]) -> None:
        """Sends the image and waits until it is read. `open_rpc` takes the requests and returns gRPC's stream.

        Raises:
            CallError: The image cannot be read, or the call failed otherwise.
        """
        self._call = call
        self._requests: SimpleQueue[Message | None] = SimpleQueue()
        self._rpc = open_rpc(iter(self._requests.get, None))
        self._exchange(call.request)

    def add(
        self,
        *,
        points: Sequence[Place] = (),
        outside_points: Sequence[Place] = (),
        box: tuple[float, float, float, float] | None = None,
        restart: bool = False,
    ) -> Answer[Mask]:
        """Adds points, and a box in place of an earlier one; returns the masks of all of them, the best first.

        Args:
            points: Places that the segment holds.
            outside_points: Places that it leaves out.
            box: Left, top, right and bottom around it.
            restart: True to forget first what was added before.

        Raises:
            CallError: The call failed, which ends the session.
        """
        prompt = SegmentPrompt(points=points, outside_points=outside_points, box=box)
        return self._exchange(click(self._call.request, prompt, restart=restart))

    def _exchange(self, request: Message) -> Answer[Mask]:
        self._requests.put(request)
        try:
            return self._call.read(next(self._rpc))
        except grpc.RpcError as error:
            self.close()
            raise self._call.error(error) from error
        except StopIteration:
            raise ProtocolError(f"{self._call.path}: the stream ended without an answer") from None

    def close(self) -> None:
        """Ends the session; the server lets go of the image."""
        self._requests.put(None)
        self._rpc.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncSegmentSession:
    """The methods of `SegmentSession`, awaited; the image is sent when its `async with` block is entered."""

    def __init__(self, make: Callable[[], Call[Answer[Mask]]], open_rpc: Callable[[Call[Answer[Mask]]], Any]) -> None:
        """Prepares a session. `make` may read the image's file, and `open_rpc` returns gRPC's stream of the call."""
        self._make = make
        self._open_rpc = open_rpc
        self._call: Call[Answer[Mask]] = NO_CALL
        self._rpc: Any = None

    async def add(
        self,
        *,
        points: Sequence[Place] = (),
        outside_points: Sequence[Place] = (),
        box: tuple[float, float, float, float] | None = None,
        restart: bool = False,
    ) -> Answer[Mask]:
        """Adds points, and a box in place of an earlier one, as `SegmentSession.add` does."""
        prompt = SegmentPrompt(points=points, outside_points=outside_points, box=box)
        return await self._exchange(click(self._call.request, prompt, restart=restart))

    async def _exchange(self, request: Message) -> Answer[Mask]:
        try:
            with suppress(asyncio.InvalidStateError):  # the call has ended, and reading says why
                await self._rpc.write(request)
            message = await self._rpc.read()
        except grpc.RpcError as error:
            raise self._call.error(error) from error
        except asyncio.CancelledError as error:
            raise_if_closed(error)
            raise
        if message is grpc.aio.EOF:
            raise ProtocolError(f"{self._call.path}: the stream ended without an answer")
        return self._call.read(message)

    async def aclose(self) -> None:
        """Ends the session; the server lets go of the image."""
        if self._rpc is not None:
            self._rpc.cancel()

    async def __aenter__(self) -> Self:
        self._call = await asyncio.to_thread(self._make)
        self._rpc = self._open_rpc(self._call)
        await self._exchange(self._call.request)
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
