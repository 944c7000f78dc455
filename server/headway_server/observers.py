"""What can be observed of a running server: calls, queues, batches, steps, sequences and models.

The server reports each event once, to one `Observer`. `NO_OBSERVER`, the default, does nothing, and no event is made
for it; metrics, traces and an access log are other observers (`monitoring/`), and `Observers` reports to several.
Methods are called on the thread where the event happens, some of them between two steps of an engine: they must be
quick, must not wait for a lock that others hold for long, and must not raise.

Times are seconds by `time.monotonic`. Events are not frozen, since making a frozen one takes twice as long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?"
)
"""W3C Trace Context, section 3.2; the groups are the trace's id and its flags."""
_SAMPLED: Final = 1
"""The flag of a trace that the caller records."""


class ModelId(NamedTuple):
    """Which model an event is about."""

    name: str
    version: str


WriteMetrics: TypeAlias = Callable[[Mapping[str, str]], tuple[Mapping[str, str], bytes]]
"""Answers a scrape: from the request's headers to headers and body, names in lower case. Thread-safe."""


class Rights(Protocol):
    """What the caller of a call may do (`serving/access.py`)."""

    @property
    def name(self) -> str:
        """Of the API key or the certificate; empty for all who have neither."""

    @property
    def counts_tokens(self) -> bool:
        """True if tokens are limited."""

    def check_model(self, task: str, model: str) -> None:
        """Raises ForbiddenError if the caller may not use a model."""

    def count_tokens(self, count: int) -> None:
        """Takes tokens from the caller's budget."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A call that is being answered."""

    call_id: int
    """Unique within the process."""
    method: str
    """Full name of the RPC or path of the route."""
    num_bytes: int = 0
    """Size of the request as it was received."""
    raw_metadata: Iterable[tuple[str, str | bytes]] = ()
    """What the caller sent beside the request, as the transport has it; keys in lower case."""
    started_at: float
    """When its request was there."""
    request_id: str = ""
    """By which the caller or its proxy knows the call; empty where it was given none."""
    model: ModelId | None = None
    """Which model it is for, once that is found."""
    span_trace_id: str = ""
    """Id of the trace that the server records it in; empty where it records none."""
    caller: str = ""
    """Who makes it: the name of the API key or of the certificate, else the peer."""
    connection: str = ""
    """Which connection it came by; empty where `caller` says so."""
    rights: Rights | None = None
    """What the caller may do; None: everything, where there is no access control."""
    num_truncated: int = 0
    """Texts that were shortened to what the model reads."""
    num_computed: int = 0
    """Inputs that have been computed for it; 0 for a call that looks, and for one that caches answer."""
    queue_s: float = 0.0
    """Longest wait of these in an engine's queue."""
    preprocessing_s: float = 0.0
    """Time for tokenizing them, decoding images and the like."""
    inference_s: float = 0.0
    """Time in which they were computed."""
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    """What is called on the event loop when the call has ended, however it ends."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the caller sent beside the request, without binary values and API keys."""
        return tuple(
            (key, value)
            for key, value in self.raw_metadata
            if isinstance(value, str) and key not in ("authorization", "x-api-key")
        )

    @property
    def parent_trace(self) -> tuple[str, bool] | None:
        """Id of the trace that its caller names, and True if the caller records it; None if it names none."""
        for key, value in self.raw_metadata:
            if key == "traceparent" and isinstance(value, str) and (match := _TRACEPARENT.fullmatch(value)):
                return match[1], bool(int(match[2], 16) & _SAMPLED)
        return None

    @property
    def trace_id(self) -> str:
        """Id of its trace, 32 hexadecimal digits: the server's own, or the caller's; empty where there is none."""
        if self.span_trace_id:
            return self.span_trace_id
        parent = self.parent_trace
        return "" if parent is None else parent[0]

    @property
    def ids(self) -> dict[str, str | int]:
        """What names it in a log line."""
        ids = {"request_id": self.request_id, "trace_id": self.trace_id}
        return {"call_id": self.call_id} | {key: value for key, value in ids.items() if value}

    def __repr__(self) -> str:
        return f"Call({self.method}, {self.ids})"


_current: ContextVar[Call | None] = ContextVar("current_call", default=None)


def current_call() -> Call | None:
    """Returns the call that the present task answers; None outside of every call."""
    return _current.get()


def note_truncated(count: int = 1) -> None:
    """Counts shortened texts of the call that the present task answers."""
    if (call := current_call()) is not None:
        call.num_truncated += count


def set_current_call(call: Call | None) -> None:
    """Makes `call` the one that the present task answers."""
    _current.set(call)


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEvent:
    """An input of a call that has left an engine's queue to be computed, or because nobody waits for it any more."""

    model: ModelId
    queue_s: float
    reason: Literal["started", "expired", "cancelled"]
    num_waiting: int
    """Inputs of the model that still wait."""


