"""What all served models that decode have in common: tokenizer, engines, admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Elements
from contextlib import contextmanager

import structlog

from headway_server.bundles import Bundle, Precision, Task, Variant
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.lanes import FEWEST_SLOTS, Lanes
from headway_server.decoding.interfaces import Decoder, DraftVerifier, Encoder
from headway_server.decoding.runner.decoder import DecoderRunner, slot_sizes
from headway_server.decoding.runner.memory_plan import format_size, plan_memory
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import BundleError, InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Cores, Device, Runtime, available_bytes
from headway_server.serving.permits import Admission
from headway_server.settings import DEFAULT_MAX_TEXT_KIB
from headway_server.tasks.parameters import DecodingLimits

_log = structlog.get_logger(__name__)


class DecodingModel:
    """A model that decodes; generation and translation add what a call means."""

    _noun = "texts"
    _field = "texts"

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision,
        device: Device,
        tokenizer: TextTokenizer,
        decoders: Elements[Decoder],
        encoder: Encoder | None = None,
        verifier: DraftVerifier | None = None,
        cores: Cores | None = None,
        settings: EngineSettings,
        max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts.

        Args:
            bundle: The bundle.
            precision: Of the variant that runs.
            device: Where it runs.
            tokenizer: Its tokenizer.
            decoders: Runners of its decoder, one for each lane.
            encoder: Of an encoder-decoder, for all lanes.
            verifier: Runs drafts in the slots of the only lane.
            cores: What several lanes share.
            settings: Of its engines.
            max_text_bytes: Largest text, in bytes of UTF-8.
            observer: Is told of every run and of inputs that leave the queue.

        Raises:
            BundleError: The tokenizer, a special token or a default does not fit the model.
        """
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None, "the manifest's validator demands it"
        assert manifest.special_tokens is not None, "the manifest's validator demands it"
        decoder = decoders[0]
        _check_fits(bundle, tokenizer.largest_id, decoder.vocab_size)
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self.limits = DecodingLimits(
            max_input_tokens=manifest.limits.max_input_tokens,
            max_total_tokens=decoder.max_length,
            vocab_size=decoder.vocab_size,
        )
        self._max_text_bytes = max_text_bytes
        self._tokenizer = tokenizer
        self._cores = cores
        self._num_lanes = len(decoders)
        assert verifier is None or self._num_lanes == 1, "drafts are verified in the slots of one lane"
        self._eos_id = manifest.special_tokens.eos
        self._capacity = sum(decoder.num_slots for decoder in decoders) + settings.max_waiting
        self._admission = Admission(limit=self._capacity, noun=self._noun, owner=manifest.name)
        self._lanes = Lanes(
            [
                Engine(
                    decoder,
                    encoder=encoder,
                    max_encoder_tokens=settings.max_encoder_tokens,
                    stream_interval_ms=settings.stream_interval_ms,
                    verifier=verifier,
                    busy_lanes=None if cores is None else cores.busy_lanes(),
                    name=f"engine-{manifest.name}-{lane}",
                    observer=observer,
                    model=ModelId(name=manifest.name, version=manifest.version),
                )
                for lane, decoder in enumerate(decoders)
            ]
        )

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._lanes!r})"

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless an engine has stopped by itself."""
        return self._lanes.is_alive

    def stalled_s(self) -> float:
        """Returns for how many seconds the present step of an engine has been running; 0.0 if there is none."""
        return self._lanes.stalled_s()

    def start(self) -> None:
        """Starts the engines; called with the event loop running."""
        self._lanes.start()

    def close(self) -> bool:
        """Stops the engines; what still runs or waits fails. Returns False if a thread hangs and was left behind."""
        return self._lanes.close()

    def _check_runs(self, run_once: Callable[[], object]) -> None:
        """Runs the graphs once, and once more on one core if there are several lanes.

        So a bundle that cannot run is found now, and the first call does not pay for the first run.

        Raises:
            BundleError: They do not run.
        """
        try:
            run_once()
            if self._cores is not None and self._num_lanes > 1:
                with self._cores.all_busy():
                    run_once()
        except Exception as error:  # onnxruntime's own kinds, or a KeyError where there are other tensors
            raise BundleError(f"{self.bundle.path}: does not run ({error}); export the model again") from error

    @contextmanager
    def _admit(self, count: int) -> Iterator[None]:
        """Holds a call's permit. A call that could never be admitted is refused as invalid, not as overloaded."""
        if count > self._capacity:
            raise InvalidInputError(
                self._field,
                f"has {count} elements; {self.bundle.manifest.name} takes at most {self._capacity} at once; "
                "send them in several calls",
            )
        with self._admission.admit(count):
            yield


def _check_fits(bundle: Bundle, largest_id: int, vocab_size: int) -> None:
    """Checks that every token id that a call may bring is one of the model's.

    Raises:
        BundleError: One is not, or the default top-k is more than there are tokens.
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


def open_decoders(
    runtime: Runtime, bundle: Bundle, variant: Variant, settings: EngineSettings, *, sessions: int = 1
) -> list[DecoderRunner]:
    """Opens a decoder with as many slots as were asked for, or as memory holds, and logs the arithmetic.

    The slots of a translation model are shared out among the runtime's lanes, if each gets enough of them. A generation
    model has one lane: it spends its time reading prompts, which two cores do as fast together as apart, and together
    the first token comes sooner (docs/lanes.md).

    Args:
        runtime: Where it runs.
        bundle: The bundle.
        variant: One of its variants.
        settings: What was asked for.
        sessions: How many times the weights are held, apart from lanes.

    Raises:
        BundleError: The graph is not what the manifest says.
        MemoryUnavailableError: What was asked for does not fit.
    """
    manifest = bundle.manifest
    owner = f"{manifest.name}/{manifest.version}"
    num_lanes = runtime.cores.num_lanes if manifest.task is Task.TRANSLATION else 1
    if num_lanes > 1:
        sessions *= 2
    weights = sessions * sum(  # with external data, which is in files beside the graph's
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
    if sessions > 1:
        held = f"{sessions} x {format_size(weights // sessions)} = {held}"
    num_lanes = max(1, min(num_lanes, plan.num_slots // FEWEST_SLOTS))
    _log.info("memory", model=owner, weights=held, state=str(plan), lanes=num_lanes)
    runners: list[DecoderRunner] = []
    for lane in range(num_lanes):
        runners.append(
            DecoderRunner(
                runtime,
                bundle,
                variant,
                num_slots=_share(plan.num_slots, num_lanes, lane),
                num_prefix_slots=plan.num_prefix_slots,
                beside=runners[0] if runners else None,
            )
        )
    return runners


def _share(count: int, num_lanes: int, lane: int) -> int:
    """Returns how many of `count` a lane gets; the first lanes get the remainder."""
    return count // num_lanes + (lane < count % num_lanes)
