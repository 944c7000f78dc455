# Generated from async_streams.py by `make client`; change that file.
"""Streams of a blocking call: deltas of a text, samples, segments, steps of an image.

A stream that fails before its first message is retried like a unary call. A later failure is final: the caller already
has deltas.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import Message

from headway_client.channel import Channel, Rpc
from headway_client.errors import CallCancelledError, ProtocolError, StreamNotFinishedError
from headway_client.requests import Call, Point, SegmentPrompt, click
from headway_client.results import (
    Answer,
    GeneratedImage,
    ImageProgress,
    Mask,
    ModelReference,
    SpeechDelta,
    SpeechSegment,
    SynthesizedSpeech,
    TextDelta,
    TokenLogProbability,
    ToolCallDelta,
    read,
    read_timings,
)
from headway_client.retry import Attempts
from headway_client.waiting import Event

ResultT = TypeVar("ResultT")
PartT = TypeVar("PartT")


class _Stream(ABC, Generic[ResultT, PartT]):
    """Iterator over the parts; the answer is complete after the last.

    Leaving its `with` block early cancels the call.
    """

    def __init__(self, call: Call[Answer[ResultT] | None], attempts: Attempts, channel: Channel) -> None:
        """Starts the call on `channel`."""
        self._call = call
        self._attempts = attempts
        self._channel = channel
        self._num_parts = 0
        self._answer: Answer[ResultT] | None = None
        self._is_closed = False
        self._closing = Event()
        self._lock = threading.Lock()  # reopening against closing, which any thread may do
        self._rpc = self._open()

    @property
    def answer(self) -> Answer[ResultT]:
        """The whole result with model and timings, once the stream has ended.

        Raises:
            StreamNotFinishedError: The last message has not arrived.
        """
        if self._answer is None:
            raise StreamNotFinishedError("the answer arrives with the last message; read the stream to its end first")
        return self._answer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PartT:
        """Returns the next part.

        Raises:
            CallError: The call failed, or was closed while it waited for the next part.
            OSError: A file of the call cannot be read.
            ProtocolError: The stream ended without its result.
        """
        while not self._is_closed:
            try:
                message = self._rpc.read()
            except grpc.RpcError as error:
                self._open_again(error)
                continue
            except BaseException:  # the wait was interrupted; the rest of the call is lost
                self._is_closed = True
                raise
            if message is None:
                self._end()
                break
            self._num_parts += 1
            part = self._read(message)
            if part is not None:
                return part
        raise StopIteration

    @abstractmethod
    def _read(self, message: Any) -> PartT | None:
        """Reads the part of a message, if any, and the answer of the last one."""

    @property
    @abstractmethod
    def _progress(self) -> str:
        """Progress in words."""

    def _open(self) -> Rpc:
        return self._channel.stream(self._call, self._attempts.begin())

    def _open_again(self, error: grpc.RpcError) -> None:
        """Waits and reopens a call that failed before its first part; raises a final error."""
        failure = self._call.error(error)
        delay_s = None if self._num_parts or self._is_closed else self._attempts.delay_s(failure)
        if delay_s is None:
            self._is_closed = True
            raise failure from error
        self._closing.wait(delay_s)
        with self._lock:
            if self._is_closed:
                raise CallCancelledError("the stream was closed", grpc.StatusCode.CANCELLED)
            self._rpc = self._open()

    def _end(self) -> None:
        """Checks that an ended stream is complete."""
        self._is_closed = True
        self._attempts.note_success()
        if self._answer is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without its result")

    def close(self) -> None:
        """Ends the call if it is running; the server stops working on it."""
        with self._lock:
            self._is_closed = True
            self._rpc.cancel()
        self._closing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """State and progress."""
        state = "finished" if self._answer else "closed" if self._is_closed else "open"
        return f"<{type(self).__name__} {self._call.path} {state}, {self._progress}>"


class TextStream(_Stream[ResultT, TextDelta]):
    """Iterator over the deltas of a text. Leaving its `with` block early cancels the call.

    ```python
    with client.stream_generate_text("Once upon a time") as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(stream.answer.model)
    ```
    """

    _new_token_count = 0

    @property
    def _progress(self) -> str:
        return f"{self._new_token_count} tokens"

    def _read(self, message: Any) -> TextDelta:
        self._new_token_count = message.new_token_count
        self._answer = self._call.read(message)
        tokens = tuple(read(TokenLogProbability, token) for token in getattr(message, "tokens", ()))
        segments = tuple(read(SpeechSegment, segment) for segment in getattr(message, "segments", ()))
        reasoning = getattr(message, "reasoning_delta", "")
        calls = tuple(read(ToolCallDelta, delta) for delta in getattr(message, "tool_call_deltas", ()))
        return TextDelta(message.text_delta, message.new_token_count, tokens, segments, reasoning, calls)


class SpeechStream(_Stream[SynthesizedSpeech, SpeechDelta]):
    """Iterator over samples of a spoken text. Leaving its `with` block early cancels the call."""

    _num_bytes = 0

    @property
    def _progress(self) -> str:
        return f"{self._num_bytes} bytes of samples"

    def _read(self, message: Any) -> SpeechDelta:
        self._answer = self._call.read(message)
        self._num_bytes += len(message.pcm)
        return SpeechDelta(message.pcm, message.sampling_rate, message.new_token_count)


class ImageStream(_Stream[GeneratedImage, ImageProgress]):
    """Iterator over the steps of an image. Leaving its `with` block early cancels the call."""

    _progress_so_far = ImageProgress(0, 0, b"")

    @property
    def _progress(self) -> str:
        return f"{self._progress_so_far.completed_step_count} of {self._progress_so_far.step_count} steps"

    def _read(self, message: Any) -> ImageProgress:
        self._answer = self._call.read(message)
        self._progress_so_far = ImageProgress(message.completed_step_count, message.step_count, message.preview_png)
        return self._progress_so_far


class SegmentStream(_Stream[Mask, Mask]):
    """Iterator over the segments of an image. Leaving its `with` block early cancels the call."""

    _masks: tuple[Mask, ...] = ()

    @property
    def _progress(self) -> str:
        return f"{len(self._masks)} segments"

    def _read(self, message: Any) -> Mask | None:
        if message.HasField("mask"):
            self._masks += (read(Mask, message.mask),)
            return self._masks[-1]
        self._answer = Answer(self._masks, read(ModelReference, message.model), read_timings(message.timings))
        return None


class SegmentSession:
    """A segmentation session on one image, click by click. Leaving its `with` block ends it.

    The image is sent on entering the block.

    ```python
    with client.segment_interactively("photo.jpg") as session:
        first = session.add(points=[(120, 80)])
        better = session.add(outside_points=[(20, 30)])
    print(first[0].area, better[0].area)
    ```
    """

    def __init__(self, call: Call[Answer[Mask]], channel: Channel, timeout_s: float | None) -> None:
        """Prepares a session of at most `timeout_s` seconds on `channel`."""
        self._call = call
        self._rpc = channel.session(call, timeout_s)
        self._is_started = False

    def add(
        self,
        *,
        points: Sequence[Point] = (),
        outside_points: Sequence[Point] = (),
        box: tuple[float, float, float, float] | None = None,
        restart: bool = False,
    ) -> Answer[Mask]:
        """Adds points, or replaces the box; returns the masks of all prompts so far, the best first.

        Args:
            points: Points inside the segment.
            outside_points: Points outside the segment.
            box: Left, top, right and bottom around it.
            restart: True drops all earlier points and the box.

        Raises:
            CallError: The image cannot be read, or the call failed otherwise, which ends the session.
        """
        self._start()
        prompt = SegmentPrompt(points=points, outside_points=outside_points, box=box)
        return self._exchange(click(self._call.request, prompt, restart=restart))

    def _start(self) -> None:
        """Sends the image once and waits until the server has read it."""
        if not self._is_started:
            self._is_started = True
            self._exchange(self._call.request)

    def _exchange(self, request: Message) -> Answer[Mask]:
        try:
            self._rpc.write(request)
            message = self._rpc.read()
        except grpc.RpcError as error:
            self.close()
            raise self._call.error(error) from error
        if message is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without an answer")
        return self._call.read(message)

    def close(self) -> None:
        """Ends the session; the server frees the image."""
        self._rpc.cancel()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
