"""OpenAI's API: handlers, and conversion of models' answers."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.routing import BaseRoute, Route

from headway_server.errors import AnswerNotFoundError, InvalidInputError
from headway_server.preprocessing import ChatTurn
from headway_server.services.images import images_of_prompts
from headway_server.serving.abilities import Ability
from headway_server.serving.answers import Answer
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.outputs import read_vector
from headway_server.tasks.speech.transcripts import SpeechTask
from headway_server.tasks.synthesis.synthesizer import SpeechPart, Synthesizer
from headway_server.tasks.table import (
    CLASSIFY_TEXTS,
    EMBED_TEXTS,
    EMBED_TEXTS_SPARSELY,
    EMBED_TOKENS,
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
    EVENT_STREAM,
    MAX_NUMBERS_ON_LOOP,
    OPENAI_FORM,
    formatted,
    name_in_completions,
    name_in_ranking,
    name_in_responses,
    name_in_scoring,
    name_of,
)
from headway_server.transports.http.openai.image_edits import IMAGE_EDITS_PATH, ImageEditEndpoint, images_of
from headway_server.transports.http.openai.ranking import RERANK_PATHS, SCORE_PATHS, RankingEndpoint
from headway_server.transports.http.openai.requests import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    ImageBody,
    SpeechBody,
)
from headway_server.transports.http.openai.responses import NOTHING_STORED, ResponseBody, ResponseWriter
from headway_server.transports.http.openai.text_embeddings import (
    EMBED_ALL_PATH,
    EMBED_PATH,
    EMBED_SPARSE_PATH,
    PREDICT_PATH,
    TextEmbeddingsEndpoint,
)
from headway_server.transports.http.openai.tokens import DETOKENIZE_PATH, TOKENIZE_PATH, TokenEndpoint
from headway_server.transports.http.openai.transcription import TranscriptionEndpoint
from headway_server.transports.http.openai.written_texts import (
    ChatWriter,
    CompletionWriter,
    prompts_alone,
    prompts_of_parts,
)

_RESPONSES: Final = "/v1/responses"
OPENAI_ABILITIES: Final[Mapping[str, Ability[Any]]] = {
    "/v1/chat/completions": GENERATE_TEXTS,
    "/v1/completions": GENERATE_TEXTS,
    _RESPONSES: GENERATE_TEXTS,
    "/v1/embeddings": EMBED_TEXTS,
    **dict.fromkeys((*RERANK_PATHS, *SCORE_PATHS), RANK_TEXTS),
    EMBED_PATH: EMBED_TEXTS,
    EMBED_SPARSE_PATH: EMBED_TEXTS_SPARSELY,
    EMBED_ALL_PATH: EMBED_TOKENS,
    PREDICT_PATH: CLASSIFY_TEXTS,
    "/v1/images/generations": GENERATE_IMAGES,
    IMAGE_EDITS_PATH: GENERATE_IMAGES,
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
        writer = CompletionWriter(model, body)
        if body.stream:
            parts = model.stream_many(prompts, fields=fields, request=wanted)
            if body.is_read_alone:
                parts = prompts_of_parts(parts)
            return Stream(parts=writer.events(parts), media_type=EVENT_STREAM)
        answer = await model.generate(prompts, fields=fields, request=wanted)
        if body.is_read_alone:
            answer = prompts_alone(answer)
        return await formatted(lambda: writer.whole(answer), is_long=_is_long(answer, wanted))

    async def chat(self, request: Request) -> Reply | Stream:
        """Continues a conversation."""
        body, conversation, wanted = await request.parse(_read_chat)
        model = self._generator(body.name_and_version)
        writer = ChatWriter(model, body, wanted)
        images = await images_of_prompts(self._host, [conversation])
        if body.stream:
            parts = model.stream_many([conversation], fields=["messages"], request=wanted, images=images)
            return Stream(parts=writer.events(parts), media_type=EVENT_STREAM)
        answer = await model.generate([conversation], fields=["messages"], request=wanted, images=images)
        return await formatted(lambda: writer.whole(answer), is_long=_is_long(answer, wanted))

    async def respond(self, request: Request) -> Reply | Stream:
        """Continues a conversation by the Responses API."""
        body, conversation, wanted = await request.parse(_read_response)
        model = self._generator(body.name_and_version)
        writer = ResponseWriter(model, body, wanted)
        with body.naming():
            images = await images_of_prompts(self._host, [conversation])
            if body.stream:
                parts = model.stream_many([conversation], fields=["messages"], request=wanted, images=images)
                return Stream(parts=writer.events(parts), media_type=EVENT_STREAM, cut=writer.cut)
            answer = await model.generate([conversation], fields=["messages"], request=wanted, images=images)
        # The tokens of the reasoning are counted.
        is_long = model.reasoning_form is not None or _is_long(answer, wanted)
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
            body.inputs(),
            normalize=body.dimensions is None,
            prompt_name=body.prompt_of(embedding.prompts),
            deadline=None,
        )
        num_numbers = len(answer.results) * embedding.dimension
        return await formatted(lambda: _embeddings(answer, model, body), is_long=num_numbers > MAX_NUMBERS_ON_LOOP)

    async def generate_images(self, request: Request) -> Reply:
        """Generates images."""
        body = await request.parse(ImageBody.read)
        model = self._host.find_able(GENERATE_IMAGES, *body.name_and_version)
        answer = await model.generate(body.request(*model.size), deadline=None)
        return await formatted(lambda: images_of(answer, as_url=body.response_format == "url"), is_long=True)

    async def speak(self, request: Request) -> Reply | Stream:
        """Synthesizes the speech of a text: complete, or as streamed samples."""
        body = await request.parse(SpeechBody.read)
        model = self._host.find_able(SYNTHESIZE_SPEECH, *body.name_and_version)
        if body.response_format == "pcm":
            rate = model.sampling_rate
            return Stream(parts=_samples(model, body), media_type=f"audio/pcm; rate={rate}; channels=1".encode())
        answer = await model.synthesize([body.input], request=body.request(model.voices))
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


async def _samples(model: Synthesizer, body: SpeechBody) -> AsyncGenerator[bytes, None]:
    async with aclosing(model.stream(body.input, field="input", request=body.request(model.voices))) as parts:
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
        EMBED_SPARSE_PATH: texts.embed_sparse,
        EMBED_ALL_PATH: texts.embed_all,
        PREDICT_PATH: texts.predict,
    }
    names = {"/v1/completions": name_in_completions, _RESPONSES: name_in_responses}
    names |= dict.fromkeys(RERANK_PATHS, name_in_ranking) | dict.fromkeys(SCORE_PATHS, name_in_scoring)
    endpoint = partial(Endpoint, edge, form=OPENAI_FORM)
    forms: dict[str, Handler] = {path: TranscriptionEndpoint(host, task).answer for path, task in _SPEECH.items()}
    forms[IMAGE_EDITS_PATH] = ImageEditEndpoint(host).answer
    posted = {
        path: endpoint(path, handler, max_bytes=num_bytes, name_of=names.get(path, name_of))
        for path, handler in handlers.items()
    } | {
        path: endpoint(
            path,
            handler,
            max_bytes=settings.max_message_bytes,
            media_types=frozenset({FORM_DATA}),
            name_of=name_of,
        )
        for path, handler in forms.items()
    }
    return [
        *(Route(path, answers, methods=["POST"]) for path, answers in posted.items()),
        Route("/v1/models", endpoint("/v1/models", service.list_models), methods=["GET"]),
        Route(f"{_RESPONSES}/{{id}}", endpoint(f"{_RESPONSES}/ID", service.find_response), methods=["GET", "DELETE"]),
        Route("/v1/models/{model:path}", endpoint("/v1/models/MODEL", service.get_model), methods=["GET"]),
    ]


def _is_long(answer: Answer[GeneratedText], request: GenerationRequest) -> bool:
    num_characters = sum(len(text.text) for text in answer.results)
    return request.log_probabilities is not None or num_characters > _MAX_CHARACTERS_ON_LOOP


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
