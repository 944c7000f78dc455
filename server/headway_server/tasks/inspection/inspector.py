"""Runs the graph of a model's attention weights, besides the model itself.

The graph is opened by the first call. Its threads have a lower priority than those of other calls. The bytes of
weights, computed or waiting to be sent, are bounded per call and in total.

T is the number of tokens of a text.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.bundles import Bundle, Graph, Precision
from headway_server.errors import BundleError, DrainingError, InvalidInputError, ModelRunError, NoAttentionError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.preprocessing.pool import text_pool
from headway_server.runtime import Runtime, own_niceness, run_nicely
from headway_server.serving.answers import CallTimings
from headway_server.serving.permits import Admission
from headway_server.tasks.inspection.maps import AttentionPlan, AttentionRequest, Maps, num_bytes_of
from headway_server.tasks.job import Job

_NICENESS: Final = 10
"""Niceness of the threads: about a tenth of a contended core. Linux only."""
_MAX_WAITING: Final = 64
"""Maximum admitted and unanswered inspections of a model."""
_MIB: Final = 2**20

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedToken:
    """A token with its characters: `start` to `end`, `end` excluded, in Unicode code points."""

    token_id: int
    text: str
    start: int
    end: int
    of_pair: bool = False
    """True in the second text of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedText:
    """Tokens of one text with their attention maps."""

    tokens: Sequence[InspectedToken]
    maps: Maps
    truncated: bool
    timings: CallTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTranslation(InspectedText):
    """Tokens of one source and of its translation, with their attention maps."""

    target_tokens: Sequence[InspectedToken]
    """Tokens of the translation, without the decoder's start token."""
    translation: str


class Inspector:
    """Runner of one model's attention graph. For the event loop alone, except `close`."""

    def __init__(
        self, bundle: Bundle, precision: Precision, runtime: Runtime, *, max_mib: int, observer: Observer = NO_OBSERVER
    ) -> None:
        """Takes the model's parts; the first call opens the graph.

        Args:
            bundle: Bundle of the model.
            precision: Precision of the variant in use.
            runtime: Runtime of the graph.
            max_mib: Maximum MiB of weights, per call and in total.
            observer: See `Batcher`.
        """
        manifest = bundle.manifest
        self._bundle = bundle
        self._runtime = runtime
        self._graph: Graph | None = manifest.variants[precision].graphs.get("attention")
        self._max_bytes = max_mib * _MIB
        self._observer = observer
        self._name = f"{manifest.name}/{manifest.version}"
        self._niceness = max(_NICENESS, own_niceness())  # at least that of the loading thread
        self._waiting = Admission(limit=_MAX_WAITING, noun="inspections", owner=self._name)
        self._memory = Admission(limit=None, noun="attention weights", owner=self._name, max_bytes=self._max_bytes)
        self._opening = asyncio.Lock()
        self._closing = threading.Lock()  # guards the two below
        self._batcher: Batcher | None = None
        self._is_closed = False

    def begin(self, request: AttentionRequest, deadline: float | None) -> Inspection:
        """Returns the job of one call.

        Args:
            request: Layers, heads and summary of the requested weights.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            InvalidInputError: A layer or head does not exist.
            NoAttentionError: The bundle has no attention graph.
        """
        plan = AttentionPlan(request, self._known_graph())
        job = Inspection(self, self._waiting, self._memory, count=1, work=1.0, num_bytes=0, deadline=deadline)
        job.plan = plan
        return job

    def close(self) -> bool:
        """Ends the threads; waiting calls fail. Thread-safe. Returns True if the threads have ended."""
        with self._closing:
            self._is_closed = True
            batcher = self._batcher
        return batcher is None or batcher.close()

    def _known_graph(self) -> Graph:
        if self._graph is None:
            raise NoAttentionError(
                f"{self._name} cannot show what it attends to: its bundle has no graph for it; export it again with "
                "--attention"
            )
        return self._graph

    def check_size(self, item: Tensors, plan: AttentionPlan, field: str) -> int:
        """Returns the bytes of the graph's weights for an input.

        Raises:
            InvalidInputError: The bytes exceed the limit.
        """
        axes = {
            axis: size
            for spec in self._known_graph().inputs
            for axis, size in zip(spec.shape[1:], item[spec.name].shape, strict=True)
            if isinstance(axis, str)
        }
        sizes = plan.sizes(axes)
        if (num_bytes := num_bytes_of(sizes)) > self._max_bytes:
            products = " and ".join(
                f"{layers} layers x {heads} heads x {rows} x {columns} tokens" for layers, heads, rows, columns in sizes
            )
            raise InvalidInputError(
                field,
                f"needs {num_bytes / _MIB:.1f} MiB of attention weights ({products} x 4 bytes), the limit is "
                f"{self._max_bytes // _MIB} MiB; shorten it, ask for fewer layers, or have the server's operator raise "
                "max_attention_mib",
            )
        return num_bytes

    async def open(self) -> Batcher:
        """Opens the graph once.

        Raises:
            DrainingError: The model is being closed.
            ModelRunError: The graph cannot be opened.
        """
        async with self._opening:
            if self._batcher is None:
                opened = await asyncio.to_thread(run_nicely, self._niceness, self._make_batcher)
                with self._closing:
                    if self._is_closed:
                        raise DrainingError(f"{self._name} is being unloaded, or the server is shutting down")
                    opened.start()
                    self._batcher = opened
            return self._batcher

    def _make_batcher(self) -> Batcher:
        """Opens the graph on a thread; the session's and the batcher's threads inherit its niceness."""
        manifest = self._bundle.manifest
        try:
            session = self._runtime.open(self._bundle, self._known_graph(), in_lanes=False)
            graph = BatchGraph(session)
        except BundleError as error:
            _log.error("the graph of the attention weights cannot be opened", model=self._name, reason=str(error))
            raise ModelRunError(str(error)) from error
        _log.info("the graph of the attention weights is open", model=self._name)
        return Batcher(
            graph,
            budget=1,
            model=ModelId(name=manifest.name, version=manifest.version),
            observer=self._observer,
        )

    def __repr__(self) -> str:
        state = "no graph" if self._graph is None else "open" if self._batcher is not None else "not open"
        return f"Inspector({self._name}, {state}, {self._memory!r})"


