"""Served speech synthesis in stages: Bark.

A decoder writes semantic tokens of a text. A second one writes coarse codes of them, in windows; both have caches and
run on the decoding engine. A third model without a cache reads the frames of a window at once and writes the fine
codes, codebook after codebook. The codec's decoder makes samples of all codes. Fine codes depend on frames behind them,
so the first samples are there when all are. An audio does not depend on the rest of a batch.

T tokens, F frames, K codebooks, C codes of a codebook, W frames of a window, V vocabulary, S samples.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Elements
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, BatchGraph, Tensors
from headway_server.bundles import (
    STAGED_TENSORS,
    VOICES_FILE,
    AudioCodec,
    Bundle,
    SamplingDefaults,
    SpeechStages,
    demanded,
)
from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.lanes import Lanes
from headway_server.decoding.core.step import Stepper
from headway_server.decoding.output.frames import FrameAssembly
from headway_server.decoding.rules import Logits, Mask, TokenRule, forbid, mask_of, num_words
from headway_server.decoding.runner.decoder import DecoderRunner, coarse_stage
from headway_server.decoding.sequence import FinishReason, Sequence
from headway_server.errors import BundleError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_text, check_texts
from headway_server.settings import ServerSettings
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.job import gather
from headway_server.tasks.parameters import draw_seed
from headway_server.tasks.synthesis.encoding import AudioWriter
from headway_server.tasks.synthesis.request import (
    MAX_TEXTS,
    SynthesisPlan,
    SynthesisRequest,
    check_voice,
    most_frames,
    plan_synthesis,
)
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer, to_int16

_FLOAT_BYTES: Final = 4
_SAMPLE_BYTES: Final = 2
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """A recording in a voice, at each stage; each may be empty."""

    semantic: NDArray[np.int64]
    """(T,)"""
    coarse: NDArray[np.int64]
    """(F, 2), without offsets."""
    fine: NDArray[np.int64]
    """(F, K)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Validated parameters of a call."""

    semantic: SynthesisPlan
    coarse: SynthesisPlan
    fine_temperature: float
    num_tokens: int
    """Most semantic tokens."""
    num_frames: int
    """Most frames."""
    voice: Voice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speech:
    """Audio of a text."""

    samples: NDArray[np.int16]
    num_codes: int
    finish_reason: FinishReason
    seed: int


class StagedModel(DecodingModel, Synthesizer):
    """Speaks texts."""

    _noun = "texts"
    _field = "texts"
    _generates_texts = False

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; `load` adds the stages behind the first.

        Raises:
            BundleError: The tokenizer, a token or a voice does not match the model.
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        super().__init__(bundle, parts)
        manifest = bundle.manifest
        self._stages = demanded(manifest.stages)
        self._end = demanded(self._eos_id)
        stages = self._stages
        largest = max(
            parts.tokenizer.largest_id + stages.text_offset, stages.text_pad, stages.semantic_infer, self._end
        )
        if largest >= stages.num_inputs:
            raise BundleError(
                f"{bundle.path}: reads the token {largest}, and stages.num_inputs is {stages.num_inputs}; export the "
                "model again"
            )
        self._voices = _load_voices(bundle)
        self._num_inputs = self.limits.max_input_tokens + 1
        self._max_tokens = self.limits.max_total_tokens - self._num_inputs
        self._max_frames = frames_of(self._max_tokens, stages)
        self._codec = AudioCodec(
            sampling_rate=stages.sampling_rate,
            hop_length=stages.hop_length,
            num_books=stages.num_books,
            codebook_size=stages.codebook_size,
            first_code=0,
            frames_per_run=1,
        )
        self._writer = AudioWriter(stages.sampling_rate)
        self._coarse_lanes: Lanes
        self._coarse_vocab_size: int
        self._coarse_masks: tuple[Mask, ...]
        self._fine: Batcher
        self._decoder: Batcher

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """See `DecodingModel.load`; opens the further stages too."""
        model = super().load(bundle, runtime, settings, observer)
        model._open(runtime, settings, observer)  # noqa: SLF001 (its own class)
        return model

    def _open(self, runtime: Runtime, settings: ServerSettings, observer: Observer) -> None:
        """Opens the stages behind the first, and runs each once.

        Raises:
            BundleError: A graph cannot be loaded, does not run, or does not fit the manifest.
        """
        stages, bundle = self._stages, self.bundle
        variant = bundle.manifest.variants[self.precision]
        manifest, stage = coarse_stage(bundle.manifest, variant)
        model = ModelId(name=manifest.name, version=manifest.version)
        coarse = DecoderRunner(runtime, replace(bundle, manifest=manifest), stage, num_slots=self._lanes.num_slots)
        first, size = stages.first_code, coarse.vocab_size
        if first + stages.num_coarse_books * stages.codebook_size > size:
            raise BundleError(
                f"{bundle.path}: stages.first_code is {first}, and the graph coarse_decoder has {size} tokens; export "
                "the model again"
            )
        self._coarse_vocab_size = size
        borders = (first, first + stages.codebook_size, size)
        self._coarse_masks = tuple(mask_of(range(start, stop), num_words(size)) for start, stop in pairwise(borders))
        try:
            largest = np.array([max(size - 1, stages.coarse_pad, stages.coarse_infer)])
            coarse.prefill(0, largest, 0)
            coarse.decode(largest, np.ones(1, np.int64))
        except Exception as error:  # errors of onnxruntime
            raise BundleError(f"{bundle.path}: does not run ({error}); export the model again") from error
        engine = Engine(
            Stepper(
                coarse,
                priority_scope=settings.engine.priority_scope,
                name=f"engine-{manifest.name}-coarse",
                observer=observer,
                model=model,
            )
        )
        self._coarse_lanes = Lanes([engine])
        graphs = {role: BatchGraph(runtime.open(bundle, variant.graphs[role])) for role in STAGED_TENSORS}  # type: ignore[index]
        fine, codec = (graphs[role] for role in STAGED_TENSORS)
        codes = np.full((stages.fine_input, stages.num_books), stages.codebook_size)
        last = np.array(stages.num_books - 1)
        fine.warm_up({"codes": codes, "book": last}, 1, {"logits": (stages.fine_input, stages.codebook_size)})
        codec.warm_up({"codes": codes[:1] - 1}, 1, {"samples": (stages.hop_length,)})
        self._fine = Batcher(fine, budget=1, model=model, session=fine.session, observer=observer)
        self._decoder = Batcher(codec, budget=self._max_frames, model=model, session=codec.session, observer=observer)
        self.workers += [self._coarse_lanes, self._fine, self._decoder]

    @property
    def voices(self) -> tuple[str, ...]:
        """See `Synthesizer`."""
        return tuple(self._voices)

    @property
    def sampling_rate(self) -> int:
        """See `Synthesizer`."""
        return self._stages.sampling_rate

    @property
    def max_seconds(self) -> float:
        """See `Synthesizer`."""
        return self._max_frames * self._codec.hop_length / self._codec.sampling_rate

    @property
    def _largest_id(self) -> int:
        """The largest pair of tokens."""
        size = demanded(self.bundle.manifest.stages).num_inputs
        return size * size - 1 if size < 2**31 else 0

    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """See `Synthesizer`."""
        plan = self._plan(request)
        self._writer.check(request.format)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        with self._job(len(texts), plan, request) as job:
            with job.preparing():
                prompts = await self._read(texts, fields, plan)
            spoken = await gather(self._speak(job, prompt, plan, request) for prompt in prompts)
            audio = [await self._encode(one.samples, request) for one in spoken]
            return job.answer([self._result(one, file) for one, file in zip(spoken, audio, strict=True)])

    async def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """See `Synthesizer`; the parts are of a second."""
        plan = self._plan(request)
        check_text(field, text, self._max_text_bytes)
        with self._job(1, plan, request) as job:
            with job.preparing():
                [prompt] = await self._read([text], [field], plan)
            spoken = await self._speak(job, prompt, plan, request)
            for start in range(0, len(spoken.samples), self.sampling_rate):
                part = spoken.samples[start : start + self.sampling_rate]
                yield SpeechPart(samples=part, num_new_tokens=spoken.num_codes)
            yield job.answer([self._result(spoken, b"")])

    def _plan(self, request: SynthesisRequest) -> _Plan:
        """Checks parameters before any work is done.

        Raises:
            InvalidInputError: One is out of its range.
        """
        stages = self._stages
        check_voice(request.voice, self.voices)

        def planned(defaults: SamplingDefaults | None, vocab_size: int) -> SynthesisPlan:
            return plan_synthesis(
                request, codec=self._codec, max_frames=self._max_frames, vocab_size=vocab_size, defaults=defaults
            )

        num_frames = most_frames(request, self._max_frames, stages.hop_length / stages.sampling_rate)
        given = request.sampling.get("temperature")
        return _Plan(
            semantic=planned(self.bundle.manifest.sampling_defaults, self.limits.vocab_size),
            coarse=planned(stages.coarse_sampling, self._coarse_vocab_size),
            fine_temperature=stages.fine_temperature if given is None else given,
            num_tokens=tokens_of(num_frames, stages, self._max_tokens),
            num_frames=num_frames,
            voice=self._voices.get(request.voice, _NO_VOICE),
        )

    def _job(self, count: int, plan: _Plan, request: SynthesisRequest) -> DecodingJob:
        """Begins a call, with the memory of all its texts: samples and logits of fine codes."""
        stages = self._stages
        of_samples = plan.num_frames * stages.hop_length * (_FLOAT_BYTES + _SAMPLE_BYTES)
        of_logits = stages.fine_input * stages.codebook_size * _FLOAT_BYTES
        num_bytes = count * (of_samples + of_logits)
        return self._begin(count, num_tokens=plan.num_tokens, num_bytes=num_bytes, deadline=request.deadline)

    async def _read(self, texts: Elements[str], fields: Elements[str], plan: _Plan) -> list[NDArray[np.int64]]:
        """Makes prompts, (T,): the text beside the voice's semantic tokens, in pairs, and the token after them."""
        stages, most = self._stages, self.limits.max_input_tokens
        encoded = await self._tokenizer.encode_limited(
            texts, fields=fields, max_tokens=most, truncate=False, add_special_tokens=False
        )
        beside = np.full(most, self._end)
        history = plan.voice.semantic[-most:]
        beside[: len(history)] = history
        prompts = []
        for text in encoded:
            own = np.full(most, stages.text_pad)
            own[: len(text)] = text.input_ids + stages.text_offset
            prompts.append(np.append(own + stages.num_inputs * (beside + 1), stages.semantic_infer))
        return prompts

    async def _speak(
        self, job: DecodingJob, prompt: NDArray[np.int64], plan: _Plan, request: SynthesisRequest
    ) -> _Speech:
        """Runs all stages of a text, one after the other."""
        seed = draw_seed(plan.semantic.seed)
        parameters = replace(plan.semantic.parameters, max_new_tokens=plan.num_tokens, seed=seed)
        rule = _SemanticRule(self._end, self._stages.min_end_probability)
        semantic = self._sequence(prompt, parameters, rule, request, eos_id=self._end)
        [written] = await job.run([semantic])
        coarse = await self._coarse(job, written.output[:, 0], plan, request, seed)
        codes = await self._fine_codes(job, coarse, plan, seed)
        decoded: BatchedResults[Tensors] = await job.batch(
            self._decoder,
            [{"codes": codes}],
            outputs=STAGED_TENSORS["codec_decoder"][1],
            num_bytes=codes.nbytes,
            num_read=0,  # codes are charged when they are generated
            lengths=[len(codes)],
            groups=[len(codes)],
        )
        job.note(decoded.runs)
        return _Speech(
            samples=to_int16(decoded.results[0]["samples"]),
            num_codes=codes.size,
            finish_reason=written.finish_reason,
            seed=seed,
        )

    async def _coarse(
        self, job: DecodingJob, semantic: NDArray[np.int64], plan: _Plan, request: SynthesisRequest, seed: int
    ) -> NDArray[np.int64]:
        """Writes the coarse codes of semantic tokens, (T,) -> (F, 2), in windows that read the codes before."""
        stages, ratio = self._stages, self._stages.codes_per_token
        count = frames_of(len(semantic), stages) * stages.num_coarse_books
        most = int(stages.coarse_history / ratio)
        before, codes = coarse_history(plan.voice, stages)
        tokens, num_given = np.concatenate([before, semantic]), len(codes)
        while (done := len(codes) - num_given) < count:
            place = len(before) + round(done / ratio)
            window = tokens[max(0, place - most) :][: stages.coarse_input]
            window = np.pad(window, (0, stages.coarse_input - len(window)), constant_values=stages.coarse_pad)
            prompt = np.concatenate([window, [stages.coarse_infer], codes[-stages.coarse_history :]])
            parameters = replace(
                plan.coarse.parameters,
                max_new_tokens=min(stages.coarse_window, count - done),
                seed=(seed + done + 1) % _SEEDS,
            )
            sequence = self._sequence(prompt, parameters, _CoarseRule(self._coarse_masks), request, eos_id=None)
            [written] = await job.run([sequence], lanes=self._coarse_lanes)
            codes = np.concatenate([codes, written.output[:, 0]])
        coarse = (codes[num_given:] - stages.first_code) % stages.codebook_size
        return coarse.reshape(-1, stages.num_coarse_books)

    async def _fine_codes(
        self, job: DecodingJob, coarse: NDArray[np.int64], plan: _Plan, seed: int
    ) -> NDArray[np.int64]:
        """Writes the codes of the other codebooks, (F, 2) -> (F, K), in windows that overlap."""
        stages = self._stages
        size, step = stages.fine_input, stages.fine_history
        history = plan.voice.fine.reshape(-1, stages.num_books)[-step:]
        given, more = len(history), stages.num_books - stages.num_coarse_books
        frames = np.pad(coarse, ((0, 0), (0, more)), constant_values=stages.codebook_size)
        frames = np.concatenate([history, frames])
        frames = np.pad(frames, ((0, max(0, size - len(frames))), (0, 0)), constant_values=stages.codebook_size)
        random = np.random.Generator(np.random.Philox(seed))
        num_windows = max(0, -(-(len(coarse) - (size - given)) // step)) + 1
        for number in range(num_windows):
            start = min(number * step, len(frames) - size)
            first = min(given + number * step, len(frames) - step)
            window = frames[start : start + size].copy()
            for book in range(stages.num_coarse_books, stages.num_books):
                choose = _Choice(plan.fine_temperature, first - start, random)
                chosen: BatchedResults[NDArray[np.int64]] = await job.batch(
                    self._fine,
                    [{"codes": window, "book": np.array(book)}],
                    outputs=STAGED_TENSORS["fine_decoder"][1],
                    num_bytes=window.nbytes,
                    num_read=0,
                    read=choose,
                )
                job.note(chosen.runs)
                window[first - start :, book] = chosen.results[0]
            frames[first : start + size, stages.num_coarse_books :] = window[first - start :, stages.num_coarse_books :]
        return frames[given : given + len(coarse)]

    def _sequence(
        self,
        prompt: NDArray[np.int64],
        parameters: Any,
        rule: TokenRule,
        request: SynthesisRequest,
        *,
        eos_id: int | None,
    ) -> Sequence:
        return Sequence(
            prompt_ids=prompt,
            parameters=parameters,
            output=FrameAssembly(_TOKENS),
            eos_id=eos_id,
            deadline=request.deadline,
            caller=current_caller(),
            rule=rule,
        )

    def _result(self, spoken: _Speech, audio: bytes) -> SpokenText:
        return SpokenText(
            audio=audio,
            duration_s=len(spoken.samples) / self.sampling_rate,
            finish_reason=spoken.finish_reason,
            num_new_tokens=spoken.num_codes,
            seed=spoken.seed,
        )


_TOKENS: Final = AudioCodec(
    sampling_rate=1, hop_length=1, num_books=1, codebook_size=2**24, first_code=0, frames_per_run=1
)
"""Makes frames of one number of tokens, which it is."""
_NO_VOICE: Final = Voice(
    semantic=np.empty(0, np.int64), coarse=np.empty((0, 2), np.int64), fine=np.empty((0, 2), np.int64)
)


class _SemanticRule(TokenRule):
    """At least one token, and the end where it is likely enough."""

    def __init__(self, end: int, min_probability: float | None) -> None:
        self._end, self._min_probability, self._is_first = end, min_probability, True

    def allow(self, mask: Mask, logits: Logits) -> None:
        """See `TokenRule`."""
        if self._is_first:
            forbid(mask, [self._end])
        elif self._min_probability is not None:
            exponentials = np.exp(logits - logits.max())
            if exponentials[self._end] > self._min_probability * exponentials.sum():
                mask &= mask_of([self._end], len(mask))

    def follow(self, token_id: int) -> _SemanticRule:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        self._is_first = False
        return self


class _CoarseRule(TokenRule):
    """Codes of each codebook in turn."""

    def __init__(self, masks: Elements[Mask]) -> None:
        self._masks, self._num_codes = masks, 0

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        mask &= self._masks[self._num_codes % len(self._masks)]

    def follow(self, token_id: int) -> _CoarseRule:  # noqa: ARG002 (any allowed token leads to the next codebook)
        """See `TokenRule`."""
        self._num_codes += 1
        return self


@dataclass(frozen=True, slots=True)
class _Choice:
    """Takes the likeliest codes, or draws them by the Gumbel-max trick (Maddison et al. 2014, arXiv 1411.0030)."""

    temperature: float
    first: int
    """Frames before it are not read."""
    random: np.random.Generator

    def __call__(self, row: Mapping[str, NDArray[Any]], number: int) -> NDArray[np.int64]:  # noqa: ARG002
        """Logits (W, C) -> (W - first,)."""
        logits = row["logits"][self.first :]
        if self.temperature not in (0.0, 1.0):  # of 1 `generate` takes the likeliest, too
            logits = logits / np.float32(self.temperature) + self.random.gumbel(size=logits.shape).astype(np.float32)
        chosen: NDArray[np.int64] = logits.argmax(axis=-1)
        return chosen


def frames_of(num_tokens: int, stages: SpeechStages) -> int:
    """Returns the frames of semantic tokens, as `BarkCoarseModel.generate` counts them, in float32."""
    ratio = np.float32(stages.codes_per_token)
    return int(np.floor(np.float32(num_tokens) * ratio / np.float32(stages.num_coarse_books)))


def tokens_of(num_frames: int, stages: SpeechStages, most: int) -> int:
    """Returns the most semantic tokens, at least one, that have at most so many frames."""
    found = min(most, int((num_frames + 1) * stages.num_coarse_books / stages.codes_per_token) + 1)
    while found > 1 and frames_of(found, stages) > num_frames:
        found -= 1
    return found


def coarse_history(voice: Voice, stages: SpeechStages) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the semantic tokens, (T,), and the coarse tokens, (F * 2,), that come before those of a text."""
    ratio = stages.codes_per_token
    tokens = (voice.coarse + np.arange(2) * stages.codebook_size + stages.first_code).ravel()
    semantic = voice.semantic
    count = min(int(stages.coarse_history / ratio), len(semantic) - len(semantic) % 2, int(len(tokens) / ratio))
    if not count:
        return semantic[:0], tokens[:0]
    return semantic[-count:], tokens[-round(count * ratio) :][:-2]


def _load_voices(bundle: Bundle) -> dict[str, Voice]:
    """Reads the voices, in the order of the manifest's labels.

    Raises:
        BundleError: A voice is missing in the file, or a token is out of its range.
    """
    manifest, file = bundle.manifest, bundle.file(VOICES_FILE)
    stages = demanded(manifest.stages)
    voices: dict[str, Voice] = {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for name in manifest.labels:
            one = content[name]
            voices[name] = Voice(
                semantic=_read_codes(name, one["semantic"], (-1,), stages.first_code),
                coarse=_read_codes(name, one["coarse"], (-1, stages.num_coarse_books), stages.codebook_size),
                fine=_read_codes(name, one["fine"], (-1, stages.num_books), stages.codebook_size),
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{file}: cannot read the voices ({error}); export the model again") from error
    return voices


def _read_codes(name: str, given: Any, shape: tuple[int, ...], stop: int) -> NDArray[np.int64]:
    codes = np.array(given, np.int64).reshape(shape)
    if ((codes < 0) | (codes >= stop)).any():
        raise ValueError(f"{name} has codes outside 0 to {stop - 1}")
    return codes
