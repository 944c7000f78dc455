"""Base of served models that decode: tokenizer, engines, admission."""

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
from headway_server.decoding.runner.memory_plan import plan_memory
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.verifier import can_verify, open_verifier
from headway_server.errors import BundleError, InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.audio import AudioLimits
from headway_server.preprocessing.image import ImageLimits
from headway_server.runtime import Cores, Device, Runtime, available_bytes, format_size
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission
from headway_server.settings import DEFAULT_MAX_TEXT_KIB, ServerSettings
from headway_server.tasks.inspection.inspector import Inspector
from headway_server.tasks.job import Job
from headway_server.tasks.parameters import DecodingLimits
from headway_server.tasks.prompt_images import PromptImages

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Parts of a decoding model other than its bundle. `DecodingModel.load` opens them."""

    precision: Precision
    """Precision of the variant in use."""
    device: Device
    tokenizer: TextTokenizer
    decoders: Elements[Decoder]
    """Decoder runners, one for each lane."""
    encoder: Encoder | None = None
    """Encoder of an encoder-decoder, shared by all lanes."""
    verifier: DraftVerifier | None = None
    """Runs drafts; needs a single lane, whose slots it shares."""
    cores: Cores | None = None
    """Cores shared by several lanes."""
    settings: EngineSettings
    max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10
    """Largest text, in bytes of UTF-8."""
    max_input_bytes: int = BatchingSettings().max_waiting_bytes
    """Maximum bytes of the preprocessed inputs of all calls: tokens, pixels, audio and its features."""
    image_limits: ImageLimits | None = None
    """Maximum image sizes; for models that read images."""
    audio_limits: AudioLimits | None = None
    """Maximum audio sizes; for models that read audio."""
    observer: Observer = NO_OBSERVER
    """Notified of every run and of every input that leaves the queue."""
    images: PromptImages | None = None
    """Reads the images of conversations; None: there are none."""
    inspector: Inspector | None = None
    """Computes attention maps; None: not supported."""


class DecodingModel(ServedModel):
    """Model that decodes; subclasses add the parameters and results of their task."""

    _noun = "texts"
    _field = "texts"
    _memory_noun = "tokens"
    """Noun of the preprocessed inputs in error messages; they are in memory until a call is answered."""
    _generates_texts = True
    """False if the tokens of texts are not those that are generated."""
    _stepper: type[Stepper] = Stepper
    """Makes the steps of its engines."""
    _blank: Callable[[], EncoderInput]
    """Returns the input of the encoder's test run, if there is an encoder."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts.

        Raises:
            BundleError: The tokenizer, a special token or a default does not fit the model.
        """
        manifest = bundle.manifest
        decoder = parts.decoders[0]
        _check_fits(bundle, parts.tokenizer.largest_id if self._generates_texts else 0, decoder.vocab_size)
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
                    self._stepper(
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
        self._memory = Admission(
            limit=None, noun=self._memory_noun, owner=manifest.name, max_bytes=parts.max_input_bytes
        )

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once.

        Raises:
            BundleError: A graph or the tokenizer cannot be loaded, or does not fit the manifest.
            MemoryUnavailableError: The slots that were asked for do not fit.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        chosen, variant = runtime.choose_variant(bundle.manifest, settings.precision)
        has_encoder = "encoder" in variant.graphs
        speculates = settings.engine.speculation != "off" and not has_encoder
        sessions = 2 if speculates and can_verify(variant) else 1
        decoders = open_decoders(runtime, bundle, variant, settings.engine, sessions=sessions)
        parts = ModelParts(
            precision=chosen,
            device=runtime.device,
            tokenizer=TextTokenizer.load(
                bundle.file(TOKENIZER_FILE),
                truncation_side=bundle.manifest.truncation_side,
                truncates=settings.truncate_texts,
            ),
            decoders=decoders,
            encoder=EncoderRunner(runtime, bundle, variant) if has_encoder else None,
            verifier=open_verifier(runtime, bundle, variant, decoders[0]) if speculates else None,
            cores=runtime.cores,
            settings=settings.engine,
            max_text_bytes=settings.max_text_bytes,
            max_input_bytes=settings.batching.max_waiting_bytes,
            image_limits=settings.image_limits,
            audio_limits=settings.audio_limits,
            observer=observer,
            images=PromptImages.open(bundle, variant, runtime, settings, observer),
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
        """The largest token id in any call."""
        return self._tokenizer.largest_id

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """Runs each kind of step with the largest token id. A graph whose embedding is too small fails here."""
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
        """Runs the graphs once, and again on one core if there are several lanes.

        A broken bundle is found at load time, and the first call does not pay for the first run.

        Raises:
            BundleError: A graph does not run.
        """
        try:
            self._run_once(parts.decoders[0], parts.encoder)
            if self._cores is not None and self._num_lanes > 1:
                with self._cores.all_busy():
                    self._run_once(parts.decoders[0], parts.encoder)
        except Exception as error:  # errors of onnxruntime, or a KeyError if there are other tensors
            raise BundleError(f"{self.bundle.path}: does not run ({error}); export the model again") from error

    def _begin(self, count: int, *, num_tokens: int, num_bytes: int, deadline: float | None) -> DecodingJob:
        """Returns the job of a call. A call that could never be admitted is invalid rather than overload.

        Args:
            count: Sequences.
            num_tokens: Maximum new tokens of each sequence, over all its beams.
            num_bytes: Bytes of the call in memory, without the tokens of its sequences.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            InvalidInputError: The call has more sequences than the model admits at once.
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
            self._memory,
            count=count,
            work=float(num_tokens),
            num_bytes=num_bytes,
            deadline=deadline,
        )