class Inspection(Job["Inspector"]):
    """Call for attention weights."""

    plan: AttentionPlan
    """Requested weights."""

    async def read(self, item: Tensors, *, field: str, num_tokens: int) -> Maps:
        """Computes the maps of one input.

        Args:
            item: The graph's inputs, without the batch axis.
            field: Name of the input in the request, for error messages.
            num_tokens: Tokens of the input, for the caller's budget.

        Raises:
            RequestError: The weights exceed the limit, other calls' weights leave no memory, the deadline passed, the
            server is draining.
            ModelRunError: The graph does not run.
        """
        self.reserve(self._engine.check_size(item, self.plan, field) + sum(tensor.nbytes for tensor in item.values()))
        batched = await self.batch(
            await self._engine.open(),
            [item],
            outputs=self.plan.outputs,
            num_bytes=0,
            num_read=num_tokens,
            read=lambda row, _: self.plan.read(row),
        )
        self.note(batched.runs)
        return batched.results[0]


async def inspected_tokens(
    tokenizer: TextTokenizer, encoded: EncodedText, *, prefix: Sequence[int] = ()
) -> list[InspectedToken]:
    """Returns the tokens of a text with their names, off the event loop.

    Args:
        tokenizer: Tokenizer of the text.
        encoded: Its T tokens, with their characters.
        prefix: Tokens before it, which have no characters.
    """
    types = encoded.type_ids if encoded.type_ids is not None else np.zeros_like(encoded.input_ids)
    spans = [(0, 0)] * len(prefix) + list(encoded.offsets)
    tokens = [*prefix, *encoded.input_ids.tolist()]
    of_pair = [False] * len(prefix) + types.astype(bool).tolist()

    def name() -> list[InspectedToken]:
        return [
            InspectedToken(
                token_id=token,
                # The space before a special token is not part of the text.
                text=tokenizer.token_text(token) if start < end else tokenizer.token_text(token).strip(),
                start=start,
                end=end,
                of_pair=is_second,
            )
            for token, (start, end), is_second in zip(tokens, spans, of_pair, strict=True)
        ]

    return await asyncio.get_running_loop().run_in_executor(text_pool(), name)
