"""What all served models that decode have in common: tokenizer, engines, admission."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import structlog

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import ENCODER_DECODER_TASKS, TOKENIZER_FILE, Bundle, Precision, Variant, demanded
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.lanes import FEWEST_SLOTS, Lanes
from headway_server.decoding.core.step import Stepper
from headway_server.decoding.interfaces import Decoder, DraftVerifier, Encoder, EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner, slot_sizes
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.decoding.runner.memory_plan import format_size, plan_memory
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.verifier import can_verify, open_verifier
from headway_server.errors import BundleError, InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.audio import AudioLimits
from headway_server.preprocessing.image import ImageLimits
from headway_server.runtime import Cores, Device, Runtime, available_bytes
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission
from headway_server.settings import DEFAULT_MAX_TEXT_KIB, ServerSettings
from headway_server.tasks.inspection.inspector import Inspector
from headway_server.tasks.job import Job
from headway_server.tasks.parameters import DecodingLimits

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a decoding model is made of, beside its bundle. `DecodingModel.load` opens them."""

    precision: Precision
    """Of the variant that runs."""
    device: Device
    tokenizer: TextTokenizer
    decoders: Elements[Decoder]
    """Runners of the decoder, one for each lane."""
    encoder: Encoder | None = None
    """Of an encoder-decoder, for all lanes."""
    verifier: DraftVerifier | None = None
    """Runs drafts in the slots of the only lane."""
    cores: Cores | None = None
    """What several lanes share."""
    settings: EngineSettings
    max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10
    """Largest text, in bytes of UTF-8."""
    max_held_bytes: int = BatchingSettings().max_waiting_bytes
    """Most bytes of what is made of the inputs of all calls: tokens, pixels, audio and its features."""
    image_limits: ImageLimits | None = None
    """Sizes past which an image is refused; of models that read images."""
    audio_limits: AudioLimits | None = None
    """Sizes past which audio is refused; of models that hear."""
    observer: Observer = NO_OBSERVER
    """Is told of every run and of inputs that leave the queue."""
    inspector: Inspector | None = None
    """Shows what the model attends to; None: nobody does."""


