"""Served speech synthesis by normalizing flows: VITS (Kim et al. 2021, arXiv 2106.06103); and in a style: Kokoro.

An encoder gives the duration of each token of a text, and mean and deviation of its frames. Frames are drawn from these
normal distributions. A flow and a generator make samples of them; both read a limited number of frames around each, so
audio of any length is made in windows, with the samples that the whole has. An audio does not depend on the rest of a
batch, nor on streaming.

An excited model's frames are not drawn, but the noise that its samples read. They depend on all frames, so an audio is
made in one run.

T tokens, F frames, D channels of a frame, S samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Elements
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, BatchGraph, Tensors
from headway_server.batching.batcher import ItemTimes
from headway_server.bundles import TOKENIZER_FILE, Bundle, FlowSpeech, GraphRole, Precision, demanded
from headway_server.bundles.manifest import NUM_CURVES
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
from headway_server.tasks.synthesis.windows import Window, WindowDecoder

_CURVES: Final = "curves"
_FLOAT_BYTES: Final = np.dtype(np.float32).itemsize
_SAMPLE_BYTES: Final = np.dtype(np.int16).itemsize
_TRIED_FRAMES: Final = 8
"""Frames of the run at the start of a model whose audio is one run."""
_MOST_OF_A_PART: Final = 10
"""Seconds of a part of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Frames of a text's audio, before the flow or the generator."""

    latents: NDArray[np.float32]
    """(F, D)"""
    beside: dict[str, NDArray[np.float32]]
    """What the samples of an excited model read of each frame beside it, (F, ...), by name."""
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
        num_floats = 2 * self._flow.num_channels + self._flow.is_excited * (self._flow.hop_length + NUM_CURVES)
        self._frame_bytes = num_floats * _FLOAT_BYTES + 2 * self._flow.hop_length * _SAMPLE_BYTES
        self._writer = AudioWriter(self._flow.sampling_rate)
        model = ModelId(name=manifest.name, version=manifest.version)
        num_tokens, num_frames = _budgets(bundle)
        batchers = {
            role: Batcher(
                graph,
                budget=num_tokens if role == "text_encoder" else num_frames,
                model=model,
                session=graph.session,
                observer=observer,
            )
            for role, graph in graphs.items()
        }
        self._encoder, self._decoder = batchers["text_encoder"], batchers["waveform_decoder"]
        self._pitch = batchers.get("pitch_predictor")
        self._windows = WindowDecoder(
            self._decoder,
            input_name="latents",
            frames_per_run=self._flow.frames_per_run,
            context_frames=self._flow.context_frames,
            hop_length=self._flow.hop_length,
        )
        self.workers += batchers.values()
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
        flow = demanded(manifest.flow)
        tensors = flow.tensors(has_voices=bool(manifest.labels))
        graphs = {role: BatchGraph(runtime.open(bundle, variant.graphs[role])) for role in tensors}
        largest = TextTokenizer.load(bundle.file(TOKENIZER_FILE)).largest_id
        num_frames = flow.frames_per_run or min(_TRIED_FRAMES, flow.max_frames)
        channels, num_samples = (3, flow.num_channels), num_frames * flow.hop_length
        given: dict[str, NDArray[Any]] = {
            "input_ids": np.array([largest] * 3),
            "duration_noise": np.zeros((2, 3), np.float32),
            "latents": np.zeros((num_frames, flow.num_channels), np.float32),
            _CURVES: np.zeros((num_frames, NUM_CURVES), np.float32),
            "noise": np.zeros((num_frames, flow.hop_length), np.float32),
            "speaker": np.array(0),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "durations": (3,),
            "means": channels,
            "deviations": channels,
            _CURVES: (num_frames, NUM_CURVES),
            "samples": (num_samples,),
        }
        for role, (inputs, outputs) in tensors.items():
            graphs[role].warm_up(
                {name: given[name] for name in inputs},
                3 if role == "text_encoder" else num_frames,
                {name: shapes[name] for name in outputs},
            )
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
                [samples] = await self._samples(job, frames, [window], request)
                for start in range(0, len(samples), _MOST_OF_A_PART * self.sampling_rate):
                    part = samples[start : start + _MOST_OF_A_PART * self.sampling_rate]
                    yield SpeechPart(samples=part, num_new_tokens=window[1])
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
        parts = await self._samples(job, frames, self._windows.windows(len(frames.latents)), request)
        began = time.monotonic()
        audio = await self._encode(np.concatenate(parts), request)
        job.note([ItemTimes(began, began, time.monotonic())])
        return self._result(frames, audio, seed)

    async def _samples(
        self, job: Job[Batcher], frames: _Frames, windows: Elements[Window], request: SynthesisRequest
    ) -> list[NDArray[np.int16]]:
        given = {} if self._flow.is_excited else self._speaker(request)
        return await self._windows.decode(job, frames.latents, windows, given, frames.beside)

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
        item: dict[str, NDArray[Any]] = {"input_ids": ids, **self._speaker(request)}
        if not flow.is_excited:
            noise = random.standard_normal((2, len(ids)), np.float32) * np.float32(flow.duration_noise_scale)
            item["duration_noise"] = noise
        encoded: BatchedResults[Tensors] = await job.batch(
            self._encoder,
            [item],
            outputs=flow.tensors(has_voices=bool(self.voices))["text_encoder"][1],
            num_bytes=sum(array.nbytes for array in item.values()),
            num_read=len(ids),
            lengths=[len(ids)],
            groups=[len(ids)],  # a padded text would have other durations
        )
        job.note(encoded.runs)
        rate = flow.speaking_rate * check_rate(request)
        most = most_frames(request, flow.max_frames, flow.hop_length / flow.sampling_rate)
        num_frames, durations = frame_counts(encoded.results[0]["durations"], rate, flow.rounding)
        sizes.append(min(num_frames, most) * self._frame_bytes)
        if len(sizes) > 1 and sum(sizes) > self._max_bytes:
            raise InvalidInputError(
                "texts",
                f"have more than {self._max_bytes >> 20} MiB of audio (--max-waiting-mib); send them in several calls",
            )
        job.reserve_more(sizes[-1])
        draw = partial(self._draw, encoded.results[0], durations, min(num_frames, most), random)
        with job.preparing():
            latents, beside = await asyncio.get_running_loop().run_in_executor(audio_pool(), draw)
        if self._pitch is not None:
            found: BatchedResults[Tensors] = await job.batch(
                self._pitch,
                [{"latents": latents}],
                outputs=(_CURVES,),
                num_bytes=0,
                num_read=len(latents),
                lengths=[len(latents)],
                groups=[len(latents)],
            )
            job.note(found.runs)
            beside[_CURVES] = found.results[0][_CURVES]
        return _Frames(latents=latents, beside=beside, is_cut=num_frames > most)

    def _draw(
        self, encoded: Tensors, durations: NDArray[np.int64], num_frames: int, random: np.random.Generator
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Draws the first frames, (F, D), from the distributions of tokens with durations in frames, (T,).

        Returns:
            The frames, and further inputs of their samples by name.
        """
        owners = np.searchsorted(np.cumsum(durations), np.arange(num_frames), side="right")
        if self._flow.is_excited:
            drawn = random.standard_normal((num_frames, self._flow.hop_length), np.float32)
            return encoded["means"][owners], {"noise": drawn * np.float32(self._flow.noise_scale)}
        noise = random.standard_normal((num_frames, self._flow.num_channels), np.float32)
        noise *= np.float32(self._flow.noise_scale)
        if durations.any():  # else the one frame of a text without any has a mean of 0 and a deviation of 1
            noise *= encoded["deviations"][owners]
            noise += encoded["means"][owners]
        return noise, {}

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
        self._edges = [] if flow.edge is None else [flow.edge]
        self._known = None if flow.drops_unknown else frozenset(tokenizer.library_tokenizer.get_vocab())

    def __repr__(self) -> str:
        return f"FlowText({self._tokenizer!r})"

    def most_characters(self, max_tokens: int) -> int:
        """Returns how many characters have at most so many tokens."""
        inside = max_tokens - 2 * len(self._edges)
        return inside if self._blank is None else max(1, (inside - 1) // 2)

    async def read(self, texts: Elements[str], fields: Elements[str], most: int) -> list[NDArray[np.int64]]:
        """Returns the tokens of texts, (T,) each.

        Args:
            texts: The texts.
            fields: Their names in the request.
            most: Characters of a text that the model reads.

        Raises:
            InvalidInputError: A text is too long, or has no character that the model knows, or one that it does not.
        """
        if self._known is not None:
            for field, text in zip(fields, texts, strict=True):
                self._check(field, text, self._known)
        encoded = await self._tokenizer.encode_limited(
            texts, fields=fields, max_tokens=most, truncate=False, add_special_tokens=False
        )
        return [
            np.concatenate([self._edges, self.interspersed(one.input_ids), self._edges]).astype(np.int64)
            for one in encoded
        ]

    @staticmethod
    def _check(field: str, text: str, known: frozenset[str]) -> None:
        for position, character in enumerate(text):
            if character not in known:
                raise InvalidInputError(
                    field,
                    f"has {character!r} (U+{ord(character):04X}) at character {position}, which is none of the model's "
                    f"{len(known)} letters; it reads phonemes as the vocabulary of its bundle writes them",
                )

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


def frame_counts(
    durations: NDArray[np.float32], rate: float, rounding: Literal["up", "nearest"] = "up"
) -> tuple[int, NDArray[np.int64]]:
    """Returns the frames of a text, at least one, and those of each token.

    Args:
        durations: (T,), at a speaking rate of 1.
        rate: Times as fast.
        rounding: How frames are rounded; with `nearest` a token has at least one.
    """
    if rounding == "up":
        least, frames = 0, np.ceil(durations * np.float32(1.0 / rate))
    else:
        least, frames = 1, np.rint(durations / np.float32(rate))
    counts = np.clip(np.nan_to_num(frames, nan=0.0), least, 2**31).astype(np.int64)
    return max(int(counts.sum()), 1), counts


def _budgets(bundle: Bundle) -> tuple[int, int]:
    """Returns the tokens of a batch of texts, and the frames of one of windows."""
    flow = demanded(bundle.manifest.flow)
    return (
        demanded(bundle.manifest.limits.max_input_tokens),
        (flow.frames_per_run or flow.max_frames) + 2 * flow.context_frames,
    )
