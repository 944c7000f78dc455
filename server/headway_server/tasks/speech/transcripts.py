"""Requests and results of speech recognition, and the interface of its models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from headway_server.decoding.sequence import FinishReason
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.serving.answers import Answer
from headway_server.serving.families import ServedModel
from headway_server.tasks.text_to_text.request import TextToTextParameters

MAX_AUDIOS: Final = most_elements("TranscribeSpeechRequest.audios")
"""Maximum audios of a call."""


class SpeechTask(Enum):
    """Output of speech recognition."""

    TRANSCRIBE = "transcribe"
    """Transcript in the spoken language."""
    TRANSLATE = "translate"
    """Translation to English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRequest:
    """Parameters of a call, without its audio."""

    parameters: TextToTextParameters = field(default_factory=TextToTextParameters)
    language: str = ""
    """BCP 47 code of the spoken language; empty: detected, if the model has several."""
    task: SpeechTask = SpeechTask.TRANSCRIBE
    timestamps: bool = False
    """True returns start and end of segments."""
    prompt: str = ""
    """Text before the audio, or words that may occur in it."""
    condition_on_previous: bool = False
    """True conditions each window on the transcript of the windows before it."""
    deadline: float | None = None
    """End of the caller's wait, in seconds of `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of a transcript."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript."""

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...]
    """Timestamps included."""
    mean_log_probability: float
    """Mean over the tokens of its window; of a model without a decoder, over the frames of the segment."""
    words: tuple[Word, ...] = ()
    """Words with their times, if the model gives them."""


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
    """Result of one audio. Numbers are sums over its windows."""

    text: str
    log_probability: float
    score: float
    finish_reason: FinishReason
    num_new_tokens: int
    duration_s: float
    segments: tuple[Segment, ...]
    """Without timestamps one for each window; of a model without a decoder those with timestamps, possibly none."""
    language: str
    """Requested or detected language; empty for a model of one language."""
    languages: tuple[tuple[str, float], ...] = ()
    """Detected languages with their probabilities, the likeliest first."""
    hypotheses: tuple[TranscriptHypothesis, ...] = ()
    seed: int | None = None
    num_windows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechDelta:
    """New output since the last delta."""

    text: str
    num_new_tokens: int
    segments: tuple[Segment, ...] = ()
    """Finished segments, if segments have timestamps."""


class Transcriber(ServedModel):
    """Model of speech recognition."""

    @property
    @abstractmethod
    def writes_times(self) -> bool:
        """True if segments can have timestamps."""

    @property
    def writes_word_times(self) -> bool:
        """True if segments have words with their times."""
        return False

    @abstractmethod
    async def transcribe(self, audios: Sequence[bytes], *, request: SpeechRequest) -> Answer[Transcript]:
        """Transcribes audios; all of them, or none.

        Args:
            audios: 1 to `MAX_AUDIOS` encoded audios.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter is out of its range, an audio cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """

    @abstractmethod
    def stream(
        self, audio: bytes, *, name: str, request: SpeechRequest
    ) -> AsyncGenerator[SpeechDelta | Answer[Transcript], None]:
        """Transcribes an audio: yields deltas as they appear, and last the answer.

        Errors are those of `transcribe`; `name` is the name of the audio in the request.
        """


def check_call(
    request: SpeechRequest, owner: str, *, translates: bool, writes_times: bool, reads_previous: bool
) -> None:
    """Checks what a call asks for against what a model can do.

    Args:
        request: Parameters of the call.
        owner: Name of the model.
        translates: True if it can write in English.
        writes_times: True if it gives times.
        reads_previous: True if it reads text before that of an audio.

    Raises:
        InvalidInputError: The call asks for something else.
    """
    if request.parameters.max_length_ratio is not None:
        raise InvalidInputError(
            "parameters.max_length_ratio", "is set, and audio has no tokens; set max_new_tokens instead"
        )
    if request.task is SpeechTask.TRANSLATE and not translates:
        raise InvalidInputError("task", f"is translate, and {owner} only writes what is said; leave it out")
    if request.timestamps and not writes_times:
        raise InvalidInputError("include_timestamps", f"is set, and {owner} writes no times; leave it out")
    if request.condition_on_previous and not reads_previous:
        raise InvalidInputError(
            "condition_on_previous", f"is set, and {owner} cannot read what was written before; leave it out"
        )
    if request.prompt.strip() and not reads_previous:
        raise InvalidInputError("prompt", f"is given, and {owner} takes none; leave it out")