class DecodingModel(ServedModel):
    """A model that decodes; generation and text to text add what a call means."""

    _noun = "texts"
    _field = "texts"
    _held_noun = "tokens"
    """What is made of inputs and held until a call is answered, for messages."""
    _blank: Callable[[], EncoderInput]
    """Returns an input that the encoder, if there is one, is tried with."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Makes a model of its parts.

        Raises:
            BundleError: The tokenizer, a special token or a default does not fit the model.
        """
        manifest = bundle.manifest
        decoder = parts.decoders[0]
        _check_fits(bundle, parts.tokenizer.largest_id, decoder.vocab_size)
        super().__init__(bundle, parts.precision, parts.device)
        self.limits = DecodingLimits(
            max_input_tokens=demanded(manifest.limits.max_input_tokens),
            max_total_tokens=decoder.max_length,
            vocab_size=decoder.vocab_size,
        )
        self._max_text_bytes = parts.max_text_bytes
        self._tokenizer = parts.tokenizer
        self._inspector = parts.inspector
        self._cores = parts.cores
        self._num_lanes = len(parts.decoders)
        assert parts.verifier is None or self._num_lanes == 1, "drafts are verified in the slots of one lane"
        special_tokens = demanded(manifest.special_tokens)
        self._eos_id = special_tokens.eos
        self._more_eos_ids = frozenset(special_tokens.more_eos)
        self._capacity = sum(decoder.num_slots for decoder in parts.decoders) + parts.settings.max_waiting
        self._lanes = Lanes(
            [
                Engine(
                    Stepper(
                        decoder,
                        encoder=parts.encoder,
                        max_encoder_tokens=parts.settings.max_encoder_tokens,
                        stream_interval_ms=parts.settings.stream_interval_ms,
                        verifier=parts.verifier,
                        priority_scope=parts.settings.priority_scope,
                        name=f"engine-{manifest.name}-{lane}",
                        observer=parts.observer,
                        model=ModelId(name=manifest.name, version=manifest.version),
                        suppressed_ids=manifest.suppressed_tokens,
                    ),
                    busy_lanes=None if parts.cores is None else parts.cores.busy_lanes(),
                )
                for lane, decoder in enumerate(parts.decoders)
            ]
        )
        self.workers.append(self._lanes)
        if parts.inspector is not None:
            self.closers.append(parts.inspector.close)
        self._admission = Admission(limit=self._capacity, noun=self._noun, owner=manifest.name, pace=self._lanes.pace)
        self._held = Admission(limit=None, noun=self._held_noun, owner=manifest.name, max_bytes=parts.max_held_bytes)

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: A graph or the tokenizer cannot be loaded, or does not fit the manifest.
            MemoryUnavailableError: The slots that were asked for do not fit.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        chosen, variant = runtime.choose_variant(bundle.manifest, settings.precision)
        has_encoder = "encoder" in variant.graphs
        speculates = settings.engine.speculation != "off" and not has_encoder
        sessions = 2 if speculates and can_verify(variant) else 1
        decoders = open_decoders(runtime, bundle, variant, settings.engine, sessions=sessions)
        parts = ModelParts(
            precision=chosen,
            device=runtime.device,
            tokenizer=TextTokenizer.load(bundle.file(TOKENIZER_FILE), truncation_side=bundle.manifest.truncation_side),
            decoders=decoders,
            encoder=EncoderRunner(runtime, bundle, variant) if has_encoder else None,
            verifier=open_verifier(runtime, bundle, variant, decoders[0]) if speculates else None,
            cores=runtime.cores,
            settings=settings.engine,
            max_text_bytes=settings.max_text_bytes,
            max_held_bytes=settings.batching.max_waiting_bytes,
            image_limits=settings.image_limits,
            audio_limits=settings.audio_limits,
            observer=observer,
            inspector=Inspector(bundle, chosen, runtime, max_mib=settings.max_attention_mib, observer=observer),
        )
        model = cls(bundle, parts)
        model._check_runs(parts)
        return model

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._lanes!r})"

    @property
    def _largest_id(self) -> int:
        """The largest token that a call may bring."""
        return self._tokenizer.largest_id

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """Runs each kind of step with the largest token, which a graph with too small an embedding refuses."""
        largest = np.array([self._largest_id])
        if encoder is None:
            decoder.prefill(0, largest, 0)
            decoder.decode(largest, np.ones(1, np.int64))
            return
        decoder.set_sources(encoder.encode([self._blank()]))
        for token_ids in (np.array([demanded(self.bundle.manifest.special_tokens).bos]), largest):
            decoder.decode(token_ids, np.zeros(1, np.int64))
        decoder.set_sources([])

    def _check_runs(self, parts: ModelParts) -> None:
        """Runs the graphs once, and once more on one core if there are several lanes.

        So a bundle that cannot run is found now, and the first call does not pay for the first run.

        Raises:
            BundleError: They do not run.
        """
        try:
            self._run_once(parts.decoders[0], parts.encoder)
            if self._cores is not None and self._num_lanes > 1:
                with self._cores.all_busy():
                    self._run_once(parts.decoders[0], parts.encoder)
        except Exception as error:  # onnxruntime's own kinds, or a KeyError if there are other tensors
            raise BundleError(f"{self.bundle.path}: does not run ({error}); export the model again") from error

    def _begin(self, count: int, *, num_tokens: int, num_bytes: int, deadline: float | None) -> DecodingJob:
        """Returns the job of a call. One that could never be admitted is refused as invalid, not as overloaded.

        Args:
            count: Sequences.
            num_tokens: Most new tokens of each, of all its beams.
            num_bytes: What the call holds beside the tokens of its sequences.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            InvalidInputError: There are more sequences than the model admits at once.
        """
        if count > self._capacity:
            raise InvalidInputError(
                self._field,
                f"has {count} elements; {self.bundle.manifest.name} takes at most {self._capacity} at once; "
                "send them in several calls",
            )
        return DecodingJob(
            self._lanes,
            self._admission,
            self._held,
            count=count,
            work=float(num_tokens),
            num_bytes=num_bytes,
            deadline=deadline,
        )


