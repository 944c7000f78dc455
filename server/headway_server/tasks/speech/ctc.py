"""Served speech recognition model without a decoder, by connectionist temporal classification (Graves et al. 2006).

The graph gives the logits of a token or a blank for each frame of audio. The likeliest of each frame is taken, equal
neighbours become one token, and blanks are left out. Audio longer than a window is read in overlapping windows; frames
near an inner end are those of the neighbour, as in the pipelines of transformers.

N samples, F frames, V tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.bundles import TOKENIZER_FILE, Bundle, Ctc, SoundPreprocessing, demanded
from headway_server.decoding.sequence import FinishReason
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.audio import PreparedAudio
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_count
from headway_server.tasks.outputs import LOGITS, log_softmax
from headway_server.tasks.parameters import DecodingLimits
from headway_server.tasks.sounds.model import SoundModel
from headway_server.tasks.speech.transcripts import (
    MAX_AUDIOS,
    Segment,
    SpeechDelta,
    SpeechRequest,
    Transcriber,
    Transcript,
    Word,
    check_call,
)
from headway_server.tasks.stateless import StatelessParts
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest, plan_text_to_text

Made = TypeVar("Made")
Given = TypeVarTuple("Given")

_PAUSE_S: Final = 0.5
"""Pause between words that ends a segment."""
_LONGEST_S: Final = 10.0
"""Seconds of a segment, unless one word takes longer."""
_WORD_MARK: Final = "\u2581"
"""Beginning of the first token of a word, in vocabularies of SentencePiece."""


class Frames(NamedTuple):
    """The likeliest token of each frame."""

    ids: NDArray[np.int64]
    """(F,)"""
    log_probabilities: NDArray[np.float32]
    """(F,)"""

    @classmethod
    def of(cls, logits: NDArray[np.float32]) -> Frames:
        """Takes the likeliest tokens of logits (F, V).

        Raises:
            FloatingPointError: A value is not finite.
        """
        if not np.isfinite(logits).all():
            raise FloatingPointError("the model's logits have values that are not finite")
        ids = logits.argmax(axis=-1)
        return cls(ids, np.take_along_axis(log_softmax(logits), ids[:, np.newaxis], axis=-1)[:, 0])

    @classmethod
    def joined(cls, parts: Sequence[Frames]) -> Frames:
        """Returns the frames of parts in one."""
        ids, log_probabilities = ([part[column] for part in parts] for column in (0, 1))
        return cls(np.concatenate(ids), np.concatenate(log_probabilities))


class _Own(NamedTuple):
    """Frames of a window."""

    frames: Frames
    is_cut: bool
    """True if tokens were left out."""


class _Token(NamedTuple):
    """A token and its frames, from `start` to before `end`."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window of an audio, in samples."""

    start: int
    end: int
    left: int
    """Frames at its beginning that are those of the window before."""
    right: int | None
    """Frames that are its own, from its first; None: to the last."""


def windows_of(num_samples: int, sound: SoundPreprocessing, ctc: Ctc) -> list[Window]:
    """Returns the windows of an audio, as `transformers` cuts it with `chunk_length_s` and `stride_length_s`."""
    size, stride, unit = sound.window_samples, ctc.stride_samples, ctc.samples_per_frame
    if num_samples <= size:
        return [Window(start=0, end=num_samples, left=0, right=None)]
    windows, margin = [], stride // unit
    for start in range(0, num_samples, size - 2 * stride):
        is_last = start + size >= num_samples
        end = num_samples if is_last else start + size
        right = None if is_last else size // unit - margin
        windows.append(Window(start=start, end=end, left=margin if start else 0, right=right))
        if is_last:
            break
    return windows


