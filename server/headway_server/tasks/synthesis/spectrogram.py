"""Served speech synthesis by spectrograms: SpeechT5 (Ao et al. 2022, arXiv 2110.07205).

An encoder reads a text. A decoder with a cache writes frames of a spectrogram, some a step, and how likely the speech
ends with each; it reads the last of them, of which dropout leaves out a part in speech too (Shen et al. 2018, section
2.2). A second network and a vocoder (HiFi-GAN, Kong et al. 2020) make samples of frames, in windows. An audio does not
depend on the rest of a batch, nor on streaming.

T tokens, F frames, M numbers of a frame, L layers with dropout, U numbers of such a layer, S samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Batcher, BatchGraph
from headway_server.bundles import VOICES_FILE, Bundle, SpectrogramSpeech, demanded
from headway_server.decoding.core.frames import START, FrameSequence, FrameStepper, FrameWriter
from headway_server.decoding.interfaces import Decoder, Encoder, EncoderInput
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sequence import FinishReason, SequenceResult
from headway_server.errors import BundleError, InvalidInputError
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
    SynthesisRequest,
    check_draws_no_codes,
    check_own_rate,
    check_voice,
    most_frames,
)
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.synthesis.windows import WindowDecoder

_FLOAT_BYTES: Final = np.dtype(np.float32).itemsize
_SAMPLE_BYTES: Final = np.dtype(np.int16).itemsize


class SpectrogramWriter(FrameWriter):
    """Writes the frames of a text, float32 (F, M)."""

    num_rows = 1

    def __init__(self, speech: SpectrogramSpeech, speaker: NDArray[np.float32], seed: int) -> None:
        """Begins with a frame of zeros.

        Args:
            speech: How the model speaks.
            speaker: The voice, (speaker_width,).
            seed: Of the dropout.
        """
        self._speech = speech
        self._speaker = speaker[np.newaxis]
        self._random = np.random.Generator(np.random.Philox(seed))
        self._last: NDArray[np.float32] = np.zeros((1, speech.num_bins), np.float32)
        self._frames: list[NDArray[np.float32]] = []
        self._num_taken = 0

    def read(self) -> tuple[NDArray[np.int64], Mapping[str, NDArray[Any]]]:
        """See `FrameWriter`; draws which numbers of each layer are kept."""
        dropout = draw_dropout(self._random, self._speech)[np.newaxis]
        return START, {"frame": self._last, "dropout": dropout, "speaker": self._speaker}

    def write(self, output: NDArray[np.float32]) -> FinishReason | None:
        """See `FrameWriter`: the frames of a step, then the logit of the end of each."""
        count, width = self._speech.frames_per_step, self._speech.num_bins
        frames = output[0, : count * width].reshape(count, width).copy()
        self._frames.append(frames)
        self._last = frames[-1:]
        with np.errstate(over="ignore"):
            probabilities = 1 / (1 + np.exp(-output[0, count * width :]))
        return FinishReason.END_OF_SEQUENCE if probabilities.sum() >= self._speech.end_probability else None

    def take(self) -> NDArray[np.float32]:
        """Returns the frames since the last call."""
        taken, self._num_taken = self._frames[self._num_taken :], len(self._frames)
        return self.join(taken)

    def finish(self) -> NDArray[np.float32]:
        """Returns all frames."""
        return self.join(self._frames)

    def join(self, parts: Elements[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Joins parts."""
        return np.concatenate([np.empty((0, self._speech.num_bins), np.float32), *parts])

    def __repr__(self) -> str:
        return f"SpectrogramWriter({len(self._frames)} steps)"


