"""Served speech synthesis by normalizing flows: VITS (Kim et al. 2021, arXiv 2106.06103).

An encoder gives the duration of each token of a text, and mean and deviation of its frames. Frames are drawn from these
normal distributions. A flow and a generator make samples of them; both read a limited number of frames around each, so
audio of any length is made in windows, with the samples that the whole has. An audio does not depend on the rest of a
batch, nor on streaming.

T tokens, F frames, D channels of a frame, S samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Elements
from dataclasses import dataclass
from functools import partial
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, BatchGraph, Tensors
from headway_server.batching.batcher import ItemTimes
from headway_server.bundles import FLOW_TENSORS, TOKENIZER_FILE, Bundle, FlowSpeech, GraphRole, Precision, demanded
from headway_server.decoding.sequence import FinishReason
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.pool import audio_pool
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_text, check_texts
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.job import Job, gather
from headway_server.tasks.parameters import draw_seed
from headway_server.tasks.synthesis.encoding import AudioWriter
from headway_server.tasks.synthesis.request import (
    MAX_TEXTS,
    SynthesisRequest,
    check_draws_no_codes,
    check_rate,
    check_voice,
    most_frames,
)
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.synthesis.windows import WindowDecoder

_ROLES: Final[tuple[GraphRole, ...]] = ("text_encoder", "waveform_decoder")
_FLOAT_BYTES: Final = np.dtype(np.float32).itemsize
_SAMPLE_BYTES: Final = np.dtype(np.int16).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Frames of a text's audio, before the flow."""

    latents: NDArray[np.float32]
    """(F, D)"""
    is_cut: bool
    """True if frames were left out."""


