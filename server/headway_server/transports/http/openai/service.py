"""OpenAI's API: handlers, and conversion of models' answers."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.routing import BaseRoute, Route

from headway_server.decoding.sequence import Delta, FinishReason, TokenLogProbability
from headway_server.errors import AnswerNotFoundError, InvalidInputError
from headway_server.observers import current_call
from headway_server.preprocessing import AnswerDelta, AnswerReader, ChatTurn
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.abilities import Ability
from headway_server.serving.answers import Answer
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.image_generation.model import GeneratedImage
from headway_server.tasks.outputs import read_vector
from headway_server.tasks.speech.model import SpeechTask
from headway_server.tasks.synthesis.model import SpeechPart, SynthesisModel
from headway_server.tasks.table import (
    CLASSIFY_TEXTS,
    EMBED_TEXTS,
    GENERATE_IMAGES,
    GENERATE_TEXTS,
    RANK_TEXTS,
    SYNTHESIZE_SPEECH,
    TRANSCRIBE_SPEECH,
    TRANSLATE_SPEECH,
)
from headway_server.tasks.text.model import EmbeddedText, TextModel
from headway_server.transports.http.edge import FORM_DATA, Edge, Endpoint, Handler, Reply, Request, Stream, to_json
from headway_server.transports.http.openai.form import (
    DONE,
    EVENT_STREAM,
    MAX_NUMBERS_ON_LOOP,
    OPENAI_FORM,
    event,
    formatted,
    name_in_completions,
    name_in_ranking,
    name_in_responses,
    name_in_scoring,
    name_of,
)
from headway_server.transports.http.openai.ranking import RERANK_PATHS, SCORE_PATHS, RankingEndpoint
from headway_server.transports.http.openai.requests import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    ImageBody,
    SpeechBody,
)
from headway_server.transports.http.openai.responses import NOTHING_STORED, ResponseBody, ResponseWriter
from headway_server.transports.http.openai.text_embeddings import EMBED_PATH, PREDICT_PATH, TextEmbeddingsEndpoint
from headway_server.transports.http.openai.tokens import DETOKENIZE_PATH, TOKENIZE_PATH, TokenEndpoint
from headway_server.transports.http.openai.transcription import TranscriptionEndpoint
from headway_server.transports.http.openai.written_tokens import TokenCounts, TokenWriter

_REASONS: Final = {
    FinishReason.END_OF_SEQUENCE: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONSTRAINT: "stop",
}
_RESPONSES: Final = "/v1/responses"
OPENAI_ABILITIES: Final[Mapping[str, Ability[Any]]] = {
    "/v1/chat/completions": GENERATE_TEXTS,
    "/v1/completions": GENERATE_TEXTS,
    _RESPONSES: GENERATE_TEXTS,
    "/v1/embeddings": EMBED_TEXTS,
    **dict.fromkeys((*RERANK_PATHS, *SCORE_PATHS), RANK_TEXTS),
    EMBED_PATH: EMBED_TEXTS,
    PREDICT_PATH: CLASSIFY_TEXTS,
    "/v1/images/generations": GENERATE_IMAGES,
    "/v1/audio/speech": SYNTHESIZE_SPEECH,
    "/v1/audio/transcriptions": TRANSCRIBE_SPEECH,
    "/v1/audio/translations": TRANSLATE_SPEECH,
    **dict.fromkeys((TOKENIZE_PATH, DETOKENIZE_PATH), GENERATE_TEXTS),
}
"""Abilities by path; calls of other paths need no model."""
_SPEECH: Final = {
    "/v1/audio/transcriptions": SpeechTask.TRANSCRIBE,
    "/v1/audio/translations": SpeechTask.TRANSLATE,
}
_AUDIO: Final = {"mp3": b"audio/mpeg", "wav": b"audio/wav", "flac": b"audio/flac", "opus": b"audio/ogg"}
_MAX_CHARACTERS_ON_LOOP: Final = 100_000


class OpenAIService:
    """Answers from a host's models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def list_models(self, _: Request) -> Reply:
        """Lists the loaded models."""
        models = [_model(model) for model in self._host.models]
        listed = {
            "object": "list",
            "data": models,
            "models": [model["name"] for model in models],
        }  # the last for KServe
        return Reply(body=to_json(listed))

    async def get_model(self, request: Request) -> Reply:
        """Describes one model."""
        name, _, version = request.path["model"].partition("/")
        return Reply(body=to_json(_model(self._host.get(name, version))))

    async def complete(self, request: Request) -> Reply | Stream:
        """Continues prompts."""
        body = await request.parse(CompletionBody.read)
        model = self._generator(body.name_and_version)
        prompts, fields = body.prompts()
        wanted = body.request()
        writer = _CompletionWriter(model)
        if body.stream:
            parts = model.stream_many(prompts, fields=fields, request=wanted)
            return Stream(parts=_events(parts, writer, body), media_type=EVENT_STREAM)
        answer = await model.generate(prompts, fields=fields, request=wanted)
        return await formatted(lambda: writer.whole(answer), is_long=_is_long(answer, body.logprobs is not None))

    async def chat(self, request: Request) -> Reply | Stream:
        """Continues a conversation."""
        body, conversation, wanted = await request.parse(_read_chat)
        model = self._generator(body.name_and_version)
        writer = _ChatWriter(model, wanted, repeated=body.repeated)
        if body.stream:
            parts = model.stream(conversation, field="messages", request=wanted)
            return Stream(parts=_events(parts, writer, body), media_type=EVENT_STREAM)
        answer = await model.generate([conversation], fields=["messages"], request=wanted)
        return await formatted(lambda: writer.whole(answer), is_long=_is_long(answer, body.logprobs))

    async def respond(self, request: Request) -> Reply | Stream:
        """Continues a conversation by the Responses API."""
        body, conversation, wanted = await request.parse(_read_response)
        model = self._generator(body.name_and_version)
        writer = ResponseWriter(model, body, wanted)
        with body.naming():
            if body.stream:
                parts = writer.events(model.stream(conversation, field="messages", request=wanted))
                return Stream(parts=parts, media_type=EVENT_STREAM, cut=writer.cut)
            answer = await model.generate([conversation], fields=["messages"], request=wanted)
        # The tokens of the reasoning are counted.
        is_long = model.reasoning_form is not None or _is_long(answer, wanted.log_probabilities is not None)
        return await formatted(lambda: writer.whole(answer), is_long=is_long)

    async def find_response(self, _: Request) -> Reply:
        """Refuses to look for an answer."""
        raise AnswerNotFoundError(NOTHING_STORED)

    async def embed(self, request: Request) -> Reply:
        """Embeds texts as vectors of length 1."""
        body = await request.parse(EmbeddingBody.read)
        model = self._host.find_able(EMBED_TEXTS, *body.name_and_version)
        embedding = model.bundle.manifest.embedding
        assert embedding is not None, "the ability requires it"
        if body.dimensions is not None and not 1 <= body.dimensions <= embedding.dimension:
            raise InvalidInputError("dimensions", f"is {body.dimensions}; must be from 1 to {embedding.dimension}")
        answer = await model.embed_many(
            body.inputs(), normalize=body.dimensions is None, prompt_name=body.prompt_name, deadline=None
        )
        num_numbers = len(answer.results) * embedding.dimension
        return await formatted(lambda: _embeddings(answer, model, body), is_long=num_numbers > MAX_NUMBERS_ON_LOOP)

    async def generate_images(self, request: Request) -> Reply:
        """Generates images."""
        body = await request.parse(ImageBody.read)
        model = self._host.find_able(GENERATE_IMAGES, *body.name_and_version)
        answer = await model.generate(body.request(*model.size), deadline=None)
        return await formatted(lambda: _images(answer, as_url=body.response_format == "url"), is_long=True)

    async def speak(self, request: Request) -> Reply | Stream:
        """Synthesizes the speech of a text: complete, or as streamed samples."""
        body = await request.parse(SpeechBody.read)
        model = self._host.find_able(SYNTHESIZE_SPEECH, *body.name_and_version)
        if body.response_format == "pcm":
            rate = model.codec.sampling_rate
            return Stream(parts=_samples(model, body), media_type=f"audio/pcm; rate={rate}; channels=1".encode())
        answer = await model.synthesize([body.input], request=body.request())
        return Reply(body=answer.results[0].audio, media_type=_AUDIO[body.response_format])

    def _generator(self, name_and_version: tuple[str, str]) -> GenerationModel:
        return self._host.find_able(GENERATE_TEXTS, *name_and_version)

    def __repr__(self) -> str:
        return f"OpenAIService({self._host!r})"


