"""The asyncio client: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio

from headway.v1.generation_service_pb2 import StreamGenerateTextResponse
from headway.v1.translation_service_pb2 import StreamTranslateTextResponse
from headway_client import generation_requests, requests, translation_requests
from headway_client.base import BaseClient
from headway_client.calls import Piece, ResponseT, StreamCall, UnaryCall, serialize
from headway_client.conversation import Conversation, Conversations
from headway_client.embeddings import embedding_parts, image_parts, stack_embeddings
from headway_client.errors import from_rpc_error
from headway_client.options import (
    ClassifyOptions,
    EmbedImageOptions,
    EmbedOptions,
    GenerateOptions,
    LabelOptions,
    StreamGenerateOptions,
    StreamTranslateOptions,
    TextOptions,
    TranslateOptions,
)
from headway_client.requests import Images, Texts
from headway_client.results import (
    Answer,
    GeneratedText,
    HealthStatus,
    ImageEmbedding,
    ImageLabels,
    ModelDetails,
    ModelList,
    Task,
    TextEmbedding,
    TextLabels,
    TextSpans,
)
from headway_client.retry import NO_RETRIES, Readiness, RetryPolicy
from headway_client.streams import AsyncStreamRpc, AsyncTextStream, raise_if_closed
from headway_client.translation_results import TranslatedText

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MessageT = TypeVar("MessageT", bound=Piece)
ResultT = TypeVar("ResultT")


class AsyncClient(BaseClient):
    """Calls a headway server from one event loop.

    Every method that takes `timeout_s` ends by then, retries included; without one the client's own holds.
    Its options are described in `headway_client.options`.

    ```python
    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.generate("Once upon a time", max_new_tokens=20)
    print(answer[0].text)
    ```
    """

    _channel: grpc.aio.Channel | None = None
    """Made with the first call, because it belongs to the event loop that runs then."""

    async def generate(
        self, prompts: Texts, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer[GeneratedText]:
        """Continues every prompt."""
        return await self._send(generation_requests.generate(prompts, **options), timeout_s)

    def stream_generate(
        self, prompt: str, *, timeout_s: float | None = None, **options: Unpack[StreamGenerateOptions]
    ) -> AsyncTextStream[StreamGenerateTextResponse, GeneratedText]:
        """Continues one prompt and hands out the text as it appears."""
        return self._stream(generation_requests.stream_generate(prompt, **options), timeout_s)

    async def chat(
        self, conversations: Conversations, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer[GeneratedText]:
        """Continues a conversation, or each of several, by the model's turn."""
        return await self._send(generation_requests.chat(conversations, **options), timeout_s)

    def stream_chat(
        self, conversation: Conversation, *, timeout_s: float | None = None, **options: Unpack[StreamGenerateOptions]
    ) -> AsyncTextStream[StreamGenerateTextResponse, GeneratedText]:
        """Continues one conversation by the model's turn and hands out the text as it appears."""
        return self._stream(generation_requests.stream_chat(conversation, **options), timeout_s)

    async def translate(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[TranslateOptions]
    ) -> Answer[TranslatedText]:
        """Translates every text."""
        return await self._send(translation_requests.translate(texts, **options), timeout_s)

    def stream_translate(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[StreamTranslateOptions]
    ) -> AsyncTextStream[StreamTranslateTextResponse, TranslatedText]:
        """Translates one text and hands out the translation as it appears."""
        return self._stream(translation_requests.stream_translate(text, **options), timeout_s)

    async def classify(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Answer[TextLabels]:
        """Gives every text its most likely labels."""
        return await self._send(requests.classify(texts, **options), timeout_s)

    async def classify_tokens(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[TextOptions]
    ) -> Answer[TextSpans]:
        """Labels spans of every text."""
        return await self._send(requests.classify_tokens(texts, **options), timeout_s)

    async def embed(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Answer[TextEmbedding]:
        """Turns every text into a vector."""
        return await self._send(requests.embed(texts, **options), timeout_s)

    async def embed_texts(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> NDArray[np.float32]:
        """Turns every text into a row of one array, float32 (texts, width); `timeout_s` is that of each call.

        Any number of texts: those past the limit of a call go with further ones.
        """
        parts = embedding_parts(texts, options)
        return stack_embeddings([await self.embed(part, timeout_s=timeout_s, **own) for part, own in parts])

    async def embed_image(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[EmbedImageOptions]
    ) -> Answer[ImageEmbedding]:
        """Turns every image, given as bytes or by path, into a vector."""
        call = await asyncio.to_thread(requests.embed_image, images, **options)  # it may read files
        return await self._send(call, timeout_s)

    async def embed_images(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[EmbedImageOptions]
    ) -> NDArray[np.float32]:
        """Turns every image into a row of one array, float32 (images, width); `timeout_s` is that of each call.

        Any number of images: those past the limit of a call go with further ones.
        """
        parts = image_parts(images)
        return stack_embeddings([await self.embed_image(part, timeout_s=timeout_s, **options) for part in parts])

    async def label(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[LabelOptions]
    ) -> Answer[ImageLabels]:
        """Gives every image, given as bytes or by path, its most likely labels."""
        call = await asyncio.to_thread(requests.label, images, **options)  # it may read files
        return await self._send(call, timeout_s)

    async def models(self, task: Task | str | None = None, *, timeout_s: float | None = None) -> ModelList:
        """Lists the loaded models, of one task or of all."""
        return await self._send(requests.models(task), timeout_s)

    async def model(self, name: str, *, model_version: str = "", timeout_s: float | None = None) -> ModelDetails:
        """Tells everything about one model."""
        return await self._send(requests.model(name, model_version=model_version), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> HealthStatus:
        """Asks for the health of the server, or of one service by its full name."""
        return await self._send(requests.health(service), timeout_s)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the server serves.

        Raises:
            DeadlineExceededError: It does not within `timeout_s` seconds.
        """
        readiness = Readiness(self._settings.server, timeout_s)
        while True:
            with readiness:
                if await self._send(requests.health(), readiness.remaining_s(), NO_RETRIES) is HealthStatus.SERVING:
                    return
            await asyncio.sleep(readiness.pause_s())

    async def close(self) -> None:
        """Closes the connection; calls that are running are cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(
        self, call: UnaryCall[ResponseT, ResultT], timeout_s: float | None, retry: RetryPolicy | None = None
    ) -> ResultT:
        """Sends a call until it is answered or its failure is final."""
        attempts = self._attempts(timeout_s, retry)
        rpc = self._open_channel().unary_unary(
            call.path, request_serializer=serialize, response_deserializer=call.response_type.FromString
        )
        while True:
            self._check_open()
            try:
                response = await rpc(call.request, timeout=attempts.remaining_s(), metadata=self._settings.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from error
                await asyncio.sleep(delay_s)
            except asyncio.CancelledError as error:
                raise_if_closed(error)
                raise
            else:
                return call.read(response)

    def _stream(
        self, call: StreamCall[MessageT, ResultT], timeout_s: float | None
    ) -> AsyncTextStream[MessageT, ResultT]:
        """Opens a stream."""
        attempts = self._attempts(timeout_s)
        rpc = self._open_channel().unary_stream(
            call.path, request_serializer=serialize, response_deserializer=call.parse
        )

        def open_rpc(remaining_s: float) -> AsyncStreamRpc[MessageT]:
            self._check_open()
            return rpc(call.request, timeout=remaining_s, metadata=self._settings.metadata)

        return AsyncTextStream(call, attempts, open_rpc)

    def _open_channel(self) -> grpc.aio.Channel:
        self._check_open()
        if self._channel is None:
            self._channel = self._settings.open_async()
        return self._channel
