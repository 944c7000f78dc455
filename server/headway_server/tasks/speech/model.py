"""A model that writes what is said, as it is served: the engine of translations, whose encoder hears audio.

Audio longer than a window is heard window by window (`segments.py`). What a transcript says does not depend on what is
written beside it.

M mel bins, F frames of an audio, W frames of a window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from collections.abc import Sequence as Elements
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np

from headway_server.bundles import Bundle, Languages, SpeechTokens
from headway_server.decoding.interfaces import Decoder, EncodedSource, Encoder, EncoderInput
from headway_server.decoding.output.text import Detokenizer
from headway_server.decoding.output.tokens import TokenAssembly
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.rules import all_of, distinct_ngrams
from headway_server.decoding.sequence import FinishReason, Sequence, SequenceResult
from headway_server.errors import FieldName, InvalidInputError
from headway_server.preprocessing.audio import AudioDecoder, LogMel, PreparedAudio
from headway_server.preprocessing.pool import audio_pool
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_count, num_bytes
from headway_server.tasks.decoding import DecodingModel, ModelParts
from headway_server.tasks.speech.rules import LanguageRule, TranscriptRule
from headway_server.tasks.speech.segments import WindowSegment, WindowSegments, read_segments
from headway_server.tasks.text_to_text.request import (
    TextToTextParameters,
    TextToTextPlan,
    TextToTextRequest,
    plan_text_to_text,
)

MAX_AUDIOS: Final = 16
"""Most audios of a call."""


class SpeechTask(Enum):
    """What is written."""

    TRANSCRIBE = "transcribe"
    """What is said, in the language that is spoken."""
    TRANSLATE = "translate"
    """What is said, in English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """What a call asks for beside its audio."""

    parameters: TextToTextParameters = field(default_factory=TextToTextParameters)
    language: str = ""
    """BCP 47 code of what is spoken; empty: it is detected, where the model knows several."""
    task: SpeechTask = SpeechTask.TRANSCRIBE
    timestamps: bool = False
    """True returns when segments begin and end."""
    prompt: str = ""
    """Text that the audio continues, or words that it may hold."""
    condition_on_previous: bool = False
    """True lets each window read what was written of those before it."""
    deadline: float | None = None
    """When the caller stops waiting, by `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript."""

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    """Timestamps included."""
    mean_log_probability: float
    """Of the tokens of its window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptHypothesis:
    """One of several transcripts of an audio."""

    text: str
    log_probability: float
    score: float
    finish_reason: FinishReason
    num_new_tokens: int
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """What became of an audio. Of several windows, numbers are sums."""

    text: str
    log_probability: float
    score: float
    finish_reason: FinishReason
    num_new_tokens: int
    duration_s: float
    segments: tuple[Segment, ...]
    """At least one; without timestamps one for each window."""
    language: str
    """Named or detected; empty where the model has no names for languages."""
    languages: tuple[tuple[str, float], ...] = ()
    """Those that were detected with their probabilities, the likeliest first."""
    hypotheses: tuple[TranscriptHypothesis, ...] = ()
    seed: int | None = None
    num_windows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechDelta:
    """What was written since the last one."""

    text: str
    num_new_tokens: int
    segments: tuple[Segment, ...] = ()
    """Those that are finished, where segments have times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a call asks for, checked."""

    request: SpeechRequest
    plan: TextToTextPlan
    language: str
    """Empty: to be detected, where the model has names for languages."""
    prompt_ids: tuple[int, ...] = ()
    """Once it is read."""
    is_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A window of an audio."""

    source: EncoderInput
    start: int
    """Its first frame of the audio."""
    num_frames: int
    """Of the audio; the rest of the window is padding."""
    has_times: bool


class _Shown:
    """Text that is handed out in parts, which joined have no white space at either end."""

    def __init__(self) -> None:
        self._held: str | None = None
        """White space that may be the end; None: nothing was handed out yet."""

    def push(self, text: str) -> str:
        """Takes the next text and returns what can be handed out."""
        whole = text.lstrip() if self._held is None else self._held + text
        certain = whole.rstrip()
        if certain or self._held is not None:
            self._held = whole[len(certain) :]
        return certain

    def __repr__(self) -> str:
        return f"_Shown({self._held!r} held)"