def _read_chat(data: bytes) -> tuple[ChatBody, tuple[ChatTurn, ...], GenerationRequest]:
    """Parses a request with its nested JSON on the calling thread; errors are those of `ChatBody`."""
    body = ChatBody.read(data)
    return body, body.conversation(), body.request()


def _read_response(data: bytes) -> tuple[ResponseBody, tuple[ChatTurn, ...], GenerationRequest]:
    """Parses a request with its nested JSON on the calling thread; errors are those of `ChatBody`, named as here."""
    body = ResponseBody.read(data)
    with body.naming():
        chat = body.chat()
        return body, chat.conversation(), chat.request()


async def _samples(model: SynthesisModel, body: SpeechBody) -> AsyncGenerator[bytes, None]:
    async with aclosing(model.stream(body.input, field="input", request=body.request())) as parts:
        async for part in parts:
            if isinstance(part, SpeechPart):
                yield part.pcm


def openai_routes(edge: Edge, host: ModelHost, settings: ServerSettings) -> list[BaseRoute]:
    """Returns the routes of the API."""
    service, ranking, tokens = OpenAIService(host), RankingEndpoint(host), TokenEndpoint(host)
    texts = TextEmbeddingsEndpoint(host)
    num_bytes = settings.max_text_request_bytes
    handlers: dict[str, Handler] = {
        "/v1/chat/completions": service.chat,
        "/v1/completions": service.complete,
        _RESPONSES: service.respond,
        "/v1/embeddings": service.embed,
        "/v1/images/generations": service.generate_images,
        "/v1/audio/speech": service.speak,
        **dict.fromkeys(RERANK_PATHS, ranking.rerank),
        **dict.fromkeys(SCORE_PATHS, ranking.score),
        TOKENIZE_PATH: tokens.tokenize,
        DETOKENIZE_PATH: tokens.detokenize,
        EMBED_PATH: texts.embed,
        PREDICT_PATH: texts.predict,
    }
    names = {"/v1/completions": name_in_completions, _RESPONSES: name_in_responses}
    names |= dict.fromkeys(RERANK_PATHS, name_in_ranking) | dict.fromkeys(SCORE_PATHS, name_in_scoring)
    endpoint = partial(Endpoint, edge, form=OPENAI_FORM)
    posted = {
        path: endpoint(path, handler, max_bytes=num_bytes, name_of=names.get(path, name_of))
        for path, handler in handlers.items()
    } | {
        path: endpoint(
            path,
            TranscriptionEndpoint(host, task).answer,
            max_bytes=settings.max_message_bytes,
            media_types=frozenset({FORM_DATA}),
            name_of=name_of,
        )
        for path, task in _SPEECH.items()
    }
    return [
        *(Route(path, answers, methods=["POST"]) for path, answers in posted.items()),
        Route("/v1/models", endpoint("/v1/models", service.list_models), methods=["GET"]),
        Route(f"{_RESPONSES}/{{id}}", endpoint(f"{_RESPONSES}/ID", service.find_response), methods=["GET", "DELETE"]),
        Route("/v1/models/{model:path}", endpoint("/v1/models/MODEL", service.get_model), methods=["GET"]),
    ]