class BatchMember(NamedTuple):
    """A call that has items in a batch."""

    call: Call
    arrived_at: float
    """When its items entered the queue."""
    num_items: int


@dataclass(slots=True, kw_only=True, eq=False)
class BatchEvent:
    """A batch of a stateless model that was run."""

    model: ModelId
    num_items: int
    length: int
    """Of the longest item: tokens of a text, 1 for an image."""
    num_padded: int
    """Tokens of padding among `num_items x length`."""
    started_at: float
    run_s: float
    members: Callable[[], Sequence[BatchMember]] = tuple
    """Returns the calls that its items belong to, which takes longer than all else."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepEvent:
    """A run of a decoder, or of a denoiser, whose rows count as tokens."""

    model: ModelId
    kind: Literal["prefill", "decode", "verify", "encode", "denoise"]
    num_rows: int
    num_tokens: int
    """Tokens that were computed, of all rows."""
    num_padded: int = 0
    """Tokens of padding beside these, of an encoder's batch."""
    num_waiting: int
    run_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class TokensEvent:
    """Tokens that a step has produced for sequences without a search, one for each of them."""

    model: ModelId
    first_token_s: Sequence[float]
    """For those that got their first one: seconds since their call arrived."""
    gaps_s: Sequence[float]
    """For the others: seconds since their last one."""


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceEvent:
    """A sequence that has left an engine, finished or not."""

    model: ModelId
    call: Call | None
    arrived_at: float
    started_at: float
    """When it left the queue; 0 if it never did."""
    first_token_at: float
    """When its first token was there; 0 if there was none."""
    finished_at: float
    outcome: str
    """Its finish reason; or `expired`, `cancelled` or `failed`."""
    num_input_tokens: int
    """Of its prompt, or of its source."""
    num_cached_tokens: int
    """Those of its prompt that were not computed."""
    num_output_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class ModelEvent:
    """A model whose state has changed."""

    model: ModelId
    state: Literal["loading", "ready", "unloading", "unloaded", "failed"]
    seconds: float | None = None
    """How long loading took; for `ready`."""
    reason: str | None = None
    """Why it failed; for `failed`."""


class CacheUsage(NamedTuple):
    """How much of something is kept because it may be asked for again, and how often what was asked for was there."""

    name: str
    """What is kept, such as `label_vectors`."""
    num_bytes: int
    num_hits: int
    num_misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """How much of a model is in use at a moment. Numbers of slots and positions are 0 for a model without state."""

    num_waiting: int
    """Inputs that wait to be computed."""
    num_slots: int = 0
    num_used_slots: int = 0
    num_positions: int = 0
    """Tokens that the state of all slots has room for."""
    num_used_positions: int = 0
    caches: tuple[CacheUsage, ...] = ()

    def __add__(self, other: ModelUsage) -> ModelUsage:
        return ModelUsage(
            num_waiting=self.num_waiting + other.num_waiting,
            num_slots=self.num_slots + other.num_slots,
            num_used_slots=self.num_used_slots + other.num_used_slots,
            num_positions=self.num_positions + other.num_positions,
            num_used_positions=self.num_used_positions + other.num_used_positions,
            caches=self.caches + other.caches,
        )


class Observer:
    """Observes a server. Every method does nothing here: override those of interest."""

    def call_started(self, call: Call) -> None:
        """A call has arrived. It may still be refused."""

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
        """A call was answered (`error` is None), refused, failed, or cancelled (`asyncio.CancelledError`)."""

    def left_queue(self, event: QueueEvent) -> None:
        """An input began to be computed, or was dropped."""

    def batch_finished(self, event: BatchEvent) -> None:
        """A batch was run. Its calls have not been answered yet."""

    def step_finished(self, event: StepEvent) -> None:
        """A decoder was run."""

    def tokens_produced(self, event: TokensEvent) -> None:
        """A step has produced tokens."""

    def sequence_finished(self, event: SequenceEvent) -> None:
        """A sequence has left an engine. Its call has not been answered yet."""

    def model_changed(self, event: ModelEvent) -> None:
        """A model is being loaded or unloaded, is ready or gone, or could not be loaded."""


NO_OBSERVER = Observer()


class Observers(Observer):
    """Reports to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def call_started(self, call: Call) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.call_started(call)

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
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

    def tokens_produced(self, event: TokensEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.tokens_produced(event)

    def sequence_finished(self, event: SequenceEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.sequence_finished(event)

    def model_changed(self, event: ModelEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.model_changed(event)

    def __repr__(self) -> str:
        return f"Observers({', '.join(map(repr, self._observers))})"


def joined(observers: Sequence[Observer]) -> Observer:
    """Returns one observer that reports to all of these; `NO_OBSERVER` if none of them does anything."""
    observers = [observer for observer in observers if observer is not NO_OBSERVER]
    if not observers:
        return NO_OBSERVER
    return observers[0] if len(observers) == 1 else Observers(observers)