class CtcReader:
    """Reads words and their times from the likeliest tokens of frames. Safe to use from several threads."""

    def __init__(self, tokenizer: TextTokenizer, ctc: Ctc, frame_s: float) -> None:
        self._tokenizer = tokenizer
        self._ctc = ctc
        self._frame_s = frame_s

    def __repr__(self) -> str:
        return f"CtcReader({self._tokenizer!r})"

    def tokens(self, ids: Sequence[int]) -> list[_Token]:
        """Returns the tokens of frames: equal neighbours are one, and blanks none."""
        tokens, place = [], 0
        for token, group in groupby(ids):
            start, place = place, place + sum(1 for _ in group)
            if token != self._ctc.blank:
                tokens.append(_Token(token, start, place))
        return tokens

    def text(self, tokens: Sequence[_Token]) -> str:
        """Returns the text of tokens, with the names of special ones, as `transformers` writes it."""
        return self._tokenizer.decode_whole([token.id for token in tokens]).strip()

    def words(self, tokens: Sequence[_Token]) -> list[list[_Token]]:
        """Returns the tokens of each word."""
        words: list[list[_Token]] = []
        is_first = True
        for token in tokens:
            if token.id == self._ctc.word_delimiter:
                is_first = True
                continue
            if self._ctc.word_delimiter is None:
                is_first = is_first or self._tokenizer.piece(token.id).startswith(_WORD_MARK)
            if is_first:
                words.append([])
            words[-1].append(token)
            is_first = False
        return words

    def parts(self, words: Iterable[list[_Token]]) -> Iterator[list[list[_Token]]]:
        """Yields the words of each segment: with no long pause between them, of a few seconds."""
        part: list[list[_Token]] = []
        for word in words:
            if part and (
                (word[0].start - part[-1][-1].end) * self._frame_s >= _PAUSE_S
                or (word[-1].end - part[0][0].start) * self._frame_s > _LONGEST_S
            ):
                yield part
                part = []
            part.append(word)
        if part:
            yield part

    def segment(self, words: Sequence[Sequence[_Token]], frames: Frames, first: int = 0) -> Segment:
        """Returns a segment of frames, of which the audio has `first` before them."""
        timed = [
            Word(
                text=self.text(word),
                start_s=self._s(first + word[0].start),
                end_s=self._s(first + word[-1].end),
            )
            for word in words
        ]
        start, end = words[0][0].start, words[-1][-1].end
        return Segment(
            text=f" {' '.join(word.text for word in timed)}",
            start_s=timed[0].start_s,
            end_s=timed[-1].end_s,
            token_ids=tuple(token.id for word in words for token in word),
            mean_log_probability=float(frames.log_probabilities[start:end].mean()),
            words=tuple(timed),
        )

    def _s(self, frame: int) -> float:
        """Returns when a frame begins, in seconds."""
        return frame * self._frame_s


class CtcStream:
    """Reads an audio whose frames come window by window, each in time of its own, whatever came before.

    A segment that ends before the last word is settled. Frames are kept from the one where the first other begins.
    """

    def __init__(self, reader: CtcReader) -> None:
        self._reader = reader
        self._open = Frames(np.empty(0, np.int64), np.empty(0, np.float32))
        self._num_settled = 0
        """Frames before the open ones."""
        self._num_settled_tokens = 0
        self._num_shown = 0
        """Open tokens whose text was returned."""
        self._context: list[_Token] = []
        """Tokens from the last word on whose text was returned."""
        self.num_tokens = 0
        """Tokens of all frames so far."""

    def __repr__(self) -> str:
        return f"CtcStream({self.num_tokens} tokens, {len(self._open.ids)} frames are open)"

    def push(self, frames: Frames) -> tuple[str, list[Segment]]:
        """Takes the next frames; returns the text of words and the segments that further frames do not change."""
        opened = Frames.joined([self._open, frames])
        tokens = self._reader.tokens(opened.ids.tolist())
        self.num_tokens = self._num_settled_tokens + len(tokens)
        words = self._reader.words(tokens)
        if not words:
            self._open = opened
            return "", []
        num_complete = tokens.index(words[-1][0])
        text = self._text(tokens, num_complete, words[:-1])
        *settled, last = self._reader.parts(words)
        segments = [self._reader.segment(part, opened, self._num_settled) for part in settled]
        first, start = tokens.index(last[0][0]), last[0][0].start
        self._open = Frames(opened.ids[start:], opened.log_probabilities[start:])
        self._num_settled += start
        self._num_settled_tokens += first
        self._num_shown = num_complete - first
        return text, segments

    def _text(self, tokens: Sequence[_Token], num_complete: int, words: Sequence[Sequence[_Token]]) -> str:
        """Returns the text of the tokens up to a number that was not returned, decoded behind the word before it."""
        new = [*tokens[self._num_shown : num_complete]]
        text = self._reader.text([*self._context, *new])[len(self._reader.text(self._context)) :]
        self._context = [*tokens[tokens.index(words[-1][0]) : num_complete]] if words else [*self._context, *new]
        return text