class _Writer:
    """Formats generated texts; subclasses add the names of each API."""

    kind = ""
    kind_of_chunk = ""
    prefix = ""

    def __init__(self, model: GenerationModel) -> None:
        call, manifest = current_call(), model.bundle.manifest
        self._model = model
        self._tokens = TokenWriter(model)
        self._head = {
            "id": f"{self.prefix}-{call.request_id if call is not None else ''}",
            "created": int(time.time()),
            "model": manifest.name,
            "system_fingerprint": f"{manifest.name}/{manifest.version}/{model.precision.value}",
        }

    def whole(self, answer: Answer[GeneratedText]) -> dict[str, Any]:
        """Formats the answer to a unary call."""
        choices = [self._choice(index, text) for index, text in enumerate(answer.results)]
        return self._head | {
            "object": self.kind,
            "choices": choices,
            "usage": TokenCounts.of(answer.results).usage(),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Formats an event of a stream."""
        return self._head | {"object": self.kind_of_chunk, "choices": choices}

    def first(self, count: int) -> Iterator[dict[str, Any]]:  # noqa: ARG002 (for subclasses)
        """Yields the choices of the events before the first text."""
        yield from ()

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """Formats a delta; None if it is empty."""
        raise NotImplementedError

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """Formats the rest of a text, and the reason of its end."""
        raise NotImplementedError

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        raise NotImplementedError


class _CompletionWriter(_Writer):
    """Writes completions."""

    kind = kind_of_chunk = "text_completion"
    prefix = "cmpl"

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """See `_Writer`."""
        if not delta.output and not delta.tokens:
            return None
        logprobs = self._logprobs(delta.prompt_tokens or delta.tokens, delta.text_offsets)
        return {"index": delta.sample, "text": delta.output, "logprobs": logprobs, "finish_reason": None}

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """See `_Writer`."""
        reason = _REASONS[text.result.finish_reason]
        yield {"index": text.sample, "text": "", "logprobs": None, "finish_reason": reason}

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        tokens = (*text.result.prompt_tokens, *text.result.tokens)
        return {
            "index": index,
            "text": text.text,
            "logprobs": self._logprobs(tokens, text.text_offsets()) if tokens else None,
            "finish_reason": _REASONS[text.result.finish_reason],
        }

    def _logprobs(self, tokens: Sequence[TokenLogProbability], text_offsets: Sequence[int]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [self._text(token.token_id) for token in tokens],
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": [self._top(token) or None for token in tokens],
            "text_offset": list(text_offsets),
        }

    def _top(self, token: TokenLogProbability) -> dict[str, float]:
        """Formats the likeliest tokens; of several with the same text, all but the first are written as ids."""
        found: dict[str, float] = {}
        for token_id, log_probability in token.top_tokens:
            text = self._text(token_id)
            found[f"token_id:{token_id}" if text in found else text] = log_probability
        return found

    def _text(self, token_id: int) -> str:
        return self._tokens.text(token_id, "bytes:")[0]


class _ChatWriter(_Writer):
    """Formats chat completions."""

    kind = "chat.completion"
    kind_of_chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: GenerationModel, request: GenerationRequest, *, repeated: str = "") -> None:
        """Formats a model's texts, reasoning and tool calls; each text after the `repeated` one."""
        super().__init__(model)
        self._request = request
        self._repeated = repeated
        self._readers: dict[int, AnswerReader] = {}

    def first(self, count: int) -> Iterator[dict[str, Any]]:
        """See `_Writer`."""
        for index in range(count):
            self._readers[index] = self._model.answer_reader(self._request)
            yield self._chunk(index, {"role": "assistant", "content": self._repeated})

    def delta(self, delta: Delta) -> dict[str, Any] | None:
        """See `_Writer`."""
        said = _fields(self._readers[delta.sample].feed(delta.output))
        return self._chunk(delta.sample, said, delta.tokens) if said or delta.tokens else None

    def last(self, text: GeneratedText) -> Iterator[dict[str, Any]]:
        """See `_Writer`."""
        reader = self._readers[text.sample]
        if rest := _fields(reader.end()):
            yield self._chunk(text.sample, rest)
        yield self._chunk(text.sample, {}) | {"finish_reason": _finish_reason(text, reader)}

    def _chunk(self, index: int, delta: dict[str, Any], tokens: Sequence[TokenLogProbability] = ()) -> dict[str, Any]:
        delta = delta or ({"content": ""} if tokens else {})
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": None}

    def _choice(self, index: int, text: GeneratedText) -> dict[str, Any]:
        reader = self._model.answer_reader(self._request)
        message = _fields(reader.read(text.text))
        for call in message.get("tool_calls", ()):
            del call["index"]
        content = self._repeated + message.pop("content", "")
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": content or (None if reader.call_ids else ""),
                "refusal": None,
                **message,
            },
            "logprobs": self._logprobs(text.result.tokens),
            "finish_reason": _finish_reason(text, reader),
        }

    def _logprobs(self, tokens: Sequence[TokenLogProbability]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {"content": self._tokens.entries(tokens), "refusal": None}


def _fields(content: AnswerDelta) -> dict[str, Any]:
    """Returns the fields of a message, or of a chunk's delta, without empty ones."""
    calls = [
        {"index": call.index}
        | ({"id": call.call_id, "type": "function"} if call.call_id else {})
        | {"function": ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}}
        for call in content.calls
    ]
    fields = {"reasoning_content": content.reasoning, "content": content.text, "tool_calls": calls}
    return {name: value for name, value in fields.items() if value}


