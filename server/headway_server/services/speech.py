"""SpeechService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Final

from headway.v1 import speech_service_pb2 as pb
from headway_server.services.enums import WireEnum
from headway_server.services.messages import FINISH_REASONS, find_model, set_fields, signed, stream_of
from headway_server.services.text_to_text_requests import parse_parameters
from headway_server.serving.host import ModelHost
from headway_server.tasks.speech.transcripts import (
    Segment,
    SpeechDelta,
    SpeechRequest,
    SpeechTask,
    Transcriber,
    Transcript,
    TranscriptHypothesis,
)
from headway_server.tasks.synthesis.encoding import AudioFormat
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.table import SYNTHESIZE_SPEECH, TRANSCRIBE_SPEECH

_TASKS: Final = WireEnum(pb.SpeechTask, SpeechTask, unspecified=SpeechTask.TRANSCRIBE)
_FORMATS: Final = WireEnum(pb.AudioFormat, AudioFormat, unspecified=AudioFormat.WAV)
_MOST_LANGUAGES: Final = 5
"""Maximum languages with probabilities in a response."""


class SpeechService:
    """Servicer of speech recognition and speech synthesis models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def TranscribeSpeech(
        self, request: pb.TranscribeSpeechRequest, deadline: float | None
    ) -> pb.TranscribeSpeechResponse:
        """Transcribes every audio."""
        arrived = time.monotonic()
        model = self._find(request)
        answer = await model.transcribe(list(request.audios), request=_asked(request, deadline))
        return pb.TranscribeSpeechResponse(
            results=[_transcript(one, with_segments=request.include_timestamps) for one in answer.results],
            **signed(model, answer.timings, arrived),
        )

    def StreamTranscribeSpeech(
        self, request: pb.StreamTranscribeSpeechRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamTranscribeSpeechResponse, None]:
        """Transcribes an audio and streams the transcript."""
        arrived = time.monotonic()
        model = self._find(request)
        wants_times = request.include_timestamps

        def delta(part: SpeechDelta) -> dict[str, Any]:
            segments = _segments(part.segments) if wants_times else ()
            return {"text_delta": part.text, "new_token_count": part.num_new_tokens, "segments": segments}

        def last(one: Transcript) -> dict[str, Any]:
            return {"new_token_count": one.num_new_tokens, "result": _transcript(one, with_segments=wants_times)}

        parts = model.stream(request.audio, name="audio", request=_asked(request, deadline))
        return stream_of(pb.StreamTranscribeSpeechResponse, parts, model, arrived, delta=delta, last=last)

    async def SynthesizeSpeech(
        self, request: pb.SynthesizeSpeechRequest, deadline: float | None
    ) -> pb.SynthesizeSpeechResponse:
        """Synthesizes the speech of every text."""
        arrived = time.monotonic()
        model = self._find_synthesizer(request)
        asked = _synthesis_request(request, _FORMATS.read("format", request.format), deadline)
        answer = await model.synthesize(list(request.texts), request=asked)
        return pb.SynthesizeSpeechResponse(
            results=[_spoken(one, model) for one in answer.results],
            **signed(model, answer.timings, arrived),
        )

    def StreamSynthesizeSpeech(
        self, request: pb.StreamSynthesizeSpeechRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamSynthesizeSpeechResponse, None]:
        """Synthesizes the speech of a text and streams its samples."""
        arrived = time.monotonic()
        model = self._find_synthesizer(request)
        rate = model.sampling_rate

        def delta(part: SpeechPart) -> dict[str, Any]:
            return {"pcm": part.pcm, "sampling_rate": rate, "new_token_count": part.num_new_tokens}

        def last(spoken: SpokenText) -> dict[str, Any]:
            return {
                "sampling_rate": rate,
                "new_token_count": spoken.num_new_tokens,
                "result": _spoken(spoken, model),
            }

        asked = _synthesis_request(request, AudioFormat.WAV, deadline)
        parts = model.stream(request.text, field="text", request=asked)
        return stream_of(pb.StreamSynthesizeSpeechResponse, parts, model, arrived, delta=delta, last=last)

    def _find_synthesizer(self, request: pb.SynthesizeSpeechRequest | pb.StreamSynthesizeSpeechRequest) -> Synthesizer:
        return find_model(self._host, SYNTHESIZE_SPEECH, request)

    def _find(self, request: pb.TranscribeSpeechRequest | pb.StreamTranscribeSpeechRequest) -> Transcriber:
        return find_model(self._host, TRANSCRIBE_SPEECH, request)


def _asked(
    request: pb.TranscribeSpeechRequest | pb.StreamTranscribeSpeechRequest, deadline: float | None
) -> SpeechRequest:
    return SpeechRequest(
        parameters=parse_parameters(request.parameters),
        language=request.language,
        task=_TASKS.read("task", request.task),
        timestamps=request.include_timestamps,
        prompt=request.prompt,
        condition_on_previous=request.condition_on_previous,
        deadline=deadline,
    )


def _synthesis_request(
    request: pb.SynthesizeSpeechRequest | pb.StreamSynthesizeSpeechRequest, form: AudioFormat, deadline: float | None
) -> SynthesisRequest:
    parameters = request.parameters
    return SynthesisRequest(
        voice=request.voice,
        sampling=set_fields(parameters.sampling),
        speaking_rate=parameters.speaking_rate if parameters.HasField("speaking_rate") else None,
        max_seconds=parameters.max_duration_seconds if parameters.HasField("max_duration_seconds") else None,
        format=form,
        deadline=deadline,
    )


def _spoken(spoken: SpokenText, model: Synthesizer) -> pb.SynthesizedSpeech:
    return pb.SynthesizedSpeech(
        audio=spoken.audio,
        duration_seconds=spoken.duration_s,
        sampling_rate=model.sampling_rate,
        finish_reason=FINISH_REASONS.number(spoken.finish_reason),
        new_token_count=spoken.num_new_tokens,
        seed=spoken.seed,
    )


def _transcript(transcript: Transcript, *, with_segments: bool) -> pb.SpeechTranscript:
    likeliest = transcript.languages[:_MOST_LANGUAGES]
    return pb.SpeechTranscript(
        **_fields(transcript, with_segments=with_segments),
        seed=transcript.seed,
        language=transcript.language,
        language_probabilities=[
            pb.LanguageProbability(language=language, probability=probability) for language, probability in likeliest
        ],
        duration_seconds=transcript.duration_s,
        window_count=transcript.num_windows,
        hypotheses=[pb.SpeechHypothesis(**_fields(one, with_segments=with_segments)) for one in transcript.hypotheses],
    )


def _fields(one: Transcript | TranscriptHypothesis, *, with_segments: bool) -> dict[str, Any]:
    """Returns the common fields of the messages of a transcript and its hypotheses."""
    return {
        "text": one.text,
        "log_probability": one.log_probability,
        "score": one.score,
        "finish_reason": FINISH_REASONS.number(one.finish_reason),
        "new_token_count": one.num_new_tokens,
        "segments": _segments(one.segments) if with_segments else (),
    }


def _segments(segments: Iterable[Segment]) -> list[pb.SpeechSegment]:
    return [
        pb.SpeechSegment(
            text=segment.text,
            start_seconds=segment.start_s,
            end_seconds=segment.end_s,
            token_ids=segment.token_ids,
            mean_log_probability=segment.mean_log_probability,
            words=[
                pb.SpeechWord(text=word.text, start_seconds=word.start_s, end_seconds=word.end_s)
                for word in segment.words
            ],
        )
        for segment in segments
    ]