class FlowModel(Synthesizer):
    """Speaks texts."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        settings: ServerSettings,
        graphs: Mapping[GraphRole, BatchGraph],
        *,
        observer: Observer,
    ) -> None:
        """Assembles a model from its parts; `load` makes the parts.

        Raises:
            BundleError: The tokenizer cannot be read.
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        manifest = bundle.manifest
        super().__init__(bundle, precision, graphs["text_encoder"].device)
        self._flow = demanded(manifest.flow)
        self._text = FlowText(TextTokenizer.load(bundle.file(TOKENIZER_FILE)), self._flow)
        self._max_tokens = self._text.most_characters(demanded(manifest.limits.max_input_tokens))
        self._max_text_bytes = settings.max_text_bytes
        self._max_bytes = settings.batching.max_waiting_bytes
        # Means and noise of a frame while it is drawn, then its samples in parts and as a whole.
        self._frame_bytes = 2 * self._flow.num_channels * _FLOAT_BYTES + 2 * self._flow.hop_length * _SAMPLE_BYTES
        self._writer = AudioWriter(self._flow.sampling_rate)
        model = ModelId(name=manifest.name, version=manifest.version)
        self._encoder, self._decoder = (
            Batcher(graphs[role], budget=budget, model=model, session=graphs[role].session, observer=observer)
            for role, budget in zip(_ROLES, _budgets(bundle), strict=True)
        )
        self._windows = WindowDecoder(
            self._decoder,
            input_name="latents",
            frames_per_run=self._flow.frames_per_run,
            context_frames=self._flow.context_frames,
            hop_length=self._flow.hop_length,
        )
        self.workers += [self._encoder, self._decoder]
        self._admission = Admission(
            limit=settings.batching.max_waiting_texts, noun="texts", owner=manifest.name, pace=MeasuredPace()
        )
        self._memory = Admission(
            limit=None, noun="frames of audio", owner=manifest.name, max_bytes=settings.batching.max_waiting_bytes
        )

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once.

        Raises:
            BundleError: A graph cannot be loaded, or does not fit the manifest.
            RuntimeUnavailableError: The bundle does not have the variant, or a library is not installed.
        """
        manifest = bundle.manifest
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graphs = {role: BatchGraph(runtime.open(bundle, variant.graphs[role])) for role in _ROLES}
        flow, speaker = demanded(manifest.flow), {"speaker": np.array(0)} if manifest.labels else {}
        largest = TextTokenizer.load(bundle.file(TOKENIZER_FILE)).largest_id
        text = {"input_ids": np.array([largest] * 3), "duration_noise": np.zeros((2, 3), np.float32), **speaker}
        channels = (3, flow.num_channels)
        graphs["text_encoder"].warm_up(text, 3, {"durations": (3,), "means": channels, "deviations": channels})
        latents = {"latents": np.zeros((flow.frames_per_run, flow.num_channels), np.float32), **speaker}
        num_samples = flow.frames_per_run * flow.hop_length
        graphs["waveform_decoder"].warm_up(latents, flow.frames_per_run, {"samples": (num_samples,)})
        return cls(bundle, precision, settings, graphs, observer=observer)

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"FlowModel({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"

    @property
    def voices(self) -> tuple[str, ...]:
        """See `Synthesizer`."""
        return self.bundle.manifest.labels

    @property
    def sampling_rate(self) -> int:
        """See `Synthesizer`."""
        return self._flow.sampling_rate

    @property
    def max_seconds(self) -> float:
        """See `Synthesizer`."""
        return self._flow.max_frames * self._flow.hop_length / self._flow.sampling_rate

    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """See `Synthesizer`."""
        self._check(request)
        self._writer.check(request.format)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        with self._begin(len(texts), request.deadline) as job:
            rows, sizes = await self._read(job, texts, fields), list[int]()
            return job.answer(await gather(self._speak(job, ids, request, sizes) for ids in rows))

    async def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """See `Synthesizer`."""
        self._check(request)
        check_text(field, text, self._max_text_bytes)
        with self._begin(1, request.deadline) as job:
            [ids] = await self._read(job, [text], [field])
            seed = draw_seed(request.sampling.get("seed"))
            frames = await self._frames(job, ids, request, seed, [])
            for window in self._windows.windows(len(frames.latents)):
                [samples] = await self._windows.decode(job, frames.latents, [window], self._speaker(request))
                yield SpeechPart(samples=samples, num_new_tokens=window[1])
            yield job.answer([self._result(frames, b"", seed)])

    def _check(self, request: SynthesisRequest) -> None:
        """Checks parameters before any work is done.

        Raises:
            InvalidInputError: One is out of its range, or would change an answer and cannot.
        """
        check_voice(request.voice, self.voices)
        check_rate(request)
        most_frames(request, self._flow.max_frames, self._flow.hop_length / self._flow.sampling_rate)
        check_draws_no_codes(request, self.bundle.manifest.name)

    def _begin(self, count: int, deadline: float | None) -> Job[Batcher]:
        return Job(self._decoder, self._admission, self._memory, count=count, work=1, num_bytes=0, deadline=deadline)

    async def _read(self, job: Job[Batcher], texts: Elements[str], fields: Elements[str]) -> list[NDArray[np.int64]]:
        """Returns the tokens of texts, (T,) each."""
        with job.preparing():
            return await self._text.read(texts, fields, self._max_tokens)

    async def _speak(
        self, job: Job[Batcher], ids: NDArray[np.int64], request: SynthesisRequest, sizes: list[int]
    ) -> SpokenText:
        seed = draw_seed(request.sampling.get("seed"))
        frames = await self._frames(job, ids, request, seed, sizes)
        windows = self._windows.windows(len(frames.latents))
        parts = await self._windows.decode(job, frames.latents, windows, self._speaker(request))
        began = time.monotonic()
        audio = await self._encode(np.concatenate(parts), request)
        job.note([ItemTimes(began, began, time.monotonic())])
        return self._result(frames, audio, seed)

    def _result(self, frames: _Frames, audio: bytes, seed: int) -> SpokenText:
        num_frames, flow = len(frames.latents), self._flow
        return SpokenText(
            audio=audio,
            duration_s=num_frames * flow.hop_length / flow.sampling_rate,
            finish_reason=FinishReason.LENGTH if frames.is_cut else FinishReason.END_OF_SEQUENCE,
            num_new_tokens=num_frames,
            seed=seed,
        )

    async def _frames(
        self,
        job: Job[Batcher],
        ids: NDArray[np.int64],
        request: SynthesisRequest,
        seed: int,
        sizes: list[int],
    ) -> _Frames:
        """Draws the frames of a text, and adds their bytes to those of the call's texts.

        Raises:
            InvalidInputError: Several texts have more audio than calls may hold.
        """
        flow, random = self._flow, np.random.Generator(np.random.Philox(seed))
        noise = random.standard_normal((2, len(ids)), np.float32) * np.float32(flow.duration_noise_scale)
        item = {"input_ids": ids, "duration_noise": noise, **self._speaker(request)}
        encoded: BatchedResults[Tensors] = await job.batch(
            self._encoder,
            [item],
            outputs=FLOW_TENSORS["text_encoder"][1],
            num_bytes=sum(array.nbytes for array in item.values()),
            num_read=len(ids),
            lengths=[len(ids)],
            groups=[len(ids)],  # a padded text would have other durations
        )
        job.note(encoded.runs)
        rate = flow.speaking_rate * check_rate(request)
        most = most_frames(request, flow.max_frames, flow.hop_length / flow.sampling_rate)
        num_frames, durations = frame_counts(encoded.results[0]["durations"], rate)
        sizes.append(min(num_frames, most) * self._frame_bytes)
        if len(sizes) > 1 and sum(sizes) > self._max_bytes:
            raise InvalidInputError(
                "texts",
                f"have more than {self._max_bytes >> 20} MiB of audio (--max-waiting-mib); send them in several calls",
            )
        job.reserve_more(sizes[-1])
        draw = partial(self._draw, encoded.results[0], durations, min(num_frames, most), random)
        with job.preparing():
            latents = await asyncio.get_running_loop().run_in_executor(audio_pool(), draw)
        return _Frames(latents=latents, is_cut=num_frames > most)

    def _draw(
        self, encoded: Tensors, durations: NDArray[np.int64], num_frames: int, random: np.random.Generator
    ) -> NDArray[np.float32]:
        """Draws the first frames, (F, D), from the distributions of tokens with durations in frames, (T,)."""
        noise = random.standard_normal((num_frames, self._flow.num_channels), np.float32)
        noise *= np.float32(self._flow.noise_scale)
        if durations.any():  # else the one frame of a text without any has a mean of 0 and a deviation of 1
            owners = np.searchsorted(np.cumsum(durations), np.arange(num_frames), side="right")
            noise *= encoded["deviations"][owners]
            noise += encoded["means"][owners]
        return noise

    def _speaker(self, request: SynthesisRequest) -> dict[str, NDArray[np.int64]]:
        if not self.voices:
            return {}
        return {"speaker": np.array(self.voices.index(request.voice) if request.voice else 0)}


class FlowText:
    """Makes tokens of texts, a character each. Safe to use from several threads."""

    def __init__(self, tokenizer: TextTokenizer, flow: FlowSpeech) -> None:
        self._tokenizer = tokenizer
        self._blank = flow.blank
        self._bare = frozenset(flow.bare_tokens)

    def __repr__(self) -> str:
        return f"FlowText({self._tokenizer!r})"

    def most_characters(self, max_tokens: int) -> int:
        """Returns how many characters have at most so many tokens."""
        return max_tokens if self._blank is None else max(1, (max_tokens - 1) // 2)

    async def read(self, texts: Elements[str], fields: Elements[str], most: int) -> list[NDArray[np.int64]]:
        """Returns the tokens of texts, (T,) each.

        Args:
            texts: The texts.
            fields: Their names in the request.
            most: Characters of a text that the model reads.

        Raises:
            InvalidInputError: A text is too long, or has no character that the model knows.
        """
        encoded = await self._tokenizer.encode_limited(
            texts, fields=fields, max_tokens=most, truncate=False, add_special_tokens=False
        )
        return [self.interspersed(one.input_ids) for one in encoded]

    def interspersed(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns tokens with a blank around each; bare ones have none between them, and none at the ends of a text."""
        if self._blank is None:
            return ids
        is_bare = np.array([True, *(token in self._bare for token in ids.tolist()), True])
        spread = np.full(2 * len(ids) + 1, self._blank)
        spread[1::2] = ids
        is_kept = np.ones(len(spread), bool)
        is_kept[::2] = ~(is_bare[:-1] & is_bare[1:])
        return spread[is_kept] if self._bare else spread


def frame_counts(durations: NDArray[np.float32], rate: float) -> tuple[int, NDArray[np.int64]]:
    """Returns the frames of a text, at least one, and those of each token.

    Args:
        durations: (T,), at a speaking rate of 1.
        rate: Times as fast.
    """
    frames = np.ceil(durations * np.float32(1.0 / rate))
    counts = np.clip(np.nan_to_num(frames, nan=0.0), 0, 2**31).astype(np.int64)
    return max(int(counts.sum()), 1), counts


def _budgets(bundle: Bundle) -> tuple[int, int]:
    """Returns the tokens of a batch of texts, and the frames of one of windows."""
    flow = demanded(bundle.manifest.flow)
    return demanded(bundle.manifest.limits.max_input_tokens), flow.frames_per_run + 2 * flow.context_frames
