"""The asyncio client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc

from headway_client import requests
from headway_client.async_streams import (
    AsyncImageStream,
    AsyncSegmentSession,
    AsyncSegmentStream,
    AsyncSpeechStream,
    AsyncTextStream,
)
from headway_client.channel import AsyncChannel
from headway_client.connection import DEFAULT_TIMEOUT_S, Connection, ConnectionOptions
from headway_client.options import (
    AnswerQuestionOptions,
    CaptionImageOptions,
    ChatOptions,
    ClassifyAudioOptions,
    ClassifyImageOptions,
    ClassifyPixelsOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    ClassifyVideoOptions,
    DetectObjectsOptions,
    EmbedImageOptions,
    EmbedTextOptions,
    EstimateDepthOptions,
    FillMaskOptions,
    GenerateImageOptions,
    GenerateTextOptions,
    InspectGenerationOptions,
    InspectImageOptions,
    InspectTextOptions,
    InspectTranslationOptions,
    PrepareImageOptions,
    RankImagesOptions,
    RankTextsOptions,
    RewriteTextOptions,
    ScoreTextOptions,
    SegmentEverythingOptions,
    SegmentImageOptions,
    SegmentInteractivelyOptions,
    StreamCaptionImageOptions,
    StreamChatOptions,
    StreamGenerateImageOptions,
    StreamGenerateTextOptions,
    StreamRewriteTextOptions,
    StreamSynthesizeSpeechOptions,
    StreamTranscribeSpeechOptions,
    StreamTranslateTextOptions,
    SynthesizeSpeechOptions,
    Texts,
    TranscribeSpeechOptions,
    TranslateTextOptions,
    spell_out,
)
from headway_client.requests import (
    Audio,
    Audios,
    Call,
    Conversation,
    Conversations,
    Image,
    Images,
    Prompt,
    Prompts,
    SegmentPrompt,
)
from headway_client.results import (
    AliasList,
    Answer,
    AudioClassification,
    BundleList,
    BundleStatus,
    DepthMap,
    EmbeddingAnswer,
    FilledText,
    GeneratedImage,
    GeneratedText,
    HealthStatus,
    ImageCaption,
    ImageClassification,
    ImageEmbedding,
    ImageInspection,
    Model,
    ModelDetails,
    ModelList,
    ObjectDetection,
    PixelClassification,
    PreparedImage,
    PromptMasks,
    QuestionAnswers,
    RankedImage,
    RankedText,
    RewrittenText,
    RouteList,
    SpeechTranscript,
    SynthesizedSpeech,
    TextClassification,
    TextEmbedding,
    TextInspection,
    TextScore,
    TokenClassification,
    TranslatedText,
    TranslationInspection,
    VideoClassification,
)
from headway_client.retry import NO_RETRIES, Attempts, Readiness, RetryBudget, RetryPolicy
from headway_client.tensors import Parameter, TensorAnswer
from headway_client.waiting import async_call_all, async_sleep

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

ResultT = TypeVar("ResultT")


class AsyncClient:
    """Calls a headway server from one event loop.

    Each method is an RPC of the API. A call ends within `timeout_s`, retries included. Default: the client's own.

    ```python
    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.generate_text("Once upon a time", max_new_tokens=20)
    print(answer[0].text)
    ```
    """

    @spell_out
    def __init__(
        self,
        server: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        """Prepares a client. It connects at its first call.

        Options left out come from a profile or the environment, see `headway_client.connection`.

        Args:
            server: Host and port, or another target that gRPC knows. Default: HEADWAY_SERVER, or 127.0.0.1:50051.
            timeout_s: Default timeout of a call, in seconds.
            retry: Retry policy. Default: `RetryPolicy()`.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s:g}; must be above 0")
        self._connection = Connection(server, **options)
        self._channel = AsyncChannel(self._connection)
        self._timeout_s = timeout_s
        self._retry = RetryPolicy() if retry is None else retry
        self._budget = RetryBudget(self._retry)

    @property
    def server(self) -> str:
        """Host and port of the server, or its other gRPC target."""
        return self._connection.server

    def connectivity(self) -> grpc.ChannelConnectivity:
        """Returns the state of the connection at this moment; no call is made. SHUTDOWN once the client is closed."""
        return self._channel.connectivity()

    @spell_out
    async def generate_text(
        self, prompts: Prompts, *, timeout_s: float | None = None, **options: Unpack[GenerateTextOptions]
    ) -> Answer[GeneratedText]:
        """Continues every prompt."""
        return await self._send(requests.generate_text(prompts, **options), timeout_s)

    @spell_out
    def stream_generate_text(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[StreamGenerateTextOptions]
    ) -> AsyncTextStream[GeneratedText]:
        """Continues one prompt and returns the text delta by delta, as it is generated."""
        return self._stream(requests.stream_generate_text(prompt, **options), timeout_s)

    @spell_out
    async def chat(
        self, conversations: Conversations, *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Answer[GeneratedText]:
        """Answers one conversation or several: GenerateText with conversations."""
        return await self._send(requests.chat(conversations, **options), timeout_s)

    @spell_out
    def stream_chat(
        self,
        conversation: Conversation,
        *,
        timeout_s: float | None = None,
        **options: Unpack[StreamChatOptions],
    ) -> AsyncTextStream[GeneratedText]:
        """Answers one conversation, delta by delta: StreamGenerateText with a conversation."""
        return self._stream(requests.stream_chat(conversation, **options), timeout_s)

    @spell_out
    async def translate_text(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[TranslateTextOptions]
    ) -> Answer[TranslatedText]:
        """Translates every text."""
        return await self._send(requests.translate_text(texts, **options), timeout_s)

    @spell_out
    def stream_translate_text(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[StreamTranslateTextOptions]
    ) -> AsyncTextStream[TranslatedText]:
        """Translates one text and returns the translation delta by delta, as it is generated."""
        return self._stream(requests.stream_translate_text(text, **options), timeout_s)

    @spell_out
    async def rewrite_text(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[RewriteTextOptions]
    ) -> Answer[RewrittenText]:
        """Rewrites every text as the model was trained to, such as a summary or an answer to an instruction."""
        return await self._send(requests.rewrite_text(texts, **options), timeout_s)

    @spell_out
    def stream_rewrite_text(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[StreamRewriteTextOptions]
    ) -> AsyncTextStream[RewrittenText]:
        """Rewrites one text and returns the result delta by delta, as it is generated."""
        return self._stream(requests.stream_rewrite_text(text, **options), timeout_s)

    @spell_out
    async def caption_image(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[CaptionImageOptions]
    ) -> Answer[ImageCaption]:
        """Captions every image, given as bytes or by path."""
        return await self._send(requests.caption_image(images, **options), timeout_s)

    @spell_out
    def stream_caption_image(
        self, image: Image = b"", *, timeout_s: float | None = None, **options: Unpack[StreamCaptionImageOptions]
    ) -> AsyncTextStream[ImageCaption]:
        """Captions one image and returns the caption delta by delta, as it is generated."""
        return self._stream(requests.stream_caption_image(image, **options), timeout_s)

    @spell_out
    async def transcribe_speech(
        self, audios: Audios, *, timeout_s: float | None = None, **options: Unpack[TranscribeSpeechOptions]
    ) -> Answer[SpeechTranscript]:
        """Transcribes every audio, given as bytes or by path."""
        return await self._send(requests.transcribe_speech(audios, **options), timeout_s)

    @spell_out
    def stream_transcribe_speech(
        self, audio: Audio, *, timeout_s: float | None = None, **options: Unpack[StreamTranscribeSpeechOptions]
    ) -> AsyncTextStream[SpeechTranscript]:
        """Transcribes one audio and returns the transcript delta by delta, as it is generated."""
        return self._stream(requests.stream_transcribe_speech(audio, **options), timeout_s)

    @spell_out
    async def synthesize_speech(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[SynthesizeSpeechOptions]
    ) -> Answer[SynthesizedSpeech]:
        """Synthesizes speech of every text."""
        return await self._send(requests.synthesize_speech(texts, **options), timeout_s)

    @spell_out
    def stream_synthesize_speech(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[StreamSynthesizeSpeechOptions]
    ) -> AsyncSpeechStream:
        """Synthesizes speech of one text and returns its samples part by part, as they are made."""
        return AsyncSpeechStream(
            requests.stream_synthesize_speech(text, **options), self._attempts(timeout_s), self._channel
        )

    @spell_out
    async def classify_text(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[ClassifyTextOptions]
    ) -> Answer[TextClassification]:
        """Returns the most likely labels of every text."""
        return await self._send(requests.classify_text(texts, **options), timeout_s)

    @spell_out
    async def classify_tokens(
        self, texts: Texts = (), *, timeout_s: float | None = None, **options: Unpack[ClassifyTokensOptions]
    ) -> Answer[TokenClassification]:
        """Returns the labelled spans of every text, or of every page of `pages`."""
        return await self._send(requests.classify_tokens(texts, **options), timeout_s)

    @spell_out
    async def answer_question(
        self,
        questions: Texts,
        contexts: Texts,
        *,
        timeout_s: float | None = None,
        **options: Unpack[AnswerQuestionOptions],
    ) -> Answer[QuestionAnswers]:
        """Returns the parts of contexts that answer questions: of each pair, or of a single one with all others."""
        return await self._send(requests.answer_question(questions, contexts, **options), timeout_s)

    @spell_out
    async def fill_mask(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[FillMaskOptions]
    ) -> Answer[FilledText]:
        """Returns the likeliest tokens for every mask, [MASK] or <mask>, of every text."""
        return await self._send(requests.fill_mask(texts, **options), timeout_s)

    @spell_out
    async def classify_image(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[ClassifyImageOptions]
    ) -> Answer[ImageClassification]:
        """Returns the most likely labels of every image, given as bytes or by path."""
        return await self._send(requests.classify_image(images, **options), timeout_s)

    @spell_out
    async def classify_audio(
        self, audios: Audios, *, timeout_s: float | None = None, **options: Unpack[ClassifyAudioOptions]
    ) -> Answer[AudioClassification]:
        """Returns the labels of every audio, the most likely first."""
        return await self._send(requests.classify_audio(audios, **options), timeout_s)

    @spell_out
    async def classify_video(
        self, frames: Images, *, timeout_s: float | None = None, **options: Unpack[ClassifyVideoOptions]
    ) -> Answer[VideoClassification]:
        """Returns the labels of a video, given by its frames in order, the most likely first."""
        return await self._send(requests.classify_video(frames, **options), timeout_s)

    @spell_out
    async def detect_objects(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[DetectObjectsOptions]
    ) -> Answer[ObjectDetection]:
        """Returns the objects of every image, each with a box around it."""
        return await self._send(requests.detect_objects(images, **options), timeout_s)

    @spell_out
    async def classify_pixels(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[ClassifyPixelsOptions]
    ) -> Answer[PixelClassification]:
        """Returns a map of labels for every image."""
        return await self._send(requests.classify_pixels(images, **options), timeout_s)

    @spell_out
    async def estimate_depth(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[EstimateDepthOptions]
    ) -> Answer[DepthMap]:
        """Returns a depth map for every image."""
        return await self._send(requests.estimate_depth(images, **options), timeout_s)

    @spell_out
    async def embed_text(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[EmbedTextOptions]
    ) -> EmbeddingAnswer[TextEmbedding]:
        """Returns a vector for every text; `to_numpy()` of the answer is the array of all.

        Takes any number of texts: beyond the limits of one call they are sent in several, each within `timeout_s`.
        """
        return requests.join(await self._send_all(requests.embed_text(texts, **options), timeout_s))

    @spell_out
    async def score_text(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[ScoreTextOptions]
    ) -> Answer[TextScore]:
        """Returns a score for every text or pair of texts; a single text is paired with each of `text_pairs`.

        Takes any number of texts: beyond the limits of one call they are sent in several, each within `timeout_s`.
        """
        return requests.join_scores(await self._send_all(requests.score_text(texts, **options), timeout_s))

    @spell_out
    async def embed_image(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[EmbedImageOptions]
    ) -> EmbeddingAnswer[ImageEmbedding]:
        """Returns a vector for every image; `to_numpy()` of the answer is the array of all.

        Takes any number of images: beyond the limits of one call they are sent in several, each within `timeout_s`.
        """
        return requests.join(await self._send_all(requests.embed_image(images, **options), timeout_s))

    @spell_out
    async def prepare_image(
        self, images: Images, *, timeout_s: float | None = None, **options: Unpack[PrepareImageOptions]
    ) -> Answer[PreparedImage]:
        """Uploads images and returns an id for each, which other calls take in place of the image."""
        return await self._send(requests.prepare_image(images, **options), timeout_s)

    @spell_out
    async def rank_images(
        self, images: Images = (), *, timeout_s: float | None = None, **options: Unpack[RankImagesOptions]
    ) -> Answer[RankedImage]:
        """Ranks images by their similarity to a text or an image, the most similar first."""
        return await self._send(requests.rank_images(images, **options), timeout_s)

    @spell_out
    async def rank_texts(
        self, texts: Texts, *, timeout_s: float | None = None, **options: Unpack[RankTextsOptions]
    ) -> Answer[RankedText]:
        """Ranks texts by their similarity to an image or a text, the most similar first."""
        return await self._send(requests.rank_texts(texts, **options), timeout_s)

    @spell_out
    async def generate_image(
        self, prompt: str = "", *, timeout_s: float | None = None, **options: Unpack[GenerateImageOptions]
    ) -> Answer[GeneratedImage]:
        """Generates images of a prompt, a label or a text depending on the model, or edits an image."""
        return await self._send(requests.generate_image(prompt, **options), timeout_s)

    @spell_out
    def stream_generate_image(
        self, prompt: str = "", *, timeout_s: float | None = None, **options: Unpack[StreamGenerateImageOptions]
    ) -> AsyncImageStream:
        """Generates one image and returns its progress step by step."""
        return AsyncImageStream(
            requests.stream_generate_image(prompt, **options), self._attempts(timeout_s), self._channel
        )

    @spell_out
    async def segment_image(
        self,
        image: Image = b"",
        *,
        prompts: SegmentPrompt | Sequence[SegmentPrompt],
        timeout_s: float | None = None,
        **options: Unpack[SegmentImageOptions],
    ) -> Answer[PromptMasks]:
        """Returns the masks of each prompt in an image, given as bytes or by path.

        Args:
            image: The image.
            prompts: One prompt or several, each with a result of its own.
            timeout_s: Longest time of the call.
        """
        return await self._send(requests.segment_image(image, prompts, **options), timeout_s)

    @spell_out
    def segment_everything(
        self, image: Image = b"", *, timeout_s: float | None = None, **options: Unpack[SegmentEverythingOptions]
    ) -> AsyncSegmentStream:
        """Finds all segments of an image and returns them one by one, the best first."""
        return AsyncSegmentStream(
            requests.segment_everything(image, **options), self._attempts(timeout_s), self._channel
        )

    @spell_out
    def segment_interactively(
        self, image: Image = b"", *, timeout_s: float | None = None, **options: Unpack[SegmentInteractivelyOptions]
    ) -> AsyncSegmentSession:
        """Segments an image by one click after another; each refines the last mask.

        Without `timeout_s` the session lasts until it is closed.
        """
        return AsyncSegmentSession(requests.segment_interactively(image, **options), self._channel, timeout_s)

    @spell_out
    async def inspect_text(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[InspectTextOptions]
    ) -> Answer[TextInspection]:
        """Returns the attention of one text's tokens in a classifier of texts or tokens."""
        return await self._send(requests.inspect_text(text, **options), timeout_s)

    @spell_out
    async def inspect_image(
        self, image: Image = b"", *, timeout_s: float | None = None, **options: Unpack[InspectImageOptions]
    ) -> Answer[ImageInspection]:
        """Returns the attention of one image's patches; the image is given as bytes or by path."""
        return await self._send(requests.inspect_image(image, **options), timeout_s)

    @spell_out
    async def inspect_generation(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[InspectGenerationOptions]
    ) -> Answer[TextInspection]:
        """Returns the attention of one text's tokens in a generation model."""
        return await self._send(requests.inspect_generation(text, **options), timeout_s)

    @spell_out
    async def inspect_translation(
        self, text: str, *, timeout_s: float | None = None, **options: Unpack[InspectTranslationOptions]
    ) -> Answer[TranslationInspection]:
        """Returns the attention of the tokens of one source and of its translation."""
        return await self._send(requests.inspect_translation(text, **options), timeout_s)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        model_version: str | None = None,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout_s: float | None = None,
    ) -> TensorAnswer:
        """Sends named arrays to a model of any task: ModelInfer of the Open Inference Protocol. Needs NumPy.

        Args:
            model: Name of the model.
            inputs: Arrays of numbers, booleans or texts, by the names of the model's inputs.
            model_version: Version of the model. Default: by its route.
            outputs: Names of the outputs to return. Default: all but those on request.
            parameters: Parameters of the model's task.
            timeout_s: Longest time of the call.

        Returns:
            The outputs, a mapping of names to arrays.
        """
        call = requests.infer(model, inputs, model_version=model_version, outputs=outputs, parameters=parameters)
        return await self._send(call, timeout_s)

    async def list_models(self, task: str = "", capability: str = "", *, timeout_s: float | None = None) -> ModelList:
        """Lists the loaded models: of one task, with one capability (`Model.capabilities`), or all."""
        return await self._send(requests.list_models(task, capability), timeout_s)

    async def get_model(
        self, model: str, *, model_version: str | None = None, timeout_s: float | None = None
    ) -> ModelDetails:
        """Describes one model."""
        return await self._send(requests.get_model(model, model_version=model_version), timeout_s)

    async def list_bundles(self, *, timeout_s: float | None = None) -> BundleList:
        """Lists the bundles of the store, loaded or not, and the routes of calls without a version."""
        return await self._send(requests.list_bundles(), timeout_s)

    async def load_model(
        self, model: str, *, model_version: str | None = None, timeout_s: float | None = None
    ) -> Model:
        """Loads a version from the store, the latest by default. A loaded one is replaced without a failed call.

        The server continues after `timeout_s`.
        """
        return await self._send(requests.load_model(model, model_version=model_version), timeout_s)

    async def unload_model(
        self, model: str, *, model_version: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Unloads one version, or all, once their calls have finished."""
        await self._send(requests.unload_model(model, model_version=model_version), timeout_s)

    async def scan_store(self, *, timeout_s: float | None = None) -> tuple[BundleStatus, ...]:
        """Rescans the store now; returns the bundles that changed."""
        return await self._send(requests.scan_store(), timeout_s)

    async def set_route(
        self,
        model: str,
        *,
        default_version: str | None = None,
        canary_version: str | None = None,
        canary_share: float | None = None,
        timeout_s: float | None = None,
    ) -> RouteList:
        """Sets the versions of a model for calls without a version; returns the routes of all models.

        Args:
            model: Name of the model.
            default_version: Version that answers. Default: the latest loaded version, canary excluded.
            canary_version: Version that answers a share of the calls. Default: none.
            canary_share: That share, 0 to 1. Default: 0.
            timeout_s: Longest time of the call.
        """
        call = requests.set_route(
            model, default_version=default_version, canary_version=canary_version, canary_share=canary_share
        )
        return await self._send(call, timeout_s)

    async def set_alias(
        self, alias: str, *, model: str | None = None, model_version: str | None = None, timeout_s: float | None = None
    ) -> AliasList:
        """Sets an alias for a model or one of its versions; without a model the alias is removed.

        Returns all aliases after the change.
        """
        return await self._send(requests.set_alias(alias, model=model, model_version=model_version), timeout_s)

    async def health(self, service: str = "", *, timeout_s: float | None = None) -> HealthStatus:
        """Returns the current health of the server, or of one service by its full name; asks once."""
        return await self._send(requests.health(service), timeout_s, NO_RETRIES)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until the server is ready.

        Raises:
            DeadlineExceededError: It is not ready within `timeout_s` seconds.
        """
        readiness = Readiness(self.server, timeout_s)
        while True:
            with readiness:
                if await self._send(requests.health(), readiness.remaining_s(), NO_RETRIES) is HealthStatus.SERVING:
                    return
            await async_sleep(readiness.pause_s())

    async def aclose(self) -> None:
        """Closes the connection. Running calls are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        """Server, state and timeout."""
        state = "closed" if self._channel.is_closed else "open"
        return f"<{type(self).__name__} {self.server} {state}, timeout {self._timeout_s:g} s>"

    def _attempts(self, timeout_s: float | None, retry: RetryPolicy | None = None) -> Attempts:
        """Starts the clock of a call."""
        return Attempts(
            retry or self._retry,
            self._timeout_s if timeout_s is None else timeout_s,
            self._budget,
            self.connectivity,
        )

    async def _send(self, call: Call[ResultT], timeout_s: float | None, retry: RetryPolicy | None = None) -> ResultT:
        """Sends a call until it is answered or its failure is final."""
        attempts = self._attempts(timeout_s, retry)
        while True:
            try:
                response = await self._channel.unary(call, attempts.begin())
            except grpc.RpcError as error:
                failure = call.error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from error
                await async_sleep(delay_s)
            else:
                attempts.note_success()
                return call.read(response)

    async def _send_all(self, calls: Iterator[Call[ResultT]], timeout_s: float | None) -> list[ResultT]:
        """Sends the calls of one method's split inputs."""
        return await async_call_all(lambda call: self._send(call, timeout_s), calls)

    def _stream(self, call: Call[Answer[ResultT] | None], timeout_s: float | None) -> AsyncTextStream[ResultT]:
        return AsyncTextStream(call, self._attempts(timeout_s), self._channel)