def _finish_reason(text: GeneratedText, reader: AnswerReader) -> str:
    reason = _REASONS[text.result.finish_reason]
    return "tool_calls" if reader.call_ids and reason == "stop" else reason


async def _events(
    parts: AsyncGenerator[Delta | Answer[GeneratedText], None], writer: _Writer, body: CompletionBody | ChatBody
) -> AsyncGenerator[bytes, None]:
    """Formats a model's output as the events of a stream."""

    def events(choices: Iterable[dict[str, Any]], counts: TokenCounts | None) -> bytes:
        usage = counts.usage() if counts is not None and body.counts_continuously else None
        beside = {"usage": usage} if body.includes_usage else {}
        return b"".join(event(writer.chunk([choice]) | beside) for choice in choices)

    def delta_events(delta: Delta) -> bytes:
        choice = writer.delta(delta)
        counts = TokenCounts(num_read=delta.num_prompt_tokens, num_new=delta.num_new_tokens)
        return b"" if choice is None else events([choice], counts)

    first: Iterable[dict[str, Any]] = writer.first(body.n)
    async with aclosing(parts):
        async for part in parts:
            read = part.num_prompt_tokens if isinstance(part, Delta) else TokenCounts.of(part.results).num_read
            written, first = events(first, TokenCounts(num_read=read, num_new=0)), ()
            if isinstance(part, Delta):
                if part.prompt_tokens:  # formatting a long prompt takes time
                    written += await asyncio.get_running_loop().run_in_executor(text_pool(), delta_events, part)
                else:
                    written += delta_events(part)
                if written:
                    yield written
                continue
            for index, text in enumerate(part.results):
                counts = TokenCounts.of([replace(text, sample=0)])
                written += events(writer.last(replace(text, sample=index)), counts)
            if body.includes_usage:
                written += event(writer.chunk([]) | {"usage": TokenCounts.of(part.results).usage()})
            yield written + DONE


