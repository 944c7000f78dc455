"""What generation and translation have in common as served models: tokenizer, engine, admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Elements
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from headway_server.batching import CallTimings
from headway_server.batching.admission import Admission
from headway_server.bundles import Bundle, Precision, Variant
from headway_server.engine.engine import Engine
from headway_server.engine.interfaces import Decoder, Encoder
from headway_server.engine.memory_plan import format_size, plan_memory
from headway_server.engine.request import DecodingLimits
from headway_server.engine.runner import DecoderRunner, slot_sizes
from headway_server.engine.sequence import SequenceResult
from headway_server.engine.settings import EngineSettings
from headway_server.engine.speculation import DraftVerifier
from headway_server.engine.verifier import can_verify
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Device, Runtime, available_bytes

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded(Generic[_T]):
    """The answer to a call: one result an input, in order."""

    results: list[_T]
    timings: CallTimings


class DecodingModel:
    """What generation and translation have in common."""

    _noun = "texts"
    _field = "texts"

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision,
        device: Device,
        tokenizer: TextTokenizer,
        decoder: Decoder,
        encoder: Encoder | None = None,
        verifier: DraftVerifier | None = None,
        settings: EngineSettings,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts.

        Raises:
            BundleError: The tokenizer, a special token or a default does not fit the model.
        """
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None, "the manifest's validator demands it"
        assert manifest.special_tokens is not None, "the manifest's validator demands it"
        _check_fits(bundle, tokenizer.largest_id, decoder.vocab_size)
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self.limits = DecodingLimits(
            max_input_tokens=manifest.limits.max_input_tokens,
            max_total_tokens=decoder.max_length,
            vocab_size=decoder.vocab_size,
        )
        self._tokenizer = tokenizer
        self._eos_id = manifest.special_tokens.eos
        self._capacity = decoder.num_slots + settings.max_waiting
        self._admission = Admission(limit=self._capacity, noun=self._noun, owner=manifest.name)
        self._engine = Engine(
            decoder,
            encoder=encoder,
            max_encoder_tokens=settings.max_encoder_tokens,
            stream_interval_ms=settings.stream_interval_ms,
            verifier=verifier,
            name=f"engine-{manifest.name}",
        )

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._engine!r})"

    @property
    def is_alive(self) -> bool:
        """Whether calls are answered: from `start` to `close`, unless the engine has stopped by itself."""
        return self._engine.is_alive

    def start(self) -> None:
        """Starts the engine; called with the event loop running."""
        self._engine.start()

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, for what was taken."""
        await self._admission.drain(timeout_s)

    def close(self) -> None:
        """Stops the engine; what still runs or waits fails."""
        self._engine.close()

    def _check_runs(self, run_once: Callable[[], object]) -> None:
        """Runs the graphs once, so that the first call does not pay for it and a bundle that cannot run is known now.

        Raises:
            BundleError: They do not run.
        """
        try:
            run_once()
        except Exception as error:  # onnxruntime's own kinds, or a KeyError where there are other tensors
            raise BundleError(f"{self.bundle.path}: does not run ({error}); export the model again") from error

    @contextmanager
    def _admit(self, count: int) -> Iterator[None]:
        """Holds a call's permit. A call that could never be admitted is told so, not that it should try again."""
        if count > self._capacity:
            raise InvalidInputError(
                self._field,
                f"has {count} elements; {self.bundle.manifest.name} takes at most {self._capacity} at once; "
                "send them in several calls",
            )
        with self._admission.admit(count):
            yield


def _check_fits(bundle: Bundle, largest_id: int, vocab_size: int) -> None:
    """Checks that every id a call may bring to the model is one of its own.

    Raises:
        BundleError: One is not; or more tokens are to be sampled among than there are.
    """
    holds = f"the model has {vocab_size} tokens"
    if largest_id >= vocab_size:
        raise BundleError(
            f"{bundle.path}: the tokenizer's largest id is {largest_id}, {holds}; "
            "export it again with its own tokenizer"
        )
    special_tokens = bundle.manifest.special_tokens
    assert special_tokens is not None, "the manifest's validator demands it"
    for name, token_id in (("bos", special_tokens.bos), ("eos", special_tokens.eos)):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise BundleError(f"{bundle.path}: special_tokens.{name} is {token_id}, {holds}; export the model again")
    defaults = bundle.manifest.sampling_defaults
    if defaults is not None and defaults.top_k > vocab_size:
        raise BundleError(
            f"{bundle.path}: sampling_defaults.top_k is {defaults.top_k}, {holds}; export the model again"
        )


def open_decoder(runtime: Runtime, bundle: Bundle, variant: Variant, settings: EngineSettings) -> DecoderRunner:
    """Opens a decoder with as many slots as were asked for, or as memory holds, and logs the arithmetic.

    Raises:
        BundleError: The graph is not what the manifest says.
        MemoryUnavailableError: What was asked for does not fit.
    """
    manifest = bundle.manifest
    owner = f"{manifest.name}/{manifest.version}"
    sessions = 2 if settings.speculation != "off" and can_verify(variant) else 1
    weights = sessions * sum(  # with external data, which lies in files beside the graph's
        file.size_bytes
        for path, file in manifest.files.items()
        if any(path.startswith(graph.file) for graph in variant.graphs.values())
    )
    available = available_bytes(runtime.device)
    plan = plan_memory(
        settings,
        slot_sizes(manifest, variant),
        available=None if available is None else max(0, available - weights),
        owner=owner,
    )
    held = format_size(weights)
    if sessions > 1:  # the second one verifies drafts
        held = f"{sessions} x {format_size(weights // sessions)} = {held}"
    _log.info("memory", model=owner, weights=held, state=str(plan))
    return DecoderRunner(runtime, bundle, variant, num_slots=plan.num_slots, num_prefix_slots=plan.num_prefix_slots)


def call_timings(results: Elements[SequenceResult], preprocessing_s: float) -> CallTimings:
    """Tells where the time of a call went."""
    return CallTimings(
        queue_s=max(result.started_at - result.arrived_at for result in results),
        preprocessing_s=preprocessing_s,
        inference_s=max(result.finished_at for result in results) - min(result.started_at for result in results),
    )
