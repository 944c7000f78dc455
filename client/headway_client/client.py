"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from headway.v1.generation_service_pb2 import StreamGenerateTextResponse
from headway.v1.translation_service_pb2 import StreamTranslateTextResponse
from headway_client import generation_requests, requests, translation_requests
from headway_client.base import DEFAULT_TIMEOUT_S, BaseClient
from headway_client.calls import Piece, ResponseT, StreamCall, UnaryCall, serialize
from headway_client.channels import DEFAULT_SERVER
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
from headway_client.streams import StreamRpc, TextStream
from headway_client.translation_results import TranslatedText

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MessageT = TypeVar("MessageT", bound=Piece)
ResultT = TypeVar("ResultT")


class Client(BaseClient):
    """Calls a headway server; safe to share between threads.

    Every method that takes `timeout_s` ends by then, retries included; without one the client's own holds.
    Its options are described in `headway_client.options`.

    ```python
    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_new_tokens=20)[0].text)
    ```
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Prepares a client, as `BaseClient` describes."""
        super().__init__(server, timeout_s=timeout_s, retry=retry, credentials=credentials, metadata=metadata)
        self._channel = self._settings.open()

    def generate(
        self, prompts: Texts, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer[GeneratedText]:
        """Continues every prompt."""
        return self._send(generation_requests.generate(prompts, **options), timeout_s)

    def stream_generate(
        self, prompt: str, *, timeout_s: float | None = None, **options: Unpack[StreamGenerateOptions]
    ) -> TextStream[StreamGenerateTextResponse, GeneratedText]:
        """Continues one prompt and hands out the text as it appears."""
        return self._stream(generation_requests.stream_generate(prompt, **options), timeout_s)

    def chat(
        self, conversations: Conversations, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Answer[GeneratedText]:
        """Continues a conversation, or each of several, by the model's turn."""
        return self._send(generation_requests.chat(conversations, **options), timeout_s)

    def stream_chat(
        self, conversation: Conversation, *, timeout_s: float | None = None, **options: Unpack[StreamGenerateOptions]
    ) -> TextStream[StreamGenerateTextResponse, GeneratedText]:
        """Continues one conversation by the model's turn and hands out the text as it appears."""
        return self._stream(generation_requests.stream_chat(conversation, **options), timeout_s)

    def translate(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[TranslateOptions]
    ) -> Answer[TranslatedText]:
        """Translates every text."""
        return self._send(translation_requests.translate(texts, **options), timeout_s)

    def stream_translate(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[StreamTranslateOptions]
    ) -> TextStream[StreamTranslateTextResponse, TranslatedText]:
        """Translates one text and hands out the translation as it appears."""
        return self._stream(translation_requests.stream_translate(text, **options), timeout_s)

    def classify(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Answer[TextLabels]:
        """Gives every text its most likely labels."""
        return self._send(requests.classify(texts, **options), timeout_s)

    def classify_tokens(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[TextOptions]
    ) -> Answer[TextSpans]:
        """Labels spans of every text."""
        return self._send(requests.classify_tokens(texts, **options), timeout_s)

    def embed(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Answer[TextEmbedding]:
        """Turns every text into a vector."""
        return self._send(requests.embed(texts, **options), timeout_s)

    def embed_texts(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedOptions]
    ) -> NDArray[np.float32]:
        """Turns every text into a row of one array, float32 (texts, width); `timeout_s` is that of each call.

        Any number of texts: those past the limit of a call go with further ones.
        """
        parts = embedding_parts(texts, options)
        return stack_embeddings([self.embed(part, timeout_s=timeout_s, **own) for part, own in parts])

    def embed_image(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[EmbedImageOptions]
    ) -> Answer[ImageEmbedding]:
        """Turns every image, given as bytes or by path, into a vector."""
        return self._send(requests.embed_image(images, **options), timeout_s)

    def embed_images(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[EmbedImageOptions]
    ) -> NDArray[np.float32]:
        """Turns every image into a row of one array, float32 (images, width); `timeout_s` is that of each call.

        Any number of images: those past the limit of a call go with further ones.
        """
        parts = image_parts(images)
        return stack_embeddings([self.embed_image(part, timeout_s=timeout_s, **options) for part in parts])

    def label(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[LabelOptions]
    ) -> Answer[ImageLabels]:
        """Gives every image, given as bytes or by path, its most likely labels."""
        return self._send(requests.label(images, **options), timeout_s)

    def models(self, task: Task | str | None = None, *, timeout_s: float | None = None) -> ModelList:
        """Lists the loaded models, of one task or of all."""
        return self._send(requests.models(task), timeout_s)

    def model(self, name: str, *, model_version: str = "", timeout_s: float | None = None) -> ModelDetails:
        """Tells everything about one model."""
        return self._send(requests.model(name, model_version=model_version), timeout_s)

    def health(self, service: str = "", *, timeout_s: float | None = None) -> HealthStatus:
        """Asks for the health of the server, or of one service by its full name."""
        return self._send(requests.health(service), timeout_s)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the server serves.

        Raises:
            DeadlineExceededError: It does not within `timeout_s` seconds.
        """
        readiness = Readiness(self._settings.server, timeout_s)
        while True:
            with readiness:
                if self._send(requests.health(), readiness.remaining_s(), NO_RETRIES) is HealthStatus.SERVING:
                    return
            time.sleep(readiness.pause_s())

    def close(self) -> None:
        """Closes the connection; calls that are running are cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self, call: UnaryCall[ResponseT, ResultT], timeout_s: float | None, retry: RetryPolicy | None = None
    ) -> ResultT:
        """Sends a call until it is answered or its failure is final."""
        attempts = self._attempts(timeout_s, retry)
        rpc = self._channel.unary_unary(
            call.path, request_serializer=serialize, response_deserializer=call.response_type.FromString
        )
        while True:
            self._check_open()
            try:
                response = rpc(call.request, timeout=attempts.remaining_s(), metadata=self._settings.metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from error
                time.sleep(delay_s)
            else:
                return call.read(response)

    def _stream(self, call: StreamCall[MessageT, ResultT], timeout_s: float | None) -> TextStream[MessageT, ResultT]:
        """Opens a stream."""
        attempts = self._attempts(timeout_s)
        rpc = self._channel.unary_stream(call.path, request_serializer=serialize, response_deserializer=call.parse)

        def open_rpc(remaining_s: float) -> StreamRpc[MessageT]:
            self._check_open()
            return rpc(call.request, timeout=remaining_s, metadata=self._settings.metadata)

        return TextStream(call, attempts, open_rpc)
