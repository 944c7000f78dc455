# Generated from async_streams.py by `make client`; change that file.
"""What a blocking call returns part by part: deltas of a text, samples, segments, steps to an image.

A stream that fails before its first message is retried as a unary call would be. A later failure is final, because
the deltas that were handed out cannot be taken back.
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
from headway_client.requests import Call, Place, SegmentPrompt, click
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
    """Iterator over the parts, with the answer, which is whole with the last.

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
        self._lock = threading.Lock()  # between opening the call again and closing, which any thread may do
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
            except BaseException:  # the wait was interrupted, and what comes of the call is lost
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
        """Takes a part from a message, if it holds one, and the answer from the last."""

    @property
    @abstractmethod
    def _progress(self) -> str:
        """How much has arrived, in words."""

    def _open(self) -> Rpc:
        return self._channel.stream(self._call, self._attempts.begin())

    def _open_again(self, error: grpc.RpcError) -> None:
        """Waits, and opens a call again that failed before its first part; raises the error if it is final."""
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
        """Checks that a stream that ended without an error is complete."""
        self._is_closed = True
        self._attempts.note_success()
        if self._answer is None:
            raise ProtocolError(f"{self._call.path}: the stream ended without its result")

    def close(self) -> None:
        """Ends the call if it is still running, so that the server stops working on it."""
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
    """An image that is pointed at by one click after another. Leaving its `with` block ends it.

    The image is sent when the block is entered.

    ```python
    with client.segment_interactively("photo.jpg") as session:
        first = session.add(points=[(120, 80)])
        better = session.add(outside_points=[(20, 30)])
    print(first[0].area, better[0].area)
    ```
    """

    def __init__(self, call: Call[Answer[Mask]], channel: Channel, timeout_s: float | None) -> None:
        """Prepares a session on `channel`, which may last `timeout_s` seconds."""
        self._call = call
        self._rpc = channel.session(call, timeout_s)
        self._is_started = False

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
            CallError: The image cannot be read, or the call failed otherwise, which ends the session.
        """
        self._start()
        prompt = SegmentPrompt(points=points, outside_points=outside_points, box=box)
        return self._exchange(click(self._call.request, prompt, restart=restart))

    def _start(self) -> None:
        """Sends the image, unless it was sent, and waits until it is read."""
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
        """Ends the session; the server lets go of the image."""
        self._rpc.cancel()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