@dataclass(slots=True, kw_only=True)
class _Progress:
    """How far an audio was heard."""

    previous: list[int]
    """Tokens that the next window may read: of the prompt, and of the windows so far."""
    seed: int
    segments: list[Segment] = field(default_factory=list)
    results: list[SequenceResult] = field(default_factory=list)
    languages: tuple[tuple[str, float], ...] = ()
    """Those that were detected."""
    shown: _Shown = field(default_factory=_Shown)

    @property
    def num_new_tokens(self) -> int:
        """Of all windows so far."""
        return sum(result.num_new_tokens for result in self.results)


class SpeechModel(DecodingModel):
    """Writes what is said in audio."""

    _noun = "audios"
    _field = "audios"
    _held_noun = "decoded audio"

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Makes a model of its parts.

        Raises:
            BundleError: The tokenizer or a token does not fit the model.
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        super().__init__(bundle, parts)
        manifest = bundle.manifest
        assert manifest.audio_preprocessing is not None, "the manifest's validator demands it"
        assert manifest.special_tokens is not None, "the manifest's validator demands it"
        assert manifest.special_tokens.bos is not None, "the manifest's validator demands it"
        assert manifest.special_tokens.eos is not None, "the manifest's validator demands it"
        assert parts.audio_limits is not None, "`load` gives them"
        self._bos_id, self._end_id = manifest.special_tokens.bos, manifest.special_tokens.eos
        self._tokens = manifest.speech or SpeechTokens()
        self._audio = manifest.audio_preprocessing
        self._decoder = AudioDecoder(self._audio.sampling_rate, parts.audio_limits)
        self._log_mel = LogMel(self._audio)
        self._max_held_bytes = parts.max_held_bytes
        self._num_positions = self.limits.max_input_tokens
        self._frames_a_step = round(self._tokens.timestamp_s * self._audio.sampling_rate / self._audio.hop_length)
        self._frame_s = self._audio.hop_length / self._audio.sampling_rate

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`."""
        assert encoder is not None, "the manifest's validator demands the graph"
        audio = self.bundle.manifest.audio_preprocessing
        assert audio is not None, "the manifest's validator demands it"
        silence = np.zeros((audio.num_mel_bins, audio.num_frames), np.float32)
        decoder.set_sources(encoder.encode([EncoderInput.of_features(silence, self.limits.max_input_tokens)]))
        for token_id in (self._bos_id, self._tokenizer.largest_id):
            decoder.decode(np.array([token_id]), np.zeros(1, np.int64))
        decoder.set_sources([])

    async def transcribe(self, audios: Elements[bytes], *, request: SpeechRequest) -> Answer[Transcript]:
        """Writes what is said in each audio; in all of them, or in none.

        Args:
            audios: 1 to `MAX_AUDIOS` encoded audios.
            request: What is asked for beside them.

        Raises:
            RequestError: A parameter is out of its range, an audio cannot be read, there is no room, the deadline
                passed, the server is draining.
        """
        check_count("audios", len(audios), MAX_AUDIOS)
        call = self._call(request, len(audios))
        with self._admit(len(audios), num_tokens=call.plan.num_tokens, deadline=request.deadline), ExitStack() as held:
            began = time.monotonic()
            call = replace(call, prompt_ids=await self._prompt(request.prompt))
            prepared: list[PreparedAudio] = []
            for number, data in enumerate(audios):
                prepared.append(await self._decode(data, f"audios[{number}]"))
                self._hold_last(prepared, held)
            self._check_hypotheses(call, prepared)
            preprocessing_s = time.monotonic() - began
            answers = await _gather([self._hear_whole(call, audio) for audio in prepared])
        timings = CallTimings(
            queue_s=max(answer.timings.queue_s for answer in answers),
            preprocessing_s=preprocessing_s + sum(answer.timings.preprocessing_s for answer in answers),
            inference_s=max(answer.timings.inference_s for answer in answers),
        )
        return Answer(results=[answer.results[0] for answer in answers], timings=timings)

    async def stream(
        self, audio: bytes, *, name: str, request: SpeechRequest
    ) -> AsyncGenerator[SpeechDelta | Answer[Transcript], None]:
        """Writes what is said in an audio: yields deltas as they appear, and last the answer.

        A delta has the text of new tokens; where segments have times, and of audio longer than a window, that of a
        whole window, since what is written at a window's end may be heard again in the next. Errors are those of
        `transcribe`; `name` is what the request calls the audio.
        """
        call = self._call(request, 1, is_stream=True)
        with self._admit(1, num_tokens=call.plan.num_tokens, deadline=request.deadline), ExitStack() as held:
            began = time.monotonic()
            call = replace(call, prompt_ids=await self._prompt(request.prompt))
            prepared = await self._decode(audio, name)
            self._hold_last([prepared], held)
            preprocessing_s = time.monotonic() - began
            async with aclosing(self._hear(call, prepared)) as parts:
                async for part in parts:
                    if isinstance(part, Answer):
                        whole_s = part.timings.preprocessing_s + preprocessing_s
                        yield replace(part, timings=replace(part.timings, preprocessing_s=whole_s))
                    else:
                        yield part

    # What is asked for

    def _call(self, request: SpeechRequest, num_audios: int, *, is_stream: bool = False) -> _Call:
        """Checks what a call asks for, before any work is done for it."""
        name, tokens = self.bundle.manifest.name, self._tokens
        if request.parameters.max_length_ratio is not None:
            raise InvalidInputError(
                "parameters.max_length_ratio", "is set, and audio has no tokens; set max_new_tokens instead"
            )
        if request.task is SpeechTask.TRANSLATE and tokens.translate is None:
            raise InvalidInputError("task", f"is translate, and {name} only writes what is said; leave it out")
        if request.timestamps and tokens.first_timestamp is None:
            raise InvalidInputError("include_timestamps", f"is set, and {name} writes no times; leave it out")
        if request.condition_on_previous and tokens.start_of_previous is None:
            raise InvalidInputError(
                "condition_on_previous", f"is set, and {name} cannot read what was written before; leave it out"
            )
        self._check_prompt(request.prompt)
        plan = plan_text_to_text(
            TextToTextRequest(parameters=request.parameters, deadline=request.deadline),
            num_texts=num_audios,
            limits=self.limits,
            num_slots=self._lanes.num_slots,
            owner=name,
            is_stream=is_stream,
        )
        return _Call(
            request=request,
            plan=plan,
            language=self._language(request.language),
            is_stream=is_stream,
        )

    def _language(self, code: str) -> str:
        """Returns the model's name of a language; empty if it is to be detected, or the model has no names.

        Raises:
            InvalidInputError: The model does not have it.
        """
        languages, name = self.bundle.manifest.languages, self.bundle.manifest.name
        if not code:
            return languages.targets[0] if languages is not None and len(languages.targets) == 1 else ""
        if languages is None:
            raise InvalidInputError("language", f"is {code[:64]!r}; {name} knows one language and has no name for it")
        found = Languages.match(code, languages.targets) or Languages.match(code.partition("-")[0], languages.targets)
        if found is None:
            raise InvalidInputError("language", f"is {code[:64]!r}; {name} hears {', '.join(languages.targets)}")
        return found

    def _check_prompt(self, prompt: str) -> None:
        """Checks what can be said of a prompt before it is read.

        Raises:
            InvalidInputError: It has too many bytes, or the model takes none.
        """
        if prompt.strip() and self._tokens.start_of_previous is None:
            raise InvalidInputError("prompt", f"is given, and {self.bundle.manifest.name} takes none; leave it out")
        if (size := num_bytes(prompt)) > self._max_text_bytes:
            raise InvalidInputError("prompt", f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it")

    async def _prompt(self, prompt: str) -> tuple[int, ...]:
        """Returns the tokens of a prompt; of a long one they are made off the event loop.

        Raises:
            InvalidInputError: It has too many tokens, or special ones.
        """
        if not (text := prompt.strip()):
            return ()
        [encoded] = [one async for one in self._tokenizer.encode_each([f" {text}"], add_special_tokens=False)]
        ids = tuple(encoded.input_ids.tolist())
        if (count := len(ids)) > (limit := self._max_previous):
            raise InvalidInputError("prompt", f"has {count} tokens, the limit is {limit}; shorten it")
        first = self._tokens.first_timestamp
        if any(token >= self._end_id or (first is not None and token >= first) for token in ids):
            raise InvalidInputError("prompt", "holds the name of a special token, such as <|en|>; leave it out")
        return ids

    @property
    def _max_previous(self) -> int:
        """Most tokens of a prompt and of what was written before."""
        return self.limits.max_total_tokens // 2 - 1

    def _check_hypotheses(self, call: _Call, audios: Elements[PreparedAudio]) -> None:
        if call.plan.num_hypotheses == 1:
            return
        for number, audio in enumerate(audios):
            if (seconds := len(audio.samples) / self._audio.sampling_rate) > self._audio.window_s:
                raise InvalidInputError(
                    "parameters.hypothesis_count",
                    f"is {call.plan.num_hypotheses}, and ",
                    FieldName(f"audios[{number}]"),
                    f" has {seconds:.1f} seconds; of more than "
                    f"{self._audio.window_s:g}, one window, there is one transcript; ask for 1, or cut the audio",
                )

    async def _decode(self, data: bytes, name: str) -> PreparedAudio:
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._decoder.decode, data, name)

    def _hold_last(self, audios: Elements[PreparedAudio], held: ExitStack) -> None:
        """Counts the last of a call's audios among what the model holds, until `held` ends.

        Raises:
            InvalidInputError: The call's own are more than may be held.
            OverloadedError: They are, together with those of other calls.
        """
        sizes = [self._log_mel.num_bytes(len(audio.samples)) for audio in audios]
        if len(sizes) > 1 and (total := sum(sizes)) > self._max_held_bytes:
            seconds = sum(audio.duration_s for audio in audios)
            raise InvalidInputError(
                "audios",
                f"{len(audios)} of them have {seconds:.1f} seconds, decoded {total >> 20} MiB; the limit is "
                f"{self._max_held_bytes >> 20} MiB (--max-waiting-mib): send them in several calls",
            )
        held.enter_context(self._held.admit(1, sizes[-1]))

    # Window by window

    async def _hear_whole(self, call: _Call, audio: PreparedAudio) -> Answer[Transcript]:
        async with aclosing(self._hear(call, audio)) as parts:
            async for part in parts:
                if isinstance(part, Answer):
                    return part
        raise AssertionError("the last part is the answer")

    async def _hear(self, call: _Call, audio: PreparedAudio) -> AsyncGenerator[SpeechDelta | Answer[Transcript], None]:
        """Hears an audio window by window; yields what appears, of a stream, and last the answer."""
        began = time.monotonic()
        features = await asyncio.get_running_loop().run_in_executor(
            audio_pool(), self._log_mel.features, audio.samples
        )  # (M, F)
        preprocessing_s = time.monotonic() - began
        width, num_samples = self._audio.num_frames, len(audio.samples)
        is_long = num_samples > self._audio.window_samples
        num_frames = features.shape[1] if is_long else max(1, -(-num_samples // self._audio.hop_length))
        has_times = self._tokens.first_timestamp is not None and (call.request.timestamps or is_long)
        progress = _Progress(previous=list(call.prompt_ids), seed=call.plan.draw_seed())
        start = 0
        while start < num_frames:
            part = features[:, start : start + width]
            padded = np.pad(part, ((0, 0), (0, width - part.shape[1])))  # (M, W)
            window = _Window(
                source=EncoderInput.of_features(padded, self._num_positions),
                start=start,
                num_frames=min(width, num_frames - start),
                has_times=has_times,
            )
            async with aclosing(self._hear_window(call, progress, window)) as deltas:
                async for delta in deltas:
                    yield delta
            num_before = len(progress.segments)
            start += self._keep(progress, window)
            if call.is_stream and has_times:
                new = tuple(progress.segments[num_before:])
                text = progress.shown.push("".join(segment.text for segment in new))
                yield SpeechDelta(text=text, num_new_tokens=progress.num_new_tokens, segments=new)
            if call.plan.num_hypotheses > 1:
                break
        timings = CallTimings.of(progress.results, preprocessing_s=preprocessing_s)
        yield Answer(results=[self._transcript(call, audio, progress)], timings=timings)

    async def _hear_window(
        self, call: _Call, progress: _Progress, window: _Window
    ) -> AsyncGenerator[SpeechDelta, None]:
        """Has a window heard and keeps its result; yields deltas of a stream whose segments have no times."""
        encoded: EncodedSource | None = None
        if not call.language and self.bundle.manifest.languages is not None and not progress.languages:
            encoded = await self._detect(call, progress, window)
        sequence = self._sequence(call, progress, window, encoded)
        if call.is_stream and not window.has_times:
            detokenizer, num_before = Detokenizer(self._tokenizer.decoder()), progress.num_new_tokens
            async with aclosing(self._stream(sequence)) as deltas:
                async for delta in deltas:
                    text = progress.shown.push(detokenizer.push(self._words(delta.output)))
                    yield SpeechDelta(text=text, num_new_tokens=num_before + delta.num_new_tokens)
            progress.results.append(sequence.reply.result.result())
        else:
            progress.results += await self._run([sequence])

    async def _detect(self, call: _Call, progress: _Progress, window: _Window) -> EncodedSource:
        """Finds out which language is spoken; returns what the encoder made of the window."""
        languages = self.bundle.manifest.languages
        assert languages is not None, "the caller checks it"
        rule = LanguageRule(list(languages.target_tokens.values()))
        sequence = Sequence(
            prompt_ids=np.array([self._bos_id], np.int64),
            source=window.source,
            parameters=SamplingParameters(max_new_tokens=1),
            output=TokenAssembly(),
            eos_id=self._eos_id,
            deadline=call.request.deadline,
            caller=current_caller(),
            rule=rule,
        )
        await self._run([sequence])
        found = zip(languages.targets, rule.probabilities.tolist(), strict=True)
        progress.languages = tuple(sorted(found, key=lambda pair: -pair[1]))
        encoded: EncodedSource = sequence.cross
        return encoded

    def _sequence(self, call: _Call, progress: _Progress, window: _Window, encoded: EncodedSource | None) -> Sequence:
        """Makes the sequence of a window; called on the event loop."""
        start_ids = self._start(call, progress, has_times=window.has_times)
        most = min(call.plan.max_new_tokens, self.limits.max_total_tokens - len(start_ids))
        plan = call.plan
        search = plan.search if plan.search.beam_size > 1 else None
        rule = TranscriptRule(self._tokens, eos_id=self._end_id, timestamps=window.has_times)
        return Sequence(
            prompt_ids=np.array(start_ids, np.int64),
            source=window.source,
            parameters=plan.sampling_for(most, progress.seed, len(progress.results)),
            output=TokenAssembly(),
            eos_id=self._eos_id,
            deadline=call.request.deadline,
            caller=current_caller(),
            wants_deltas=call.is_stream and not window.has_times,
            rule=all_of(rule, distinct_ngrams(plan.search.no_repeat_ngram_size) if search is None else None),
            search=search,
            encoded=encoded,
        )

    def _start(self, call: _Call, progress: _Progress, *, has_times: bool) -> list[int]:
        """Returns what the decoder reads before it writes."""
        tokens, languages = self._tokens, self.bundle.manifest.languages
        previous = progress.previous if call.request.condition_on_previous else call.prompt_ids
        start: list[int | None] = []
        if previous:
            start = [tokens.start_of_previous, *previous[-self._max_previous :]]
        start.append(self._bos_id)
        if languages is not None:
            start.append(languages.target_tokens.get(call.language or progress.languages[0][0]))
        start.append(tokens.translate if call.request.task is SpeechTask.TRANSLATE else tokens.transcribe)
        start.append(None if has_times else tokens.no_timestamps)
        return [token for token in start if token is not None]

    def _keep(self, progress: _Progress, window: _Window) -> int:
        """Keeps what the last window says; returns by how many frames the next one is later."""
        result = progress.results[-1]
        read = self._read(result.output, window)
        progress.segments += self._segments(read, window, result.log_probability, result.num_new_tokens)
        first = self._tokens.first_timestamp
        for part in read.segments:
            is_open = first is not None and len(part.token_ids) > 2 and part.token_ids[-2] >= first
            progress.previous += part.token_ids[:-1] if is_open else part.token_ids
        return window.num_frames if read.next_start is None else max(1, read.next_start * self._frames_a_step)

    def _read(self, tokens: tuple[int, ...], window: _Window) -> WindowSegments:
        num_steps = window.num_frames // self._frames_a_step
        if not window.has_times:
            return WindowSegments(segments=(WindowSegment(token_ids=tokens, start=0, end=num_steps),), next_start=None)
        assert self._tokens.first_timestamp is not None, "the call has checked it"
        return read_segments(tokens, first=self._tokens.first_timestamp, num_steps=num_steps)

    def _segments(
        self, read: WindowSegments, window: _Window, log_probability: float, num_new_tokens: int
    ) -> Iterator[Segment]:
        """Yields the segments of a window with their times in the audio."""
        start_s = window.start * self._frame_s
        for part in read.segments:
            yield Segment(
                text=Detokenizer(self._tokenizer.decoder()).push(self._words(part.token_ids)),
                start_s=start_s + part.start * self._tokens.timestamp_s,
                end_s=start_s + part.end * self._tokens.timestamp_s,
                token_ids=part.token_ids,
                mean_log_probability=log_probability / max(num_new_tokens, 1),
            )

    def _words(self, token_ids: Elements[int]) -> list[int]:
        """Returns the tokens that are no times."""
        first = self._tokens.first_timestamp
        return [token for token in token_ids if first is None or token < first]

    def _transcript(self, call: _Call, audio: PreparedAudio, progress: _Progress) -> Transcript:
        plan, results = call.plan, progress.results
        ends = {result.finish_reason for result in results}
        return Transcript(
            text=_joined(progress.segments),
            log_probability=sum(result.log_probability for result in results),
            score=sum(plan.score(result.log_probability, result.num_new_tokens) for result in results),
            finish_reason=FinishReason.LENGTH if FinishReason.LENGTH in ends else results[-1].finish_reason,
            num_new_tokens=progress.num_new_tokens,
            duration_s=audio.duration_s,
            segments=tuple(progress.segments),
            language=call.language or (progress.languages[0][0] if progress.languages else ""),
            languages=progress.languages,
            hypotheses=tuple(self._hypotheses(call, audio, results[0])) if plan.num_hypotheses > 1 else (),
            seed=progress.seed if plan.draws else None,
            num_windows=len(results),
        )

    def _hypotheses(self, call: _Call, audio: PreparedAudio, result: SequenceResult) -> Iterator[TranscriptHypothesis]:
        """Yields the transcripts of an audio of one window, the best first."""
        has_times = call.request.timestamps
        num_frames = max(1, -(-len(audio.samples) // self._audio.hop_length))
        window = _Window(source=_NOTHING, start=0, num_frames=num_frames, has_times=has_times)
        for one in result.hypotheses[: call.plan.num_hypotheses]:
            read = self._read(one.output, window)
            segments = tuple(self._segments(read, window, one.log_probability, one.num_new_tokens))
            yield TranscriptHypothesis(
                text=_joined(segments),
                log_probability=one.log_probability,
                score=call.plan.score(one.log_probability, one.num_new_tokens),
                finish_reason=one.finish_reason,
                num_new_tokens=one.num_new_tokens,
                segments=segments,
            )


_NOTHING: Final = EncoderInput({}, 0)


def _joined(segments: Elements[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


async def _gather(parts: Elements[Coroutine[None, None, Answer[Transcript]]]) -> list[Answer[Transcript]]:
    """Waits for all; the first error ends the others and is the call's."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