def _read(row: Tensors) -> Frames:
    return Frames.of(row[LOGITS])


class CtcModel(SoundModel, Transcriber):
    """Transcribes audio frame by frame."""

    def __init__(self, bundle: Bundle, parts: StatelessParts) -> None:
        """Assembles a model from its parts.

        Raises:
            BundleError: The tokenizer cannot be loaded, or does not fit the graph.
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        super().__init__(bundle, parts)
        self._ctc, sound = demanded(bundle.manifest.ctc), self._sound
        tokenizer = TextTokenizer.load(bundle.file(TOKENIZER_FILE))
        graph = bundle.manifest.variants[parts.precision].graphs["model"]
        num_tokens = next((spec.shape[-1] for spec in graph.outputs if spec.name == LOGITS), 0)
        if not isinstance(num_tokens, int) or num_tokens <= max(self._ctc.blank, tokenizer.largest_id):
            raise BundleError(
                f"{graph.file}: {LOGITS} has {num_tokens} tokens, and the tokenizer has the token "
                f"{tokenizer.largest_id}; export the model again"
            )
        self._reader = CtcReader(tokenizer, self._ctc, self._ctc.samples_per_frame / sound.sampling_rate)
        num_frames = sound.window_samples // self._ctc.samples_per_frame
        self._limits = DecodingLimits(
            max_input_tokens=num_frames, max_total_tokens=num_frames, vocab_size=tokenizer.vocabulary_size
        )

    @property
    def writes_times(self) -> bool:
        """True."""
        return True

    @property
    def writes_word_times(self) -> bool:
        """True."""
        return True

    async def transcribe(self, audios: Sequence[bytes], *, request: SpeechRequest) -> Answer[Transcript]:
        """See `Transcriber`."""
        check_count("audios", len(audios), MAX_AUDIOS)
        self._check(request, len(audios))
        names = [f"audios[{number}]" for number in range(len(audios))]
        with self._begin(len(audios), request.deadline) as job:
            prepared = await self._prepare(job, audios, names, self._sizes)
            windows = [windows_of(len(audio.samples), self._sound, self._ctc) for audio in prepared]
            pieces = [
                audio.samples[one.start : one.end]
                for audio, some in zip(prepared, windows, strict=True)
                for one in some
            ]
            found = iter(await self._run(job, pieces, _read))
            results = []
            for audio, some in zip(prepared, windows, strict=True):
                own = [self._own(next(found), one, request) for one in some]
                results.append(await self._off_loop(self._transcript, audio, own))
            return job.answer(results)

    async def stream(
        self, audio: bytes, *, name: str, request: SpeechRequest
    ) -> AsyncGenerator[SpeechDelta | Answer[Transcript], None]:
        """See `Transcriber`; a delta has the words that are complete after another window."""
        self._check(request, 1, is_stream=True)
        with self._begin(1, request.deadline) as job:
            [prepared] = await self._prepare(job, [audio], [name], self._sizes)
            own, reading, num_characters, num_segments = list[_Own](), CtcStream(self._reader), 0, 0
            for window in windows_of(len(prepared.samples), self._sound, self._ctc):
                [frames] = await self._run(job, [prepared.samples[window.start : window.end]], _read)
                own.append(self._own(frames, window, request))
                if window.right is None:
                    break
                text, segments = await self._off_loop(reading.push, own[-1].frames)
                num_characters += len(text)
                num_segments += len(segments)
                yield SpeechDelta(text=text, num_new_tokens=reading.num_tokens, segments=tuple(segments))
            transcript = await self._off_loop(self._transcript, prepared, own)
            yield SpeechDelta(
                text=transcript.text[num_characters:],
                num_new_tokens=transcript.num_new_tokens,
                segments=transcript.segments[num_segments:],
            )
            yield job.answer([transcript])

    def _check(self, request: SpeechRequest, num_audios: int, *, is_stream: bool = False) -> None:
        """Checks what a call asks for, before any work is done for it.

        Raises:
            InvalidInputError: A parameter is out of its range, or would change an answer and cannot.
        """
        owner, given, default = self.bundle.manifest.name, request.parameters, TextToTextParameters()
        check_call(request, owner, translates=False, writes_times=True, reads_previous=False)
        if request.language:
            raise InvalidInputError(
                "language", f"is {request.language[:64]!r}; {owner} knows one language and has no name for it"
            )
        for field, value, unchanged in (
            ("beam_size", given.beam_size, default.beam_size),
            ("hypothesis_count", given.num_hypotheses, default.num_hypotheses),
            ("min_new_tokens", given.min_new_tokens, default.min_new_tokens),
            ("no_repeat_ngram_size", given.no_repeat_ngram_size, default.no_repeat_ngram_size),
            ("sampling.temperature", given.sampling.get("temperature", 0.0), 0.0),
        ):
            if value != unchanged:
                raise InvalidInputError(
                    f"parameters.{field}",
                    f"is {value:g}, and {owner} takes the likeliest token of each frame of audio; leave it out",
                )
        plan_text_to_text(
            TextToTextRequest(parameters=given),
            num_texts=num_audios,
            limits=self._limits,
            num_slots=1,
            owner=owner,
            is_stream=is_stream,
        )

    def _num_positions(self, sound: NDArray[np.float32]) -> int:
        """Returns the frames of a sound."""
        return -(-len(sound) // self._ctc.samples_per_frame)

    def _sizes(self, audio: PreparedAudio, _: str) -> list[int]:
        """Returns the samples of an audio's windows."""
        return [one.end - one.start for one in windows_of(len(audio.samples), self._sound, self._ctc)]

    def _own(self, frames: Frames, window: Window, request: SpeechRequest) -> _Own:
        """Returns the frames of a window that are not its neighbours', blank behind the most tokens asked for."""
        part = slice(window.left, window.right)
        own, most = Frames(frames.ids[part], frames.log_probabilities[part]), request.parameters.max_new_tokens
        if most is None or len(tokens := self._reader.tokens(own.ids.tolist())) <= most:
            return _Own(own, is_cut=False)
        ids = own.ids.copy()
        ids[tokens[most - 1].end :] = self._ctc.blank
        return _Own(Frames(ids, own.log_probabilities), is_cut=True)

    def _transcript(self, audio: PreparedAudio, parts: Sequence[_Own]) -> Transcript:
        """Returns what frames of an audio say."""
        frames = Frames.joined([part.frames for part in parts])
        tokens = self._reader.tokens(frames.ids.tolist())
        words = self._reader.words(tokens)
        log_probability = float(frames.log_probabilities.sum(dtype=np.float64))
        return Transcript(
            text=self._reader.text(tokens),
            log_probability=log_probability,
            score=log_probability / max(len(tokens), 1),
            finish_reason=FinishReason.LENGTH if any(part.is_cut for part in parts) else FinishReason.END_OF_SEQUENCE,
            num_new_tokens=len(tokens),
            duration_s=audio.duration_s,
            segments=tuple(self._reader.segment(part, frames) for part in self._reader.parts(words)),
            language="",
            num_windows=len(parts),
        )

    @staticmethod
    async def _off_loop(make: Callable[[*Given], Made], *given: *Given) -> Made:
        """Returns what a function returns, called in a thread."""
        return await asyncio.get_running_loop().run_in_executor(text_pool(), make, *given)
