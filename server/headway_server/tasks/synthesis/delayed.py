"""Served synthesis of codes in the delay pattern: MusicGen (Copet et al. 2023, arXiv 2306.05284).

An encoder reads a text. A step of a decoder with a cache writes a code of every codebook, each of the frame before that
of the codebook in front (section 2.1 and figure 1). Classifier-free guidance takes the logits of a second row, which
does not read the text (Ho and Salimans 2022, equation 6). The codec's decoder makes samples of all codes: what recurs
at once, and the rest in windows. Audio has the length that is asked for: the model does not end it. It does not depend
on the rest of a batch, nor on streaming.

R rows of a text, F frames, K codebooks, V codes of a codebook, D channels of a frame, S samples.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Elements
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, BatchGraph, Tensors
from headway_server.bundles import Bundle, DelayedCodes, SamplingDefaults, demanded
from headway_server.bundles.manifest import DELAYED_TENSORS
from headway_server.decoding.core.frames import START, FrameSequence, FrameStepper, FrameWriter
from headway_server.decoding.interfaces import Decoder, Encoder, EncoderInput
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.runner.state import fixed_size
from headway_server.decoding.sampling.draws import Nucleus, draw_top_k, stream_states, uniform
from headway_server.decoding.sequence import FinishReason
from headway_server.errors import InvalidInputError, MemoryUnavailableError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_text, check_texts
from headway_server.settings import ServerSettings
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.job import gather
from headway_server.tasks.parameters import check_sampling, draw_seed
from headway_server.tasks.synthesis.encoding import AudioWriter
from headway_server.tasks.synthesis.request import (
    MAX_TEXTS,
    SynthesisRequest,
    check_own_rate,
    check_voice,
    most_frames,
)
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.synthesis.windows import WindowDecoder

_FLOAT_BYTES: Final = np.dtype(np.float32).itemsize
_CODE_BYTES: Final = np.dtype(np.int64).itemsize
_SAMPLE_BYTES: Final = np.dtype(np.int16).itemsize
_CODEC, _WAVEFORM = DELAYED_TENSORS


class DelayedWriter(FrameWriter):
    """Writes the codes of a text, int64 (F, K)."""

    def __init__(self, delayed: DelayedCodes, num_frames: int, parameters: SamplingParameters) -> None:
        """Begins with no codes.

        Args:
            delayed: How the model writes.
            num_frames: F.
            parameters: How codes are chosen.
        """
        self._delayed = delayed
        self._num_frames = num_frames
        self._parameters = parameters
        self.num_rows = delayed.num_rows
        # Row t has what step t reads: of codebook k the code of frame t - 1 - k.
        steps = delayed.steps_of(num_frames)
        self._grid = np.full((steps + 1, delayed.num_books), delayed.codebook_size, np.int64)
        self._num_written = 0
        books = np.arange(delayed.num_books, dtype=np.uint64)
        self._streams = stream_states(np.full(len(books), parameters.seed, np.uint64), books)  # (K,)
        self._condition = np.array([1, 0], np.float32)[: self.num_rows]

    def read(self) -> tuple[NDArray[np.int64], Mapping[str, NDArray[Any]]]:
        """See `FrameWriter`: the codes of a step, and which rows read the text."""
        codes = np.repeat(self._grid[self._num_written][np.newaxis], self.num_rows, axis=0)
        return np.zeros(self.num_rows, np.int64), {"codes": codes, "condition": self._condition}

    def write(self, output: NDArray[np.float32]) -> FinishReason | None:
        """See `FrameWriter`: logits of each codebook, with the text and without it."""
        logits = output.reshape(self.num_rows, self._delayed.num_books, -1)  # (R, K, V)
        guided = logits[0]
        if self.num_rows > 1:
            guided = logits[1] + np.float32(self._delayed.guidance_scale) * (logits[0] - logits[1])
        codes = self._choose(guided)
        self._num_written += 1
        frames = self._num_written - 1 - np.arange(self._delayed.num_books)
        is_there = (frames >= 0) & (frames < self._num_frames)
        self._grid[self._num_written, is_there] = codes[is_there]
        return None

    def _choose(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """Returns the likeliest codes, or draws them: (K, V) -> (K,)."""
        parameters, count = self._parameters, len(logits)
        if parameters.temperature == 0 or parameters.top_k == 1:
            likeliest: NDArray[np.int64] = logits.argmax(axis=1)
            return likeliest
        nucleus = Nucleus(
            top_p=np.full(count, parameters.top_p),
            min_p=np.full(count, parameters.min_p, np.float32),
            numbers=uniform(self._streams, np.full(count, self._num_written, np.uint64)),
        )
        return draw_top_k(
            np.ascontiguousarray(logits),
            logits.max(axis=1),
            np.full(count, parameters.temperature, np.float32),
            np.full(count, parameters.top_k or logits.shape[1]),
            nucleus,
        )

    def take(self) -> NDArray[np.int64]:
        """See `OutputAssembler`; streams begin when all codes are there."""
        raise NotImplementedError("codes are not streamed")

    def finish(self) -> NDArray[np.int64]:
        """Returns all codes."""
        books = np.arange(self._delayed.num_books)
        codes: NDArray[np.int64] = self._grid[np.arange(self._num_frames)[:, np.newaxis] + books + 1, books]
        return codes

    def join(self, parts: Elements[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Joins parts."""
        return np.concatenate(parts)

    def __repr__(self) -> str:
        return f"DelayedWriter({self._num_written} steps for {self._num_frames} frames)"


