"""Served speech recognition model: the encoder-decoder of translation, with an audio encoder.

Audio longer than a window is transcribed window by window (`segments.py`). A transcript does not depend on the rest of
the batch.

M mel bins, F frames of an audio.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from headway_server.bundles import Bundle, Languages, SpeechTokens, demanded
from headway_server.decoding.interfaces import EncodedSource, EncoderInput
from headway_server.decoding.output.text import Detokenizer
from headway_server.decoding.output.tokens import TokenAssembly
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.rules import all_of, distinct_ngrams
from headway_server.decoding.sequence import FinishReason, Sequence, SequenceResult
from headway_server.errors import FieldName, InvalidInputError
from headway_server.preprocessing.audio import PreparedAudio
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_count, num_bytes
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.job import gather
from headway_server.tasks.speech.reader import AudioReader
from headway_server.tasks.speech.rules import TranscriptRule
from headway_server.tasks.speech.segments import WindowSegment, WindowSegments, read_segments
from headway_server.tasks.speech.transcripts import (
    MAX_AUDIOS,
    Segment,
    SpeechDelta,
    SpeechRequest,
    SpeechTask,
    Transcriber,
    Transcript,
    TranscriptHypothesis,
    check_call,
)
from headway_server.tasks.text_to_text.request import (
    TextToTextPlan,
    TextToTextRequest,
    plan_text_to_text,
)

_CONTEXT_SEGMENTS: Final = 8
_CONTEXT_TOKENS: Final = 8
"""Last tokens of a transcript, among those of the last segments, that the next window's text continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Validated parameters of a call."""

    request: SpeechRequest
    plan: TextToTextPlan
    language: str
    """Empty: to be detected, if the model has several languages."""
    is_stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A window of an audio."""

    start: int
    """Index of its first frame in the audio."""
    num_frames: int
    """Frames of audio; the rest of the window is padding."""
    has_times: bool


class _TrimmedText:
    """Text sent in parts, without white space at either end of the whole."""

    def __init__(self) -> None:
        self._space: str | None = None
        """Pending white space, which may be at the end; None: no text sent yet."""

    def push(self, text: str) -> str:
        """Takes the next text and returns the part that can be sent."""
        whole = text.lstrip() if self._space is None else self._space + text
        certain = whole.rstrip()
        if certain or self._space is not None:
            self._space = whole[len(certain) :]
        return certain

    def __repr__(self) -> str:
        return f"_TrimmedText({self._space!r} pending)"


@dataclass(slots=True, kw_only=True)
class _Transcription:
    """State of an audio's transcription."""

    call: _Call
    audio: PreparedAudio
    prompt_ids: tuple[int, ...]
    """Tokens of the prompt."""
    previous: list[int]
    """Tokens that the next window is conditioned on: of the prompt, and of the windows so far."""
    seed: int
    segments: list[Segment] = field(default_factory=list)
    results: list[SequenceResult] = field(default_factory=list)
    languages: tuple[tuple[str, float], ...] = ()
    """Detected languages."""
    shown: _TrimmedText = field(default_factory=_TrimmedText)

    @property
    def num_new_tokens(self) -> int:
        """New tokens of all windows so far."""
        return sum(result.num_new_tokens for result in self.results)


