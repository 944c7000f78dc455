"""What can be observed of a running server: calls, queues, batches, steps and models.

The server reports each event once, to one `Observer`. `NO_OBSERVER`, the default, does nothing; metrics, traces and an
access log are other observers, and `Observers` reports to several of them. Methods are called on the thread where the
event happens, some of them between two steps of an engine: they must be quick, must not wait for a lock that others
hold for long, and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelId:
    """Which model an event is about."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEvent:
    """A call that has begun or ended."""

    call_id: int
    """Unique within the process; both events of a call have the same."""
    method: str
    """Full name of the RPC or path of the route."""
    metadata: tuple[tuple[str, str], ...]
    """What the caller sent beside the request, without binary values; keys in lower case."""
    started_at: float
    """By `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEvent:
    """An input of a call that has left an engine's queue to be computed, or because nobody waits for it any more."""

    model: ModelId
    queue_s: float
    reason: Literal["started", "expired", "cancelled"]
    num_waiting: int
    """Inputs of the model that still wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvent:
    """A batch of a stateless model that was run."""

    model: ModelId
    num_items: int
    length: int
    """Of the longest item: tokens of a text, 1 for an image."""
    num_padded: int
    """Tokens of padding among `num_items x length`."""
    run_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A run of a decoder."""

    model: ModelId
    kind: Literal["prefill", "decode", "verify", "encode"]
    num_rows: int
    num_tokens: int
    """Tokens that were computed, of all rows."""
    num_waiting: int
    run_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvent:
    """A model whose state has changed."""

    model: ModelId
    state: Literal["loading", "ready", "unloading", "unloaded", "failed"]
    seconds: float | None = None
    """How long loading took; for `ready`."""
    reason: str | None = None
    """Why it failed; for `failed`."""


class Observer:
    """Observes a server. Every method does nothing here: override those of interest."""

    def call_started(self, call: CallEvent) -> None:
        """A call has arrived. It may still be refused."""

    def call_finished(self, call: CallEvent, *, error: BaseException | None, duration_s: float) -> None:
        """A call was answered (`error` is None), refused, failed, or cancelled (`asyncio.CancelledError`)."""

    def left_queue(self, event: QueueEvent) -> None:
        """An input began to be computed, or was dropped."""

    def batch_finished(self, event: BatchEvent) -> None:
        """A batch was run."""

    def step_finished(self, event: StepEvent) -> None:
        """A decoder was run."""

    def model_changed(self, event: ModelEvent) -> None:
        """A model is being loaded or unloaded, is ready or gone, or could not be loaded."""


NO_OBSERVER = Observer()


class Observers(Observer):
    """Reports to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def call_started(self, call: CallEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.call_started(call)

    def call_finished(self, call: CallEvent, *, error: BaseException | None, duration_s: float) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.call_finished(call, error=error, duration_s=duration_s)

    def left_queue(self, event: QueueEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.left_queue(event)

    def batch_finished(self, event: BatchEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.batch_finished(event)

    def step_finished(self, event: StepEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.step_finished(event)

    def model_changed(self, event: ModelEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.model_changed(event)

    def __repr__(self) -> str:
        return f"Observers({', '.join(map(repr, self._observers))})"