class DelayedModel(DecodingModel, Synthesizer):
    """Makes audio of texts."""

    _noun = "texts"
    _field = "texts"
    _generates_texts = False
    _stepper = FrameStepper

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; `load` adds what makes samples.

        Raises:
            MemoryUnavailableError: There are fewer slots than a text takes.
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        super().__init__(bundle, parts)
        self._delayed = demanded(bundle.manifest.delayed)
        if self._lanes.num_slots < self._delayed.num_rows:
            raise MemoryUnavailableError(
                f"{bundle.manifest.name}: has {self._lanes.num_slots} slot, and a text takes {self._delayed.num_rows} "
                "for its guidance; set --num-slots to that, or free memory"
            )
        self._max_bytes = parts.max_input_bytes
        self._writer = AudioWriter(self._delayed.sampling_rate)
        self._codec: Batcher
        self._windows: WindowDecoder
        self._frame_bytes: int

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """See `DecodingModel.load`; opens the codec too."""
        model = super().load(bundle, runtime, settings, observer)
        model._open(runtime, observer)  # noqa: SLF001 (its own class)
        return model

    def _open(self, runtime: Runtime, observer: Observer) -> None:
        """Opens what makes samples of codes, and runs it once.

        Raises:
            BundleError: A graph cannot be loaded, does not run, or does not fit the manifest.
        """
        manifest, delayed = self.bundle.manifest, self._delayed
        graphs = manifest.variants[self.precision].graphs
        codec, waveform = (BatchGraph(runtime.open(self.bundle, graphs[role])) for role in DELAYED_TENSORS)  # type: ignore[index]
        width = fixed_size(graphs["codec_decoder"].outputs[0], -1)
        frames = delayed.frames_per_run
        codes = np.full((frames, delayed.num_books), delayed.codebook_size - 1)
        codec.warm_up({"codes": codes}, frames, {"states": (frames, width)})
        states = np.zeros((frames, width), np.float32)
        waveform.warm_up({"states": states}, frames, {"samples": (frames * delayed.hop_length,)})
        model = ModelId(name=manifest.name, version=manifest.version)
        self._codec = Batcher(codec, budget=delayed.max_frames, model=model, session=codec.session, observer=observer)
        decoder = Batcher(
            waveform,
            budget=frames + 2 * delayed.context_frames,
            model=model,
            session=waveform.session,
            observer=observer,
        )
        self._windows = WindowDecoder(
            decoder,
            input_name="states",
            frames_per_run=frames,
            context_frames=delayed.context_frames,
            hop_length=delayed.hop_length,
        )
        of_codes = 2 * delayed.num_books * _CODE_BYTES
        self._frame_bytes = of_codes + width * _FLOAT_BYTES + 2 * delayed.hop_length * _SAMPLE_BYTES
        self.workers += [self._codec, decoder]

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`."""
        assert encoder is not None, "the manifest's validator demands it"
        delayed = demanded(self.bundle.manifest.delayed)
        decoder.set_sources(encoder.encode([EncoderInput.of_tokens(np.array([self._largest_id]))]))
        tokens, further = DelayedWriter(delayed, 1, SamplingParameters(max_new_tokens=1)).read()
        decoder.decode(tokens, np.zeros(len(tokens), np.int64), further=further)
        decoder.set_sources([])

    @property
    def voices(self) -> tuple[str, ...]:
        """See `Synthesizer`; there are none."""
        return ()

    @property
    def sampling_rate(self) -> int:
        """See `Synthesizer`."""
        return self._delayed.sampling_rate

    @property
    def max_seconds(self) -> float:
        """See `Synthesizer`."""
        return self._delayed.max_frames * self._frame_s

    @property
    def _frame_s(self) -> float:
        return self._delayed.hop_length / self._delayed.sampling_rate

    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """See `Synthesizer`."""
        num_frames = self._check(request)
        self._writer.check(request.format)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        with self._job(len(texts), num_frames, request) as job:
            read = await self._read(job, texts, fields)
            return job.answer(await gather(self._make(job, ids, num_frames, request) for ids in read))

    async def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """See `Synthesizer`; a part is a window, and the first is made when all codes are there."""
        num_frames = self._check(request)
        check_text(field, text, self._max_text_bytes)
        with self._job(1, num_frames, request) as job:
            [ids] = await self._read(job, [text], [field])
            seed = draw_seed(request.sampling.get("seed"))
            states = await self._states(job, ids, num_frames, request, seed=seed)
            for window in self._windows.windows(num_frames):
                [samples] = await self._windows.decode(job, states, [window], {})
                yield SpeechPart(samples=samples, num_new_tokens=window[1] * self._delayed.num_books)
            yield job.answer([self._result(num_frames, b"", seed)])

    def _check(self, request: SynthesisRequest) -> int:
        """Checks parameters before any work is done, and returns the frames of a text.

        Raises:
            InvalidInputError: One is out of its range, or would change an answer and cannot.
        """
        check_voice(request.voice, self.voices)
        check_own_rate(request)
        check_sampling(self._parameters(1, request, 0), self._delayed.codebook_size)
        return most_frames(request, self._delayed.max_frames, self._frame_s)

    def _parameters(self, num_frames: int, request: SynthesisRequest, seed: int) -> SamplingParameters:
        defaults = self.bundle.manifest.sampling_defaults or SamplingDefaults()
        known = defaults.model_dump(include={"temperature", "top_k", "top_p", "min_p"})
        values = {**known, **request.sampling, "seed": seed}
        return SamplingParameters(max_new_tokens=self._delayed.steps_of(num_frames), **values)

    def _job(self, count: int, num_frames: int, request: SynthesisRequest) -> DecodingJob:
        """Begins a call, with the memory of all its texts.

        Raises:
            InvalidInputError: Several texts have more audio than calls may hold.
        """
        num_bytes = count * num_frames * self._frame_bytes
        if count > 1 and num_bytes > self._max_bytes:
            raise InvalidInputError(
                "texts",
                f"have more than {self._max_bytes >> 20} MiB of audio (--max-waiting-mib); send them in several calls",
            )
        steps = self._delayed.steps_of(num_frames)
        return self._begin(count, num_tokens=steps, num_bytes=num_bytes, deadline=request.deadline)

    async def _read(self, job: DecodingJob, texts: Elements[str], fields: Elements[str]) -> list[NDArray[np.int64]]:
        """Returns the tokens of texts, (T,) each."""
        with job.preparing():
            encoded = await self._tokenizer.encode_limited(
                texts, fields=fields, max_tokens=self.limits.max_input_tokens, truncate=False
            )
        return [one.input_ids for one in encoded]

    async def _states(
        self, job: DecodingJob, ids: NDArray[np.int64], num_frames: int, request: SynthesisRequest, *, seed: int
    ) -> NDArray[np.float32]:
        """Writes the codes of a text, and returns what the codec makes of them before its windows, (F, D)."""
        parameters = self._parameters(num_frames, request, seed)
        sequence = FrameSequence(
            prompt_ids=START,
            source=EncoderInput.of_tokens(ids),
            parameters=parameters,
            output=DelayedWriter(self._delayed, num_frames, parameters),
            eos_id=None,
            deadline=request.deadline,
            caller=current_caller(),
        )
        [written] = await job.run([sequence])
        found: BatchedResults[Tensors] = await job.batch(
            self._codec,
            [{"codes": written.output}],
            outputs=DELAYED_TENSORS[_CODEC][1],
            num_bytes=0,
            num_read=0,  # codes are charged when they are generated
            lengths=[num_frames],
            groups=[num_frames],
        )
        job.note(found.runs)
        states: NDArray[np.float32] = found.results[0]["states"]
        return states

    async def _make(
        self, job: DecodingJob, ids: NDArray[np.int64], num_frames: int, request: SynthesisRequest
    ) -> SpokenText:
        seed = draw_seed(request.sampling.get("seed"))
        states = await self._states(job, ids, num_frames, request, seed=seed)
        parts = await self._windows.decode(job, states, self._windows.windows(num_frames), {})
        return self._result(num_frames, await self._encode(np.concatenate(parts), request), seed)

    def _result(self, num_frames: int, audio: bytes, seed: int) -> SpokenText:
        return SpokenText(
            audio=audio,
            duration_s=num_frames * self._frame_s,
            finish_reason=FinishReason.LENGTH,
            num_new_tokens=num_frames * self._delayed.num_books,
            seed=seed,
        )