def _is_long(answer: Answer[GeneratedText], has_log_probabilities: bool) -> bool:
    return has_log_probabilities or sum(len(text.text) for text in answer.results) > _MAX_CHARACTERS_ON_LOOP


def _images(answer: Answer[GeneratedImage], *, as_url: bool) -> dict[str, Any]:
    name, head = ("url", "data:image/png;base64,") if as_url else ("b64_json", "")
    return {
        "created": int(time.time()),
        "data": [{name: head + base64.b64encode(image.png).decode(), "seed": image.seed} for image in answer.results],
        "output_format": "png",
        "size": f"{answer.results[0].width}x{answer.results[0].height}",
    }


def _embeddings(answer: Answer[EmbeddedText], model: TextModel, body: EmbeddingBody) -> dict[str, Any]:
    num_tokens = sum(result.num_tokens for result in answer.results)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _vector(result.values, body)}
            for index, result in enumerate(answer.results)
        ],
        "model": model.bundle.manifest.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _vector(values: NDArray[np.float32], body: EmbeddingBody) -> list[float] | str:
    """Formats a vector (D,), or its first dimensions rescaled to length 1."""
    if body.dimensions is not None:
        values = read_vector(values[: body.dimensions], normalize=True)
    if body.encoding_format == "float":
        floats: list[float] = values.tolist()
        return floats
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _model(model: ServedModel) -> dict[str, Any]:
    manifest = model.bundle.manifest
    return {
        "id": manifest.name,
        "object": "model",
        "created": 0,
        "owned_by": "headway",
        "version": manifest.version,
        "task": manifest.task,
        "name": manifest.name,
        "ready": True,  # KServe's question whether the model is loaded
    }