class DecodingJob(Job[Lanes]):
    """A call whose sequences are decoded, each by all its beams."""

    async def run(self, sequences: list[Sequence], *, are_last: bool = False) -> list[SequenceResult]:
        """Runs sequences; errors are those of `Lanes.run`, and of `Job.hold`.

        Args:
            sequences: What runs.
            are_last: True gives the place of each back when it ends: no other input of the call takes it.
        """
        with self._decoding(sequences, are_last=are_last):
            return await self._engine.run(sequences)

    async def stream(self, sequences: list[Sequence], *, are_last: bool = False) -> AsyncGenerator[Delta, None]:
        """Runs sequences as `run` does and yields their deltas; at most one of each waits to be read."""
        with self._decoding(sequences, are_last=are_last):
            streams = [self._engine.stream(sequence) for sequence in sequences]
            async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as deltas:
                async for delta in deltas:
                    yield delta

    @contextmanager
    def _decoding(self, sequences: list[Sequence], *, are_last: bool) -> Iterator[None]:
        """Surrounds the run of sequences, whose replies hold their results then."""
        with self._running(
            num_bytes=_num_token_bytes(sequences),
            num_read=_num_read(sequences),
            num_written=lambda: sum(one.num_new_tokens * one.num_beams for one in sequences),
            ends=[one.reply.result for one in sequences] if are_last else [],
        ):
            yield
        self.note(one.reply.result.result() for one in sequences)


async def _merged(streams: Elements[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of the samples of a prompt as they appear; at most one of each waits to be read."""
    waiting = {asyncio.ensure_future(anext(stream)): sample for sample, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for arrived in done:
                sample = waiting.pop(arrived)
                with suppress(StopAsyncIteration):
                    delta = arrived.result()
                    waiting[asyncio.ensure_future(anext(streams[sample]))] = sample
                    yield replace(delta, sample=sample)
    finally:
        for arriving in waiting:
            arriving.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _num_token_bytes(sequences: Elements[Sequence]) -> int:
    """Returns the size of the prompts or sources of sequences, where these are tokens; samples share a prompt.

    What is made of images and audio is held since it was made.
    """
    read = [
        tensor
        for one in sequences
        for tensor in ((one.prompt_ids,) if one.source is None else one.source.tensors.values())
        if tensor.dtype.kind == "i"
    ]
    return sum({id(tensor): tensor.nbytes for tensor in read}.values())


def _num_read(sequences: Elements[Sequence]) -> int:
    """Returns the tokens and positions that are read before sequences are written; samples share a prompt.

    They are prompts, or sources that no encoder has read yet and what their decoders start from. The last token of
    that is read with the first step, as others are that were written.
    """
    prompts = {id(one.prompt_ids): len(one.prompt_ids) for one in sequences if one.source is None}
    sources = (one for one in sequences if one.source is not None)
    return sum(prompts.values()) + sum(
        len(one.prompt_ids) - 1 + (one.source.cost if one.cross is None and one.source is not None else 0)
        for one in sources
    )


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
    special_tokens = demanded(bundle.manifest.special_tokens)
    named = {
        "special_tokens.bos": (special_tokens.bos,),
        "special_tokens.eos": (special_tokens.eos,),
        "special_tokens.more_eos": special_tokens.more_eos,
        "prompt_prefix": bundle.manifest.prompt_prefix,
        "suppressed_tokens": bundle.manifest.suppressed_tokens,
    }
    for name, token_ids in named.items():
        for token_id in token_ids:
            if token_id is not None and not 0 <= token_id < vocab_size:
                raise BundleError(f"{bundle.path}: {name} is {token_id}, {holds}; export the model again")
    defaults = bundle.manifest.sampling_defaults
    if defaults is not None and defaults.top_k > vocab_size:
        raise BundleError(
            f"{bundle.path}: sampling_defaults.top_k is {defaults.top_k}, {holds}; export the model again"
        )


def open_decoders(
    runtime: Runtime, bundle: Bundle, variant: Variant, settings: EngineSettings, *, sessions: int = 1
) -> list[DecoderRunner]:
    """Opens a decoder with as many slots as were asked for, or as memory holds, and logs the arithmetic.

    The slots of an encoder-decoder are shared out among the runtime's lanes, if each gets enough of them. A generation
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
    num_lanes = runtime.num_lanes if manifest.task in ENCODER_DECODER_TASKS else 1
    if num_lanes > 1:
        sessions *= 2
    weights = sessions * sum(  # with external data, which is in files beside the graph's
        file.size_bytes
        for path, file in manifest.files.items()
        if any(path.startswith(graph.file) for role, graph in variant.graphs.items() if role != "attention")
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
