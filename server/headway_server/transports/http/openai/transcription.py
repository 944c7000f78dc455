"""OpenAI's audio API: transcripts and translations of a file, as text, JSON, events or subtitles."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import request_pool
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.speech.transcripts import (
    Segment,
    SpeechDelta,
    SpeechRequest,
    SpeechTask,
    Transcriber,
    Transcript,
)
from headway_server.tasks.table import TRANSCRIBE_SPEECH, TRANSLATE_SPEECH
from headway_server.tasks.text_to_text.request import TextToTextParameters
from headway_server.transports.http.edge import Reply, Request, Stream, to_json
from headway_server.transports.http.openai.form import EVENT_STREAM, event
from headway_server.transports.http.openai.multipart import form_text, read_form

_ABILITIES: Final = {SpeechTask.TRANSCRIBE: TRANSCRIBE_SPEECH, SpeechTask.TRANSLATE: TRANSLATE_SPEECH}
_FORMATS: Final = ("json", "text", "verbose_json", "srt", "vtt")
_UNITS_FIELD: Final = "timestamp_granularities[]"
_UNITS: Final = ("segment", "word")
_FIELDS: Final = (
    "file",
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "stream",
    _UNITS_FIELD,
)
_PLAIN: Final = b"text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, checked."""

    file: bytes
    model: str
    response_format: str
    stream: bool
    units: frozenset[str]
    """What has times in `verbose_json`."""
    request: SpeechRequest

    @classmethod
    def read(cls, request: Request, task: SpeechTask) -> _Asked:
        """Reads a form.

        Raises:
            InvalidInputError: The body is not a form, or a field is missing, unknown or invalid.
        """
        fields = read_form(request.headers.get("content-type", ""), request.body, _FIELDS)
        if "file" not in fields:
            raise InvalidInputError("file", "is missing; send the audio as a part of the form")
        texts = {name: form_text(name, value) for name, value in fields.items() if name != "file"}
        wanted = texts.get("response_format") or "json"
        if wanted not in _FORMATS:
            raise InvalidInputError("response_format", f"is {wanted[:64]!r}; must be one of {', '.join(_FORMATS)}")
        units = texts.get(_UNITS_FIELD, "segment").split(",")
        if unknown := [unit for unit in units if unit not in _UNITS]:
            raise InvalidInputError(_UNITS_FIELD, f"is {unknown[0][:64]!r}; must be {' or '.join(_UNITS)}")
        if "word" in units and wanted != "verbose_json":
            raise InvalidInputError(_UNITS_FIELD, "is word; this needs the response_format verbose_json")
        streams = texts.get("stream", "false").lower()
        if streams not in ("true", "false", "1", "0"):
            raise InvalidInputError("stream", f"is {streams[:64]!r}; must be true or false")
        has_times = wanted in ("verbose_json", "srt", "vtt")
        if (is_stream := streams in ("true", "1")) and wanted != "json":
            raise InvalidInputError("response_format", f"is {wanted}; must be json in a stream")
        return cls(
            file=fields["file"],
            model=texts.get("model", ""),
            response_format=wanted,
            stream=is_stream,
            units=frozenset(units),
            request=SpeechRequest(
                parameters=TextToTextParameters(sampling=_sampling(texts.get("temperature", ""))),
                language=texts.get("language", ""),
                task=task,
                timestamps=has_times,
                prompt=texts.get("prompt", ""),
            ),
        )


class TranscriptionEndpoint:
    """Answers calls for one task."""

    def __init__(self, host: ModelHost, task: SpeechTask) -> None:
        self._host = host
        self._task = task

    async def answer(self, request: Request) -> Reply | Stream:
        """Transcribes a file."""
        asked = await asyncio.get_running_loop().run_in_executor(request_pool(), _Asked.read, request, self._task)
        name, _, version = asked.model.partition("/")
        model = self._host.find_able(_ABILITIES[self._task], name, version)
        if "word" in asked.units and not model.writes_word_times:
            raise InvalidInputError(
                _UNITS_FIELD, f"is word, and {model.bundle.manifest.name} gives times of segments alone; leave it out"
            )
        if asked.stream:
            return Stream(parts=_events(model, asked), media_type=EVENT_STREAM)
        has_times = asked.request.timestamps and (model.writes_times or asked.response_format != "verbose_json")
        answer = await model.transcribe([asked.file], request=replace(asked.request, timestamps=has_times))
        return _reply(answer.results[0], asked)

    def __repr__(self) -> str:
        return f"TranscriptionEndpoint({self._task.value})"


def _sampling(temperature: str) -> dict[str, Any]:
    if not temperature:
        return {}
    try:
        value = float(temperature)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise InvalidInputError("temperature", f"is {temperature[:64]!r}; must be from 0 to 1")
    return {"temperature": value} if value else {}


def _reply(transcript: Transcript, asked: _Asked) -> Reply:
    match asked.response_format:
        case "text":
            return Reply(body=f"{transcript.text}\n".encode(), media_type=_PLAIN)
        case "srt":
            return Reply(body=subtitles(transcript.segments, is_vtt=False).encode(), media_type=_PLAIN)
        case "vtt":
            return Reply(body=subtitles(transcript.segments, is_vtt=True).encode(), media_type=b"text/vtt")
        case "verbose_json":
            return Reply(body=to_json(_verbose(transcript, asked)))
        case _:
            return Reply(body=to_json({"text": transcript.text}))


def _verbose(transcript: Transcript, asked: _Asked) -> dict[str, Any]:
    temperature = asked.request.parameters.sampling.get("temperature", 0.0)
    words = [
        {"word": word.text, "start": round(word.start_s, 3), "end": round(word.end_s, 3)}
        for segment in transcript.segments
        for word in segment.words
    ]
    return {
        "task": asked.request.task.value,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "text": transcript.text,
        "segments": [
            {
                "id": number,
                "start": round(segment.start_s, 3),
                "end": round(segment.end_s, 3),
                "text": segment.text,
                "tokens": segment.token_ids,
                "temperature": temperature,
                "avg_logprob": segment.mean_log_probability,
                "compression_ratio": _compression_ratio(segment.text),
            }
            for number, segment in enumerate(transcript.segments)
        ],
        **({"words": words} if "word" in asked.units else {}),
    }


def _compression_ratio(text: str) -> float:
    """Returns the compression ratio of a text; a high one indicates hallucinated repetition."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def subtitles(segments: Sequence[Segment], *, is_vtt: bool) -> str:
    """Writes segments as SubRip or WebVTT."""
    mark = "." if is_vtt else ","
    lines = ["WEBVTT", ""] if is_vtt else []
    for number, segment in enumerate(segments, 1):
        if not is_vtt:
            lines.append(str(number))
        # A line break would end the cue, and an arrow would begin another.
        text = " ".join(segment.text.split()).replace("-->", "->")
        lines += [f"{_clock(segment.start_s, mark)} --> {_clock(segment.end_s, mark)}", text, ""]
    return "\n".join(lines)


def _clock(seconds: float, mark: str) -> str:
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


async def _events(model: Transcriber, asked: _Asked) -> AsyncGenerator[bytes, None]:
    async with aclosing(model.stream(asked.file, name="file", request=asked.request)) as parts:
        async for part in parts:
            if isinstance(part, SpeechDelta):
                if part.text:
                    yield event({"type": "transcript.text.delta", "delta": part.text})
            else:
                yield event({"type": "transcript.text.done", "text": _text_of(part)})


def _text_of(answer: Answer[Transcript]) -> str:
    return answer.results[0].text