def draw_dropout(random: np.random.Generator, speech: SpectrogramSpeech) -> NDArray[np.float32]:
    """Returns the factor of each number of a step's layers with dropout, (L, U): `kept_scale`, or 0."""
    is_kept = random.random((speech.num_layers, speech.num_units), np.float32) < speech.kept
    return is_kept * np.float32(speech.kept_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """What is read of a text, and how long its audio may be."""

    token_ids: NDArray[np.int64]
    """(T,)"""
    num_frames: int
    """Most frames."""


class SpectrogramModel(DecodingModel, Synthesizer):
    """Speaks texts."""

    _noun = "texts"
    _field = "texts"
    _generates_texts = False
    _stepper = FrameStepper

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; `load` adds what makes samples.

        Raises:
            BundleError: A voice does not match the model.
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        super().__init__(bundle, parts)
        self._speech = demanded(bundle.manifest.spectrogram)
        self._voices = _load_voices(bundle, self._speech)
        self._max_bytes = parts.max_input_bytes
        self._frame_bytes = self._speech.num_bins * _FLOAT_BYTES + 2 * self._speech.hop_length * _SAMPLE_BYTES
        self._writer = AudioWriter(self._speech.sampling_rate)
        self._windows: WindowDecoder

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """See `DecodingModel.load`; opens the vocoder too."""
        model = super().load(bundle, runtime, settings, observer)
        model._open(runtime, observer)  # noqa: SLF001 (its own class)
        return model

    def _open(self, runtime: Runtime, observer: Observer) -> None:
        """Opens what makes samples of frames, and runs it once.

        Raises:
            BundleError: It cannot be loaded, does not run, or does not fit the manifest.
        """
        manifest, speech = self.bundle.manifest, self._speech
        graph = BatchGraph(runtime.open(self.bundle, manifest.variants[self.precision].graphs["waveform_decoder"]))
        frames = np.zeros((speech.frames_per_run, speech.num_bins), np.float32)
        samples = {"samples": (speech.frames_per_run * speech.hop_length,)}
        graph.warm_up({"spectrogram": frames}, speech.frames_per_run, samples)
        batcher = Batcher(
            graph,
            budget=speech.frames_per_run + 2 * speech.context_frames,
            model=ModelId(name=manifest.name, version=manifest.version),
            session=graph.session,
            observer=observer,
        )
        self._windows = WindowDecoder(
            batcher,
            input_name="spectrogram",
            frames_per_run=speech.frames_per_run,
            context_frames=speech.context_frames,
            hop_length=speech.hop_length,
        )
        self.workers.append(batcher)

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`."""
        assert encoder is not None, "the manifest's validator demands it"
        decoder.set_sources(encoder.encode([EncoderInput.of_tokens(np.array([self._largest_id]))]))
        tokens, further = SpectrogramWriter(self._speech, next(iter(self._voices.values())), 0).read()
        decoder.decode(tokens, np.zeros(1, np.int64), further=further)
        decoder.set_sources([])

    @property
    def voices(self) -> tuple[str, ...]:
        """See `Synthesizer`."""
        return tuple(self._voices)

    @property
    def sampling_rate(self) -> int:
        """See `Synthesizer`."""
        return self._speech.sampling_rate

    @property
    def max_seconds(self) -> float:
        """See `Synthesizer`."""
        return self._max_frames * self._frame_s

    @property
    def _frame_s(self) -> float:
        return self._speech.hop_length / self._speech.sampling_rate

    @property
    def _max_frames(self) -> int:
        return self.limits.max_total_tokens * self._speech.frames_per_step

    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """See `Synthesizer`."""
        num_frames = self._check(request)
        self._writer.check(request.format)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        with self._job(len(texts), num_frames, request) as job:
            read = await self._read(job, texts, fields, num_frames)
            return job.answer(await gather(self._speak(job, text, request) for text in read))

    async def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """See `Synthesizer`; a part is a window, sent once the frames are there that it depends on."""
        num_frames = self._check(request)
        check_text(field, text, self._max_text_bytes)
        with self._job(1, num_frames, request) as job:
            [read] = await self._read(job, [text], [field], num_frames)
            seed = draw_seed(request.sampling.get("seed"))
            sequence = self._sequence(read, request, seed, wants_deltas=True)
            frames, num_sent = np.empty((0, self._speech.num_bins), np.float32), 0
            async with aclosing(job.stream([sequence])) as deltas:
                async for delta in deltas:
                    frames = np.concatenate([frames, delta.output])
                    windows = self._windows.windows(len(frames))
                    for window in windows[num_sent : self._windows.num_ready(len(frames))]:
                        yield await self._part(job, frames, window)
                        num_sent += 1
            frames = frames[: read.num_frames]
            for window in self._windows.windows(len(frames))[num_sent:]:
                yield await self._part(job, frames, window)
            yield job.answer([self._result(sequence.reply.result.result(), len(frames), b"", seed)])

    async def _part(self, job: DecodingJob, frames: NDArray[np.float32], window: tuple[int, int]) -> SpeechPart:
        [samples] = await self._windows.decode(job, frames, [window], {})
        return SpeechPart(samples=samples, num_new_tokens=window[1])

    def _check(self, request: SynthesisRequest) -> int:
        """Checks parameters before any work is done, and returns the most frames of a text.

        Raises:
            InvalidInputError: One is out of its range, or would change an answer and cannot.
        """
        check_voice(request.voice, self.voices)
        check_own_rate(request)
        check_draws_no_codes(request, self.bundle.manifest.name)
        return most_frames(request, self._max_frames, self._frame_s)

    def _job(self, count: int, num_frames: int, request: SynthesisRequest) -> DecodingJob:
        """Begins a call, whose memory is reserved once its texts are read."""
        return self._begin(count, num_tokens=self._steps_of(num_frames), num_bytes=0, deadline=request.deadline)

    def _steps_of(self, num_frames: int) -> int:
        return -(-num_frames // self._speech.frames_per_step)

    async def _read(
        self, job: DecodingJob, texts: Elements[str], fields: Elements[str], num_frames: int
    ) -> list[_Text]:
        """Reads texts and reserves the memory of their audio.

        Raises:
            InvalidInputError: A text is too long, or several have more audio than calls may hold.
        """
        speech = self._speech
        with job.preparing():
            encoded = await self._tokenizer.encode_limited(
                texts, fields=fields, max_tokens=self.limits.max_input_tokens, truncate=False
            )
        read = []
        for one in encoded:
            most = int(len(one.input_ids) * speech.frames_per_token / speech.frames_per_step) * speech.frames_per_step
            most = max(most, speech.frames_per_step)  # there is one step
            read.append(_Text(token_ids=one.input_ids, num_frames=min(num_frames, most)))
        num_bytes = sum(one.num_frames for one in read) * self._frame_bytes
        if len(read) > 1 and num_bytes > self._max_bytes:
            raise InvalidInputError(
                "texts",
                f"may have more than {self._max_bytes >> 20} MiB of audio (--max-waiting-mib); send them in several "
                "calls",
            )
        job.reserve(num_bytes)
        return read

    def _sequence(
        self, text: _Text, request: SynthesisRequest, seed: int, *, wants_deltas: bool = False
    ) -> FrameSequence:
        speaker = self._voices[request.voice or self.voices[0]]
        return FrameSequence(
            prompt_ids=START,
            source=EncoderInput.of_tokens(text.token_ids),
            parameters=SamplingParameters(max_new_tokens=self._steps_of(text.num_frames)),
            output=SpectrogramWriter(self._speech, speaker, seed),
            eos_id=None,
            deadline=request.deadline,
            wants_deltas=wants_deltas,
            caller=current_caller(),
        )

    async def _speak(self, job: DecodingJob, text: _Text, request: SynthesisRequest) -> SpokenText:
        seed = draw_seed(request.sampling.get("seed"))
        [written] = await job.run([self._sequence(text, request, seed)])
        frames = written.output[: text.num_frames]
        parts = await self._windows.decode(job, frames, self._windows.windows(len(frames)), {})
        audio = await self._encode(np.concatenate(parts), request)
        return self._result(written, len(frames), audio, seed)

    def _result(self, written: SequenceResult, num_frames: int, audio: bytes, seed: int) -> SpokenText:
        return SpokenText(
            audio=audio,
            duration_s=num_frames * self._frame_s,
            finish_reason=written.finish_reason,
            num_new_tokens=num_frames,
            seed=seed,
        )


def _load_voices(bundle: Bundle, speech: SpectrogramSpeech) -> dict[str, NDArray[np.float32]]:
    """Reads the voices, (speaker_width,) each, in the order of the manifest's labels.

    Raises:
        BundleError: A voice is missing in the file, or has other numbers.
    """
    file = bundle.file(VOICES_FILE)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        voices = {name: np.array(content[name], np.float32) for name in bundle.manifest.labels}
        for name, voice in voices.items():
            if voice.shape != (speech.speaker_width,) or not all(map(math.isfinite, voice.tolist())):
                raise ValueError(f"{name} is no vector of {speech.speaker_width} numbers")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{file}: cannot read the voices ({error}); export the model again") from error
    return voices