class DecodingJob(Job[Lanes]):
    """Call of decoded sequences; a sequence counts with all its beams."""

    async def run(
        self, sequences: list[Sequence], *, are_last: bool = False, lanes: Lanes | None = None
    ) -> list[SequenceResult]:
        """Runs sequences; errors are those of `Lanes.run` and `Job.reserve`.

        Args:
            sequences: Sequences to run.
            are_last: True if no further sequences follow: each returns its permit when it ends.
            lanes: Engines of another decoder of the model; None: of its first.
        """
        with self._decoding(sequences, are_last=are_last):
            return await (lanes or self._engine).run(sequences)

    async def stream(self, sequences: list[Sequence], *, are_last: bool = False) -> AsyncGenerator[Delta, None]:
        """Runs sequences as `run` does and yields their deltas; at most one unread delta of each is queued."""
        with self._decoding(sequences, are_last=are_last):
            streams = [self._engine.stream(sequence) for sequence in sequences]
            async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as deltas:
                async for delta in deltas:
                    yield delta

    @contextmanager
    def _decoding(self, sequences: list[Sequence], *, are_last: bool) -> Iterator[None]:
        """Surrounds the run of sequences; their results are in their replies afterwards."""
        with self._running(
            num_bytes=_num_token_bytes(sequences),
            num_read=_num_read(sequences),
            num_written=lambda: sum(one.num_new_tokens * one.num_beams for one in sequences),
            ends=[one.reply.result for one in sequences] if are_last else [],
        ):
            yield
        self.note(one.reply.result.result() for one in sequences)


async def _merged(streams: Elements[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of the samples of a prompt as they appear; at most one unread delta of each is queued."""
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
    """Returns the bytes of token prompts and sources of sequences; samples share a prompt.

    Features of images and audio are counted when they are computed.
    """
    read = [
        tensor
        for one in sequences
        for tensor in ((one.prompt_ids,) if one.source is None else one.source.tensors.values())
        if tensor.dtype.kind == "i"
    ]
    return sum({id(tensor): tensor.nbytes for tensor in read}.values())


def _num_read(sequences: Elements[Sequence]) -> int:
    """Returns the number of input tokens and positions of sequences; samples share a prompt.

    Counted are prompts, unencoded sources and the decoders' start tokens. The last start token belongs to the first
    step and is not counted.
    """
    prompts = {id(one.prompt_ids): len(one.prompt_ids) for one in sequences if one.source is None}
    sources = (one for one in sequences if one.source is not None)
    return sum(prompts.values()) + sum(
        len(one.prompt_ids) - 1 + (one.source.cost if one.cross is None and one.source is not None else 0)
        for one in sources
    )


def _check_fits(bundle: Bundle, largest_id: int, vocab_size: int) -> None:
    """Checks that every token id of a call is within the model's vocabulary.

    Raises:
        BundleError: A token id is not, or the default top-k exceeds the vocabulary.
    """
    vocabulary = f"the model has {vocab_size} tokens"
    if largest_id >= vocab_size:
        raise BundleError(
            f"{bundle.path}: the tokenizer's largest id is {largest_id}, {vocabulary}; "
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
                raise BundleError(f"{bundle.path}: {name} is {token_id}, {vocabulary}; export the model again")
    defaults = bundle.manifest.sampling_defaults
    if defaults is not None and defaults.top_k > vocab_size:
        raise BundleError(
            f"{bundle.path}: sampling_defaults.top_k is {defaults.top_k}, {vocabulary}; export the model again"
        )


def open_decoders(
    runtime: Runtime, bundle: Bundle, variant: Variant, settings: EngineSettings, *, sessions: int = 1
) -> list[DecoderRunner]:
    """Opens a decoder with the requested number of slots, or as many as fit in memory, and logs the memory plan.

    The slots of an encoder-decoder are divided among the runtime's lanes, if each gets enough of them. A generation
    model has one lane. Prefill dominates its time: two cores on one prompt give the same throughput as two lanes, and
    a shorter time to first token (docs/lanes.md).

    Args:
        runtime: Where it runs.
        bundle: The bundle.
        variant: One of its variants.
        settings: Requested engine settings.
        sessions: Number of sessions with a copy of the weights, besides lanes.

    Raises:
        BundleError: The graph does not match the manifest.
        MemoryUnavailableError: The requested slots do not fit in memory.
    """
    manifest = bundle.manifest
    owner = f"{manifest.name}/{manifest.version}"
    num_lanes = runtime.num_lanes if manifest.task in ENCODER_DECODER_TASKS else 1
    if num_lanes > 1:
        sessions *= 2
    weights = sessions * manifest.weight_bytes(variant)
    available = available_bytes(runtime.device)
    plan = plan_memory(
        settings,
        slot_sizes(manifest, variant),
        available=None if available is None else max(0, available - weights),
        owner=owner,
    )
    weights_size = format_size(weights)
    if sessions > 1:
        weights_size = f"{sessions} x {format_size(weights // sessions)} = {weights_size}"
    num_lanes = max(1, min(num_lanes, plan.num_slots // FEWEST_SLOTS))
    _log.info("memory", model=owner, weights=weights_size, state=str(plan), lanes=num_lanes)
    runners: list[DecoderRunner] = []
    for lane in range(num_lanes):
        runners.append(
            DecoderRunner(
                runtime,
                bundle,
                variant,
                num_slots=_share(plan.num_slots, num_lanes, lane),
                num_prefix_slots=plan.num_prefix_slots,
                sharing=runners[0].session if runners else None,
            )
        )
    return runners


def _share(count: int, num_lanes: int, lane: int) -> int:
    """Returns a lane's share of `count`; the first lanes get the remainder."""
    return count // num_lanes + (lane < count % num_lanes)
