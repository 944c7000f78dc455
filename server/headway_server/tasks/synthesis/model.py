"""Served speech synthesis model: the engine of text generation, whose tokens are codes of an audio codec.

An audio does not depend on the rest of the batch, nor on streaming.

F frames, K codebooks, T tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.batcher import ItemTimes
from headway_server.bundles import VOICES_FILE, Bundle, demanded
from headway_server.decoding.output.frames import FrameAssembly
from headway_server.decoding.sequence import Sequence, SequenceResult
from headway_server.errors import BundleError, InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import cache_scope, current_caller
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
    plan_synthesis,
)
from headway_server.tasks.synthesis.rules import FrameMasks, FrameRule
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.synthesis.waveform import WaveformDecoder, WaveformStream

_ANY_LENGTH: Final = 2**31
"""Texts are limited to `max_text_bytes` before they are tokenized."""


class SynthesisModel(DecodingModel, Synthesizer):
    """Speaks texts."""

    _noun = "texts"
    _field = "texts"

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; `load` adds the codec.

        Raises:
            BundleError: The tokenizer, the codes or a voice do not match the model.
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        super().__init__(bundle, parts)
        codec = demanded(bundle.manifest.codec)
        if codec.first_code + codec.num_codes > self.limits.vocab_size:
            raise BundleError(
                f"{bundle.path}: codec has {codec.num_codes} codes from token {codec.first_code} on, and the model "
                f"{self.limits.vocab_size} tokens; export the model again"
            )
        self.codec = codec
        self._voices = _load_voices(bundle)
        longest = max((len(tokens) for tokens in self._voices.values()), default=0)
        self._max_text_tokens = self.limits.max_input_tokens - longest
        if self._max_text_tokens <= parts.tokenizer.num_special_tokens:
            raise BundleError(
                f"{bundle.path}: a voice has {longest} tokens, and limits.max_input_tokens is "
                f"{self.limits.max_input_tokens}, which leaves none for a text; export the model again"
            )
        self._max_frames = (self.limits.max_total_tokens - self.limits.max_input_tokens) // codec.num_books
        self._masks = FrameMasks(codec, vocab_size=self.limits.vocab_size, end_id=demanded(self._eos_id))
        self._writer = AudioWriter(codec.sampling_rate)
        self._waveforms: WaveformDecoder | None = None

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """See `DecodingModel.load`; opens the codec too."""
        model = super().load(bundle, runtime, settings, observer)
        manifest = bundle.manifest
        graph = manifest.variants[model.precision].graphs["codec_decoder"]
        model._waveforms = WaveformDecoder(  # noqa: SLF001 (its own class)
            runtime.open(bundle, graph),
            model.codec,
            model=ModelId(name=manifest.name, version=manifest.version),
            observer=observer,
        )
        model.workers.append(model._waveforms.batcher)  # noqa: SLF001 (as above)
        return model

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices."""
        return tuple(self._voices)

    @property
    def sampling_rate(self) -> int:
        """See `Synthesizer`."""
        return self.codec.sampling_rate

    @property
    def max_seconds(self) -> float:
        """Maximum seconds of a text's audio."""
        return self._max_frames * self.codec.hop_length / self.codec.sampling_rate

    @property
    def _codec(self) -> WaveformDecoder:
        assert self._waveforms is not None, "`load` opens it"
        return self._waveforms

    @property
    def _largest_id(self) -> int:
        """The largest code's token id."""
        return self.codec.first_code + self.codec.num_codes - 1

    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """Synthesizes the speech of texts; all of them, or none.

        Args:
            texts: 1 to `MAX_TEXTS` texts.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter or text is out of its range, the queue is full, the deadline passed, the server is
            draining.
        """
        plan = self._plan(request)
        self._writer.check(request.format)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        num_tokens = plan.parameters.max_new_tokens
        with self._begin(len(texts), num_tokens=num_tokens, num_bytes=0, deadline=request.deadline) as job:
            with job.preparing():
                prompts = await self._read(texts, fields, request.voice)
            sequences = [self._sequence(prompt, plan, request) for prompt in prompts]
            results = await job.run(sequences)
            began = time.monotonic()
            ended = zip(sequences, results, strict=True)
            spoken = await gather(self._spoken(job, one, result, request) for one, result in ended)
            job.note([ItemTimes(began, began, time.monotonic())])
        return job.answer(spoken)

    async def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """Synthesizes one text: yields samples as they appear, and last the answer. Args and errors: `synthesize`."""
        plan = self._plan(request)
        check_text(field, text, self._max_text_bytes)
        num_tokens = plan.parameters.max_new_tokens
        with self._begin(1, num_tokens=num_tokens, num_bytes=0, deadline=request.deadline) as job:
            with job.preparing():
                [prompt] = await self._read([text], [field], request.voice)
            sequence = self._sequence(prompt, plan, request, is_stream=True)
            waveform = WaveformStream(self._codec, job)
            num_samples = 0
            async with aclosing(job.stream([sequence])) as deltas:
                async for delta in deltas:
                    samples = await waveform.push(delta.output)
                    num_samples += len(samples)
                    if len(samples):
                        yield SpeechPart(samples=samples, num_new_tokens=delta.num_new_tokens)
            result = sequence.reply.result.result()
            samples = await waveform.push(result.output[:0], is_last=True)
            num_samples += len(samples)
            if len(samples):
                yield SpeechPart(samples=samples, num_new_tokens=result.num_new_tokens)
            yield job.answer([self._result(sequence, result, b"", num_samples)])

    def _plan(self, request: SynthesisRequest) -> SynthesisPlan:
        check_voice(request.voice, self.voices)
        return plan_synthesis(
            request,
            codec=self.codec,
            max_frames=self._max_frames,
            vocab_size=self.limits.vocab_size,
            defaults=self.bundle.manifest.sampling_defaults,
        )

    async def _read(self, texts: Elements[str], fields: Elements[str], voice: str) -> list[NDArray[np.int64]]:
        """Makes prompts, (T,): the codes of the voice, and the tokens of the text."""
        encoded = await self._tokenizer.encode_limited(texts, fields=fields, max_tokens=_ANY_LENGTH, truncate=False)
        for field, text in zip(fields, encoded, strict=True):
            if len(text) > self._max_text_tokens:
                raise InvalidInputError(
                    field, f"has {len(text)} tokens, the model speaks at most {self._max_text_tokens}; split it"
                )
        before = self._voices[voice] if voice else np.empty(0, np.int64)
        return [np.concatenate([before, text.input_ids]) for text in encoded]

    def _sequence(
        self, prompt: NDArray[np.int64], plan: SynthesisPlan, request: SynthesisRequest, *, is_stream: bool = False
    ) -> Sequence:
        return Sequence(
            prompt_ids=prompt,
            parameters=replace(plan.parameters, seed=draw_seed(plan.seed)),
            output=FrameAssembly(self.codec),
            eos_id=self._eos_id,
            deadline=request.deadline,
            wants_deltas=is_stream,
            caller=current_caller(),
            cache_salt=cache_scope(),
            rule=FrameRule(self._masks),
        )

    async def _spoken(
        self, job: DecodingJob, sequence: Sequence, result: SequenceResult, request: SynthesisRequest
    ) -> SpokenText:
        """Decodes all frames of a sequence to audio."""
        samples = await WaveformStream(self._codec, job).push(result.output, is_last=True)
        audio = await self._encode(samples, request)
        return self._result(sequence, result, audio, len(samples))

    def _result(self, sequence: Sequence, result: SequenceResult, audio: bytes, num_samples: int) -> SpokenText:
        return SpokenText(
            audio=audio,
            duration_s=num_samples / self.codec.sampling_rate,
            finish_reason=result.finish_reason,
            num_new_tokens=result.num_new_tokens,
            seed=sequence.parameters.seed,
        )


def _load_voices(bundle: Bundle) -> dict[str, NDArray[np.int64]]:
    """Reads the voices as tokens, (T,) each, in the order of the manifest's labels.

    Raises:
        BundleError: A voice is missing in the file, or a code is out of the codec's range.
    """
    manifest, file = bundle.manifest, bundle.file(VOICES_FILE)
    codec = demanded(manifest.codec)
    offsets = codec.first_code + np.arange(codec.num_books) * codec.codebook_size
    voices: dict[str, NDArray[np.int64]] = {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for name in manifest.labels:
            codes = np.array(content[name], np.int64).reshape(-1, codec.num_books)  # (F, K)
            if ((codes < 0) | (codes >= codec.codebook_size)).any():
                raise ValueError(f"{name} has codes outside 0 to {codec.codebook_size - 1}")
            voices[name] = (codes + offsets).ravel()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{file}: cannot read the voices ({error}); export the model again") from error
    return voices