class SpeechModel(DecodingModel, Transcriber):
    """Transcribes audio."""

    _noun = "audios"
    _field = "audios"
    _memory_noun = "decoded audio"

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts.

        Raises:
            BundleError: The tokenizer or a token does not fit the model.
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        super().__init__(bundle, parts)
        manifest = bundle.manifest
        assert parts.audio_limits is not None, "`load` sets them"
        special_tokens = demanded(manifest.special_tokens)
        self._bos_id, self._end_id = demanded(special_tokens.bos), demanded(special_tokens.eos)
        self._tokens = manifest.speech or SpeechTokens()
        self._reader = AudioReader.of(manifest, parts.audio_limits, max_bytes=parts.max_input_bytes)
        self._blank = self._reader.blank
        self._frame_s = self._reader.frame_s
        self._frames_a_step = round(self._tokens.timestamp_s / self._frame_s)

    @property
    def writes_times(self) -> bool:
        """True if segments can have timestamps."""
        return self._tokens.first_timestamp is not None

    async def transcribe(self, audios: Elements[bytes], *, request: SpeechRequest) -> Answer[Transcript]:
        """Transcribes audios; all of them, or none.

        Args:
            audios: 1 to `MAX_AUDIOS` encoded audios.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter is out of its range, an audio cannot be read, the queue is full, the deadline
            passed, the server is draining.
        """
        check_count("audios", len(audios), MAX_AUDIOS)
        call = self._call(request, len(audios))
        names = [f"audios[{number}]" for number in range(len(audios))]
        with self._begin(len(audios), num_tokens=call.plan.num_tokens, num_bytes=0, deadline=request.deadline) as job:
            transcription = await self._prepare(job, call, audios, names)
            return job.answer(await gather(self._transcribe(job, one) for one in transcription))

    async def stream(
        self, audio: bytes, *, name: str, request: SpeechRequest
    ) -> AsyncGenerator[SpeechDelta | Answer[Transcript], None]:
        """Transcribes an audio: yields deltas as they appear, and last the answer.

        A delta has the text of new tokens. With timestamps, or for audio longer than a window, it has the text of a
        whole window, since the end of a window may be transcribed again with the next. Errors are those of
        `transcribe`; `name` is the name of the audio in the request.
        """
        call = self._call(request, 1, is_stream=True)
        with self._begin(1, num_tokens=call.plan.num_tokens, num_bytes=0, deadline=request.deadline) as job:
            [transcription] = await self._prepare(job, call, [audio], [name])
            async with aclosing(self._transcribe_windows(job, transcription)) as parts:
                async for part in parts:
                    yield part if isinstance(part, SpeechDelta) else job.answer([part])

    # Validation

    def _call(self, request: SpeechRequest, num_audios: int, *, is_stream: bool = False) -> _Call:
        """Validates a call before any work is done for it."""
        name, tokens = self.bundle.manifest.name, self._tokens
        check_call(
            request,
            name,
            translates=tokens.translate is not None,
            writes_times=self.writes_times,
            reads_previous=tokens.start_of_previous is not None,
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
        """Returns the model's name of a language; empty to detect it, or for a model of one language.

        Raises:
            InvalidInputError: The model does not have the language.
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
        """Checks a prompt before it is tokenized.

        Raises:
            InvalidInputError: It has too many bytes.
        """
        if (size := num_bytes(prompt)) > self._max_text_bytes:
            raise InvalidInputError("prompt", f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it")

    async def _prompt(self, prompt: str) -> tuple[int, ...]:
        """Tokenizes a prompt, a long one off the event loop.

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
            raise InvalidInputError("prompt", "has the name of a special token, such as <|en|>; leave it out")
        return ids

    @property
    def _max_previous(self) -> int:
        """Maximum tokens of the prompt and the preceding transcript."""
        return self.limits.max_total_tokens // 2 - 1

    def _check_hypotheses(self, call: _Call, audios: Elements[PreparedAudio]) -> None:
        if call.plan.num_hypotheses == 1:
            return
        for number, audio in enumerate(audios):
            if self._reader.is_long(audio):
                raise InvalidInputError(
                    "parameters.hypothesis_count",
                    f"is {call.plan.num_hypotheses}, and ",
                    FieldName(f"audios[{number}]"),
                    f" has {audio.duration_s:.1f} seconds; of more than "
                    f"{self._reader.window_s:g}, one window, there is one transcript; ask for 1, or cut the audio",
                )

    # Window by window

    async def _prepare(
        self, job: DecodingJob, call: _Call, audios: Elements[bytes], names: Elements[str]
    ) -> list[_Transcription]:
        """Decodes audios and tokenizes the prompt; `names` are the audios' names in the request."""
        with job.preparing():
            prompt_ids = await self._prompt(call.request.prompt)
            prepared: list[PreparedAudio] = []
            for data, name in zip(audios, names, strict=True):
                prepared.append(await self._reader.decode(data, name))
                job.reserve(self._reader.num_bytes(prepared))
            self._check_hypotheses(call, prepared)
        seeds = [call.plan.draw_seed() for _ in prepared]
        return [
            _Transcription(call=call, audio=audio, prompt_ids=prompt_ids, previous=list(prompt_ids), seed=seed)
            for audio, seed in zip(prepared, seeds, strict=True)
        ]

    async def _transcribe(self, job: DecodingJob, transcription: _Transcription) -> Transcript:
        parts = [part async for part in self._transcribe_windows(job, transcription)]
        return next(part for part in parts if isinstance(part, Transcript))

    async def _transcribe_windows(
        self, job: DecodingJob, transcription: _Transcription
    ) -> AsyncGenerator[SpeechDelta | Transcript, None]:
        """Transcribes an audio window by window; yields deltas of a stream, and last the transcript."""
        call, audio = transcription.call, transcription.audio
        with job.preparing():
            features = await self._reader.features(audio)  # (M, F)
        width, num_frames = self._reader.width, self._reader.num_frames(audio)
        is_long = self._reader.is_long(audio)
        has_times = self._tokens.first_timestamp is not None and (call.request.timestamps or is_long)
        start = 0
        while start < num_frames:
            window = _Window(start=start, num_frames=min(width, num_frames - start), has_times=has_times)
            source = await self._reader.window(features, start)
            async with aclosing(self._transcribe_window(job, transcription, window, source)) as deltas:
                async for delta in deltas:
                    yield delta
            num_before = len(transcription.segments)
            start += self._add_window(transcription, window)
            if call.is_stream and has_times:
                new = tuple(transcription.segments[num_before:])
                text = transcription.shown.push("".join(segment.text for segment in new))
                yield SpeechDelta(text=text, num_new_tokens=transcription.num_new_tokens, segments=new)
            if call.plan.num_hypotheses > 1:
                break
        yield self._transcript(transcription)

    async def _transcribe_window(
        self, job: DecodingJob, transcription: _Transcription, window: _Window, source: EncoderInput
    ) -> AsyncGenerator[SpeechDelta, None]:
        """Transcribes a window and stores its result; yields deltas of a stream without timestamps."""
        encoded: EncodedSource | None = None
        if (
            not transcription.call.language
            and self.bundle.manifest.languages is not None
            and not transcription.languages
        ):
            encoded = await self._detect(job, transcription, source)
        sequence = self._sequence(transcription, window, source, encoded)
        if transcription.call.is_stream and not window.has_times:
            detokenizer = Detokenizer(self._tokenizer.decoder(), self._context(transcription))
            num_before = transcription.num_new_tokens
            async with aclosing(job.stream([sequence])) as deltas:
                async for delta in deltas:
                    text = transcription.shown.push(detokenizer.push(self._words(delta.output)))
                    yield SpeechDelta(text=text, num_new_tokens=num_before + delta.num_new_tokens)
            transcription.results.append(sequence.reply.result.result())
        else:
            transcription.results += await job.run([sequence])

    async def _detect(self, job: DecodingJob, transcription: _Transcription, source: EncoderInput) -> EncodedSource:
        """Detects the spoken language; returns the encoded window."""
        languages = self.bundle.manifest.languages
        assert languages is not None, "the caller checks it"
        scored_ids = tuple(languages.target_tokens.values())
        sequence = Sequence(
            prompt_ids=np.array([self._bos_id], np.int64),
            source=source,
            parameters=SamplingParameters(max_new_tokens=1, num_top_tokens=0, scored_token_ids=scored_ids),
            output=TokenAssembly(),
            eos_id=None,  # only the log-probabilities are needed
            deadline=job.deadline,
            caller=job.caller,
        )
        [result] = await job.run([sequence])
        scores = np.array([log_probability for _, log_probability in result.tokens[0].top_tokens])
        weights = np.exp(scores - scores.max())
        found = zip(languages.targets, (weights / weights.sum()).tolist(), strict=True)
        transcription.languages = tuple(sorted(found, key=lambda pair: -pair[1]))
        encoded: EncodedSource = sequence.cross
        return encoded

    def _sequence(
        self, transcription: _Transcription, window: _Window, source: EncoderInput, encoded: EncodedSource | None
    ) -> Sequence:
        """Makes the sequence of a window; called on the event loop."""
        call, start_ids = transcription.call, self._start(transcription, has_times=window.has_times)
        most = min(call.plan.max_new_tokens, self.limits.max_total_tokens - len(start_ids))
        plan = call.plan
        search = plan.search if plan.search.beam_size > 1 else None
        rule = TranscriptRule(self._tokens, eos_id=self._end_id, timestamps=window.has_times)
        return Sequence(
            prompt_ids=np.array(start_ids, np.int64),
            source=source,
            parameters=plan.sampling_for(most, transcription.seed, len(transcription.results)),
            output=TokenAssembly(),
            eos_id=self._eos_id,
            deadline=call.request.deadline,
            caller=current_caller(),
            wants_deltas=call.is_stream and not window.has_times,
            rule=all_of(rule, distinct_ngrams(plan.search.no_repeat_ngram_size) if search is None else None),
            search=search,
            encoded=encoded,
        )

    def _start(self, transcription: _Transcription, *, has_times: bool) -> list[int]:
        """Returns the decoder's start tokens."""
        call = transcription.call
        tokens, languages = self._tokens, self.bundle.manifest.languages
        previous = transcription.previous if call.request.condition_on_previous else transcription.prompt_ids
        start: list[int | None] = []
        if previous:
            start = [tokens.start_of_previous, *previous[-self._max_previous :]]
        start.append(self._bos_id)
        if languages is not None:
            start.append(languages.target_tokens.get(call.language or transcription.languages[0][0]))
        start.append(tokens.translate if call.request.task is SpeechTask.TRANSLATE else tokens.transcribe)
        start += [None if has_times else tokens.no_timestamps, *self.bundle.manifest.prompt_prefix]
        return [token for token in start if token is not None]

    def _add_window(self, transcription: _Transcription, window: _Window) -> int:
        """Adds the segments of the last window; returns the distance of the next window, in frames."""
        result = transcription.results[-1]
        read = self._read(result.output, window)
        context = self._context(transcription)
        transcription.segments += self._segments(read, window, result.log_probability, result.num_new_tokens, context)
        first = self._tokens.first_timestamp
        for part in read.segments:
            is_open = first is not None and len(part.token_ids) > 2 and part.token_ids[-2] >= first
            transcription.previous += part.token_ids[:-1] if is_open else part.token_ids
        return window.num_frames if read.next_start is None else max(1, read.next_start * self._frames_a_step)

    def _read(self, tokens: tuple[int, ...], window: _Window) -> WindowSegments:
        num_steps = window.num_frames // self._frames_a_step
        if not window.has_times:
            return WindowSegments(segments=(WindowSegment(token_ids=tokens, start=0, end=num_steps),), next_start=None)
        assert self._tokens.first_timestamp is not None, "the call has checked it"
        return read_segments(tokens, first=self._tokens.first_timestamp, num_steps=num_steps)

    def _context(self, transcription: _Transcription) -> tuple[int, ...]:
        """Returns the tokens that the next window continues: one of SentencePiece has no space at the beginning."""
        if self._tokens.first_timestamp is not None:  # segments are texts of their own
            return ()
        ids = (one.token_ids for one in transcription.segments[-_CONTEXT_SEGMENTS:])
        return tuple(chain.from_iterable(ids))[-_CONTEXT_TOKENS:]

    def _segments(
        self,
        read: WindowSegments,
        window: _Window,
        log_probability: float,
        num_new_tokens: int,
        context: tuple[int, ...] = (),
    ) -> Iterator[Segment]:
        """Yields the segments of a window with their times in the audio; `context` are the tokens before."""
        start_s = window.start * self._frame_s
        for part in read.segments:
            yield Segment(
                text=Detokenizer(self._tokenizer.decoder(), context).push(self._words(part.token_ids)),
                start_s=start_s + part.start * self._tokens.timestamp_s,
                end_s=start_s + part.end * self._tokens.timestamp_s,
                token_ids=part.token_ids,
                mean_log_probability=log_probability / max(num_new_tokens, 1),
            )

    def _words(self, token_ids: Elements[int]) -> list[int]:
        """Returns the tokens that are not timestamps."""
        first = self._tokens.first_timestamp
        return [token for token in token_ids if first is None or token < first]

    def _transcript(self, transcription: _Transcription) -> Transcript:
        call, plan, results = transcription.call, transcription.call.plan, transcription.results
        ends = {result.finish_reason for result in results}
        return Transcript(
            text=_joined(transcription.segments),
            log_probability=sum(result.log_probability for result in results),
            score=sum(plan.score(result.log_probability, result.num_new_tokens) for result in results),
            finish_reason=FinishReason.LENGTH if FinishReason.LENGTH in ends else results[-1].finish_reason,
            num_new_tokens=transcription.num_new_tokens,
            duration_s=transcription.audio.duration_s,
            segments=tuple(transcription.segments),
            language=call.language or (transcription.languages[0][0] if transcription.languages else ""),
            languages=transcription.languages,
            hypotheses=tuple(self._hypotheses(call, transcription.audio, results[0]))
            if plan.num_hypotheses > 1
            else (),
            seed=transcription.seed if plan.is_sampled else None,
            num_windows=len(results),
        )

    def _hypotheses(self, call: _Call, audio: PreparedAudio, result: SequenceResult) -> Iterator[TranscriptHypothesis]:
        """Yields the transcripts of an audio of one window, the best first."""
        has_times = call.request.timestamps
        window = _Window(start=0, num_frames=self._reader.num_frames(audio), has_times=has_times)
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


def _joined(segments: Elements[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()
