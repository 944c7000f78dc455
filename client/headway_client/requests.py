"""From arguments to the API's messages and back: the one place where both clients' calls are built.

A function here returns a call: its path, its request, and the reader of its response. Only types are checked, because a
wrong type cannot be sent; the server checks everything else. No function reads a file: paths stay in `Call.files` until
the channel reads them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar, Unpack

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.v1 import (
    audio_classification_service_pb2,
    caption_service_pb2,
    common_pb2,
    depth_estimation_service_pb2,
    embedding_service_pb2,
    image_classification_service_pb2,
    image_service_pb2,
    mask_filling_service_pb2,
    model_service_pb2,
    object_detection_service_pb2,
    question_answering_service_pb2,
    ranking_service_pb2,
    semantic_segmentation_service_pb2,
    text_classification_service_pb2,
    text_to_text_service_pb2,
    translation_service_pb2,
    video_classification_service_pb2,
)
from headway.v1 import generation_service_pb2 as generation_pb2
from headway.v1 import image_generation_service_pb2 as image_generation_pb2
from headway.v1 import inspection_service_pb2 as inspection_pb2
from headway.v1 import segmentation_service_pb2 as segmentation_pb2
from headway.v1 import speech_service_pb2 as speech_pb2
from headway_client.errors import CallError, ProtocolError, from_rpc_error
from headway_client.options import (
    AnswerQuestionOptions,
    AttentionSummary,
    AudioFormat,
    CaptionImageOptions,
    ChatOptions,
    ClassifyAudioOptions,
    ClassifyImageOptions,
    ClassifyPixelsOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    ClassifyVideoOptions,
    DetectObjectsOptions,
    DiffusionSampler,
    EarlyStopping,
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
    MaskFormat,
    Page,
    PhraseConstraints,
    PrepareImageOptions,
    RankImagesOptions,
    RankTextsOptions,
    RewriteTextOptions,
    ScoreTextOptions,
    SegmentEverythingOptions,
    SegmentImageOptions,
    SegmentInteractivelyOptions,
    SpeechTask,
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
    Tool,
    ToolChoice,
    TranscribeSpeechOptions,
    TranslateTextOptions,
)
from headway_client.results import (
    AliasList,
    Answer,
    AudioClassification,
    BundleList,
    BundleStatus,
    DepthMap,
    EmbeddingAnswer,
    EmbeddingT_co,
    FilledText,
    GeneratedImage,
    GeneratedText,
    HealthStatus,
    ImageCaption,
    ImageClassification,
    ImageEmbedding,
    ImageInspection,
    Mask,
    Model,
    ModelDetails,
    ModelList,
    ModelReference,
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
    Timings,
    TokenClassification,
    ToolCall,
    TranslatedText,
    TranslationInspection,
    VideoClassification,
    read,
    read_timings,
)
from headway_client.tensors import Parameter, TensorAnswer, read_answer, to_request

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_METHODS: Final[dict[str, MethodDescriptor]] = {
    method.name: method
    for file in (
        caption_service_pb2,
        depth_estimation_service_pb2,
        embedding_service_pb2,
        generation_pb2,
        image_classification_service_pb2,
        image_generation_pb2,
        image_service_pb2,
        inspection_pb2,
        mask_filling_service_pb2,
        model_service_pb2,
        audio_classification_service_pb2,
        object_detection_service_pb2,
        question_answering_service_pb2,
        ranking_service_pb2,
        segmentation_pb2,
        semantic_segmentation_service_pb2,
        speech_pb2,
        text_classification_service_pb2,
        text_to_text_service_pb2,
        translation_service_pb2,
        video_classification_service_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Methods of the API by name; names are unique across services."""

MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")

MAX_TEXTS: Final = 256
"""Texts of a call."""
_MULTI_VECTOR_TEXTS: Final = 32
"""The same of a call for vectors of tokens, whose number the client does not know."""
MAX_TEXT_BYTES: Final = 4 * 2**20
"""UTF-8 bytes of a call's texts and pairs that a server accepts by default."""
MAX_IMAGES: Final = 64
"""Images of a call."""
MAX_IMAGE_BYTES: Final = 32 * 2**20
"""Bytes of a call's images: half of the largest message that a server accepts by default."""


_CHOICES: Final[dict[str, type[StrEnum]]] = {
    kind.__name__: kind
    for kind in (AttentionSummary, AudioFormat, DiffusionSampler, EarlyStopping, MaskFormat, SpeechTask, ToolChoice)
}
"""Enum options by the name of the protocol's enum."""
_ELEMENT: Final = re.compile(r"(\w+)\[(\d+)\]")
"""Beginning of a field path within a list element."""


class Role(StrEnum):
    """Speaker of a turn."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Picture(NamedTuple):
    """An image of a turn: an encoded one, the path of a file, or the id of a prepared one."""

    image: bytes | str | os.PathLike[str] = b""
    image_id: str = ""


class ChatMessage(NamedTuple):
    """One turn of a conversation."""

    role: Role
    content: str | Sequence[str | Picture]
    """A text, or texts and pictures in their order, for models that read images."""
    reasoning: str = ""
    """Reasoning of the assistant before the content, as in `GeneratedText.reasoning`."""
    tool_calls: Sequence[ToolCall] = ()
    """Tool calls of the assistant, as in `GeneratedText.tool_calls`."""
    tool_call_id: str = ""
    """Id of the call whose result the content is; for role tool."""


Prompt: TypeAlias = str | Sequence[int]
"""A text, or the ids of its tokens."""
Prompts: TypeAlias = Texts | Sequence[Sequence[int]]
"""One text or several, or prompts as ids of tokens."""
Turn: TypeAlias = ChatMessage | tuple[str, str] | tuple[str, str, str] | Mapping[str, Any]
"""A `ChatMessage`, another pair of role and content, or a mapping with these keys."""
Conversation: TypeAlias = str | Sequence[Turn]
"""The turns so far. A str is one turn of the user's."""
Conversations: TypeAlias = Conversation | Sequence[Conversation]
"""One conversation or several."""
Image: TypeAlias = bytes | str | os.PathLike[str]
"""An encoded image, or the path of an image file."""
Images: TypeAlias = Image | Sequence[Image]
"""One image or several."""


Audio: TypeAlias = bytes | str | os.PathLike[str]
"""Encoded audio, or the path of an audio file."""
Audios: TypeAlias = Audio | Sequence[Audio]
"""One audio or several."""

Point: TypeAlias = tuple[float, float]
"""x and y of a point, in pixels of the image from its upper left corner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPrompt:
    """Prompt for a segment of an image: points, a box, or both."""

    points: Sequence[Point] = ()
    """Points inside the segment."""
    outside_points: Sequence[Point] = ()
    """Points outside the segment."""
    box: tuple[float, float, float, float] | None = None
    """Left, top, right, bottom, in pixels of the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[ResultT]):
    """A call; its files are read before it is sent."""

    path: str
    """Service and method, as gRPC names them: `/package.Service/Method`."""
    request: Message
    response_type: type[Message]
    read: Callable[[Any], ResultT]
    """Reader of a response. In a stream, None for each message before the last."""
    first: Mapping[str, int] = field(default_factory=dict)
    """Index of this call's first element in the caller's list, by field name; for split lists."""
    files: dict[str, bytes | Path | Sequence[bytes | Path]] = field(default_factory=dict)
    """Contents or paths of the fields that hold files."""

    def read_files(self) -> None:
        """Puts the contents of the files into the request, once.

        Raises:
            OSError: A file cannot be read.
        """
        contents = {name: _read(value) for name, value in self.files.items()}
        self.files.clear()
        for name, content in contents.items():
            if isinstance(content, list):
                getattr(self.request, name).extend(content)
            else:
                setattr(self.request, name, content)

    def error(self, error: grpc.RpcError) -> CallError:
        """Translates an error of gRPC, with element indices as in the caller's lists."""
        return from_rpc_error(error, self._own_name)

    def _own_name(self, name: str) -> str:
        element = _ELEMENT.match(name)
        if element is None or not (first := self.first.get(element[1], 0)):
            return name
        return f"{element[1]}[{int(element[2]) + first}]{name[element.end() :]}"


def generate_text(prompts: Prompts, **options: Unpack[GenerateTextOptions]) -> Call[Answer[GeneratedText]]:
    """GenerateText with prompts."""
    if not isinstance(prompts, str) and _is_list(prompts) and prompts and not isinstance(prompts[0], str):
        return _generate(GenerateTextOptions, options, prompt_token_ids=[_as_tokens("prompts", one) for one in prompts])
    return _generate(GenerateTextOptions, options, prompts=as_texts("prompts", prompts))  # type: ignore[arg-type]  # see above


def chat(conversations: Conversations, **options: Unpack[ChatOptions]) -> Call[Answer[GeneratedText]]:
    """GenerateText with conversations."""
    return _generate(ChatOptions, options, conversations=_as_conversations("conversations", conversations))


def stream_generate_text(
    prompt: Prompt, **options: Unpack[StreamGenerateTextOptions]
) -> Call[Answer[GeneratedText] | None]:
    """StreamGenerateText with a prompt."""
    if _is_list(prompt):
        return _stream_generate(StreamGenerateTextOptions, options, prompt_token_ids=_as_tokens("prompt", prompt))
    return _stream_generate(StreamGenerateTextOptions, options, prompt=as_text("prompt", prompt))


def stream_chat(conversation: Conversation, **options: Unpack[StreamChatOptions]) -> Call[Answer[GeneratedText] | None]:
    """StreamGenerateText with a conversation."""
    return _stream_generate(StreamChatOptions, options, conversation=_as_conversation("conversation", conversation))


def translate_text(texts: Texts, **options: Unpack[TranslateTextOptions]) -> Call[Answer[TranslatedText]]:
    """TranslateText.

    Raises:
        ValueError: `early_stopping` is none of `EarlyStopping`.
    """
    values = _written_values(TranslateTextOptions, options, as_texts("texts", texts))
    return _unary("TranslateText", values, TranslatedText, len(values["texts"]))


def rewrite_text(texts: Texts, **options: Unpack[RewriteTextOptions]) -> Call[Answer[RewrittenText]]:
    """RewriteText; errors are those of `translate_text`."""
    values = _written_values(RewriteTextOptions, options, as_texts("texts", texts))
    return _unary("RewriteText", values, RewrittenText, len(values["texts"]))


def _written_values(kind: type, options: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a request for translations or for other new texts."""
    values = _values(kind, options, texts=texts)
    if isinstance(prefix := values.get("target_prefixes"), str):
        values["target_prefixes"] = [prefix] * len(texts)
    phrases = values.get("phrase_constraints")
    if phrases is not None:
        values["phrase_constraints"] = [
            common_pb2.PhraseConstraints(
                required=as_texts("required", one.required), forbidden=as_texts("forbidden", one.forbidden)
            )
            for one in ([phrases] * len(texts) if isinstance(phrases, PhraseConstraints) else phrases)
        ]
    _gather(common_pb2.DecodingParameters, values)
    return values


def stream_translate_text(
    text: str, **options: Unpack[StreamTranslateTextOptions]
) -> Call[Answer[TranslatedText] | None]:
    """StreamTranslateText."""
    values = _values(StreamTranslateTextOptions, options, text=as_text("text", text))
    _gather(common_pb2.DecodingParameters, values)
    return _stream("StreamTranslateText", values, TranslatedText)


def stream_rewrite_text(text: str, **options: Unpack[StreamRewriteTextOptions]) -> Call[Answer[RewrittenText] | None]:
    """StreamRewriteText."""
    values = _values(StreamRewriteTextOptions, options, text=as_text("text", text))
    _gather(common_pb2.DecodingParameters, values)
    return _stream("StreamRewriteText", values, RewrittenText)


def classify_text(texts: Texts, **options: Unpack[ClassifyTextOptions]) -> Call[Answer[TextClassification]]:
    """ClassifyText."""
    texts = as_texts("texts", texts)
    values = _values(ClassifyTextOptions, options, texts=texts)
    return _unary("ClassifyText", values, TextClassification, len(texts))


def classify_tokens(texts: Texts = (), **options: Unpack[ClassifyTokensOptions]) -> Call[Answer[TokenClassification]]:
    """ClassifyTokens."""
    texts = as_texts("texts", texts)
    values = _values(ClassifyTokensOptions, options, texts=texts)
    if (given := options.get("pages")) is not None:
        pages = [given] if isinstance(given, Page) else given
        values["pages"] = [_as_page(f"pages[{index}]", page) for index, page in enumerate(pages)]
    return _unary("ClassifyTokens", values, TokenClassification, len(texts) + len(values.get("pages") or ()))


def _as_page(name: str, page: object) -> text_classification_service_pb2.Page:
    """Makes the message of a page.

    Raises:
        TypeError: It is no page.
    """
    if not isinstance(page, Page):
        raise TypeError(f"{name}: a Page is needed, got {type(page).__name__}")
    return text_classification_service_pb2.Page(
        words=as_texts(f"{name}.words", page.words),
        boxes=[side for box in page.boxes for side in ([box] if isinstance(box, int | float) else box)],
        width=page.width or 0,
        height=page.height or 0,
    )


def answer_question(
    questions: Texts, contexts: Texts, **options: Unpack[AnswerQuestionOptions]
) -> Call[Answer[QuestionAnswers]]:
    """AnswerQuestion."""
    questions, contexts = as_texts("questions", questions), as_texts("contexts", contexts)
    values = _values(AnswerQuestionOptions, options, questions=questions, contexts=contexts)
    return _unary("AnswerQuestion", values, QuestionAnswers, max(len(questions), len(contexts)))


def fill_mask(texts: Texts, **options: Unpack[FillMaskOptions]) -> Call[Answer[FilledText]]:
    """FillMask."""
    texts = as_texts("texts", texts)
    values = _values(FillMaskOptions, options, texts=texts)
    if (targets := options.get("targets")) is not None:
        values["targets"] = as_texts("targets", targets)
    return _unary("FillMask", values, FilledText, len(texts))


def embed_text(texts: Texts, **options: Unpack[EmbedTextOptions]) -> Iterator[Call[Answer[TextEmbedding]]]:
    """EmbedText, in as many calls as the limits of a call require.

    Raises:
        ValueError: There are not as many pairs as texts.
    """
    texts = as_texts("texts", texts)
    sizes = [len(text.encode()) for text in texts]
    pairs = None if (given := options.get("text_pairs")) is None else as_texts("text_pairs", given)
    if pairs is not None:
        if len(pairs) != len(texts):
            raise ValueError(f"text_pairs has {len(pairs)} elements for {len(texts)} texts; give one for each text")
        sizes = [size + len(pair.encode()) for size, pair in zip(sizes, pairs, strict=True)]
    most = _MULTI_VECTOR_TEXTS if options.get("multi_vector") else MAX_TEXTS
    for part in _parts(sizes, most, MAX_TEXT_BYTES):
        values = _values(EmbedTextOptions, options, texts=texts[part])
        values["text_pairs"] = None if pairs is None else pairs[part]
        call = _unary("EmbedText", values, TextEmbedding, len(texts[part]))
        yield replace(call, first={"texts": part.start, "text_pairs": part.start})


def score_text(texts: Texts, **options: Unpack[ScoreTextOptions]) -> Iterator[Call[Answer[TextScore]]]:
    """ScoreText, in as many calls as the limits of a call require. A single text is paired with each of the pairs.

    Raises:
        ValueError: There are neither as many pairs as texts nor a single text.
    """
    texts = as_texts("texts", texts)
    pairs = None if (given := options.get("text_pairs")) is None else as_texts("text_pairs", given)
    if pairs is not None and len(texts) not in (1, len(pairs)):
        raise ValueError(
            f"text_pairs has {len(pairs)} elements for {len(texts)} texts; give one for each text, or a single text"
        )
    inputs = texts if pairs is None else pairs
    own = [len(text.encode()) for text in texts] * (len(inputs) if len(texts) == 1 else 1)
    sizes = own if pairs is None else [size + len(pair.encode()) for size, pair in zip(own, pairs, strict=True)]
    for part in _parts(sizes, MAX_TEXTS, MAX_TEXT_BYTES):
        values = _values(ScoreTextOptions, options, texts=texts if len(texts) == 1 else texts[part])
        values["text_pairs"] = None if pairs is None else pairs[part]
        call = _unary("ScoreText", values, TextScore, len(inputs[part]))
        yield replace(call, first={"texts": 0 if len(texts) == 1 else part.start, "text_pairs": part.start})


def caption_image(images: Images = (), **options: Unpack[CaptionImageOptions]) -> Call[Answer[ImageCaption]]:
    """CaptionImage.

    Raises:
        ValueError: `early_stopping` is none of `EarlyStopping`.
    """
    contents = _as_images("images", images)
    values = _values(CaptionImageOptions, options, images=contents)
    count = _take_ids(values) or len(contents)
    for name in ("prefixes", "questions"):
        if isinstance(text := values.get(name), str):
            values[name] = [text] * count
    _gather(common_pb2.DecodingParameters, values)
    return _unary("CaptionImage", values, ImageCaption, count)


def stream_caption_image(
    image: Image = b"", **options: Unpack[StreamCaptionImageOptions]
) -> Call[Answer[ImageCaption] | None]:
    """StreamCaptionImage."""
    values = _values(StreamCaptionImageOptions, options, image=_as_image("image", image))
    _gather(common_pb2.DecodingParameters, values)
    return _stream("StreamCaptionImage", values, ImageCaption)


def transcribe_speech(audios: Audios, **options: Unpack[TranscribeSpeechOptions]) -> Call[Answer[SpeechTranscript]]:
    """TranscribeSpeech.

    Raises:
        ValueError: `early_stopping` is none of `EarlyStopping`, or `task` none of `SpeechTask`.
    """
    contents = _as_images("audios", audios)
    values = _values(TranscribeSpeechOptions, options, audios=contents)
    _gather(common_pb2.DecodingParameters, values)
    return _unary("TranscribeSpeech", values, SpeechTranscript, len(contents))


def stream_transcribe_speech(
    audio: Audio, **options: Unpack[StreamTranscribeSpeechOptions]
) -> Call[Answer[SpeechTranscript] | None]:
    """StreamTranscribeSpeech; errors are those of `transcribe_speech`."""
    values = _values(StreamTranscribeSpeechOptions, options, audio=_as_image("audio", audio))
    _gather(common_pb2.DecodingParameters, values)
    return _stream("StreamTranscribeSpeech", values, SpeechTranscript)


def synthesize_speech(texts: Texts, **options: Unpack[SynthesizeSpeechOptions]) -> Call[Answer[SynthesizedSpeech]]:
    """SynthesizeSpeech.

    Raises:
        ValueError: `format` is none of `AudioFormat`.
    """
    texts = as_texts("texts", texts)
    values = _values(SynthesizeSpeechOptions, options, texts=texts)
    _gather(speech_pb2.SynthesisParameters, values)
    return _unary("SynthesizeSpeech", values, SynthesizedSpeech, len(texts))


def stream_synthesize_speech(
    text: str, **options: Unpack[StreamSynthesizeSpeechOptions]
) -> Call[Answer[SynthesizedSpeech] | None]:
    """StreamSynthesizeSpeech."""
    values = _values(StreamSynthesizeSpeechOptions, options, text=as_text("text", text))
    _gather(speech_pb2.SynthesisParameters, values)
    return _stream("StreamSynthesizeSpeech", values, SynthesizedSpeech)


def classify_image(images: Images = (), **options: Unpack[ClassifyImageOptions]) -> Call[Answer[ImageClassification]]:
    """ClassifyImage."""
    contents = _as_images("images", images)
    values = _values(ClassifyImageOptions, options, images=contents)
    count = len(contents) + _take_ids(values)
    return _unary("ClassifyImage", values, ImageClassification, count)


def classify_audio(audios: Audios, **options: Unpack[ClassifyAudioOptions]) -> Call[Answer[AudioClassification]]:
    """ClassifyAudio."""
    contents = _as_images("audios", audios)
    return _unary(
        "ClassifyAudio", _values(ClassifyAudioOptions, options, audios=contents), AudioClassification, len(contents)
    )


def classify_video(frames: Images, **options: Unpack[ClassifyVideoOptions]) -> Call[Answer[VideoClassification]]:
    """ClassifyVideo."""
    contents = _as_images("frames", frames)
    return _unary("ClassifyVideo", _values(ClassifyVideoOptions, options, frames=contents), VideoClassification, 1)


def detect_objects(images: Images = (), **options: Unpack[DetectObjectsOptions]) -> Call[Answer[ObjectDetection]]:
    """DetectObjects."""
    contents = _as_images("images", images)
    values = _values(DetectObjectsOptions, options, images=contents)
    if (labels := options.get("labels")) is not None:
        values["labels"] = as_texts("labels", labels)
    count = len(contents) + _take_ids(values)
    return _unary("DetectObjects", values, ObjectDetection, count)


def classify_pixels(images: Images = (), **options: Unpack[ClassifyPixelsOptions]) -> Call[Answer[PixelClassification]]:
    """ClassifyPixels."""
    contents = _as_images("images", images)
    values = _values(ClassifyPixelsOptions, options, images=contents)
    if (labels := options.get("labels")) is not None:
        values["labels"] = as_texts("labels", labels)
    count = len(contents) + _take_ids(values)
    return _unary("ClassifyPixels", values, PixelClassification, count)


def estimate_depth(images: Images = (), **options: Unpack[EstimateDepthOptions]) -> Call[Answer[DepthMap]]:
    """EstimateDepth."""
    contents = _as_images("images", images)
    values = _values(EstimateDepthOptions, options, images=contents)
    count = len(contents) + _take_ids(values)
    return _unary("EstimateDepth", values, DepthMap, count)


def prepare_image(images: Images, **options: Unpack[PrepareImageOptions]) -> Call[Answer[PreparedImage]]:
    """PrepareImage."""
    contents = _as_images("images", images)
    values = _values(PrepareImageOptions, options, images=contents)
    return _unary("PrepareImage", values, PreparedImage, len(contents))


def rank_images(images: Images = (), **options: Unpack[RankImagesOptions]) -> Call[Answer[RankedImage]]:
    """RankImages.

    Raises:
        ValueError: There is no query, or more than one.
    """
    contents = _as_images("images", images)
    values = _values(RankImagesOptions, options, images=contents)
    count = len(contents) + _take_ids(values)
    return _rank("RankImages", values, RankedImage, count)


def rank_texts(texts: Texts, **options: Unpack[RankTextsOptions]) -> Call[Answer[RankedText]]:
    """RankTexts; errors are those of `rank_images`."""
    texts = as_texts("texts", texts)
    return _rank("RankTexts", _values(RankTextsOptions, options, texts=texts), RankedText, len(texts))


def _rank(method: str, values: dict[str, Any], result_type: type[ResultT], count: int) -> Call[Answer[ResultT]]:
    """Makes a call of the ranking service with `count` candidates."""
    queries = [name for name in ("query_text", "query_image", "query_image_id") if values.get(name) is not None]
    if len(queries) != 1:
        given = " and ".join(queries) or "no query"
        raise ValueError(f"{given} given; give one of query_text, query_image and query_image_id")
    if "query_image" in queries:
        values["query_image"] = _as_image("query_image", values["query_image"])
    return _unary(method, values, result_type, values.get("top_k") or count)


def _take_ids(values: dict[str, Any]) -> int:
    """Makes a list of the image ids; returns their number."""
    if (given := values.get("image_ids")) is None:
        return 0
    values["image_ids"] = as_texts("image_ids", given)
    return len(values["image_ids"])


def embed_image(images: Images = (), **options: Unpack[EmbedImageOptions]) -> Iterator[Call[Answer[ImageEmbedding]]]:
    """EmbedImage, in as many calls as the limits of a call require. Files are read call by call."""
    contents = _as_images("images", images)
    if (given := options.get("image_ids")) is not None and not contents:
        ids = as_texts("image_ids", given)
        for part in _parts([0] * len(ids), MAX_IMAGES, MAX_IMAGE_BYTES):
            values = _values(EmbedImageOptions, options) | {"image_ids": ids[part]}
            call = _unary("EmbedImage", values, ImageEmbedding, len(ids[part]))
            yield replace(call, first={"image_ids": part.start})
        return
    for part in _parts([_image_bytes(image) for image in contents], MAX_IMAGES, MAX_IMAGE_BYTES):
        values = _values(EmbedImageOptions, options, images=contents[part])
        _take_ids(values)
        call = _unary("EmbedImage", values, ImageEmbedding, len(contents[part]))
        yield replace(call, first={"images": part.start})


def segment_image(
    image: Image, prompts: SegmentPrompt | Sequence[SegmentPrompt], **options: Unpack[SegmentImageOptions]
) -> Call[Answer[PromptMasks]]:
    """SegmentImage."""
    several = [prompts] if isinstance(prompts, SegmentPrompt) else list(prompts)
    values = _values(SegmentImageOptions, options, image=_as_image("image", image))
    values["prompts"] = [segmentation_pb2.SegmentPrompt(**_parts_of(prompt)) for prompt in several]
    return _unary("SegmentImage", values, PromptMasks, len(several))


def segment_everything(image: Image, **options: Unpack[SegmentEverythingOptions]) -> Call[Answer[Mask] | None]:
    """SegmentEverything. The stream itself reads the responses."""
    values = _values(SegmentEverythingOptions, options, image=_as_image("image", image))
    return _call("SegmentEverything", values, lambda _: None)


def segment_interactively(image: Image, **options: Unpack[SegmentInteractivelyOptions]) -> Call[Answer[Mask]]:
    """The first request of SegmentInteractively, which names the image."""
    values = _values(SegmentInteractivelyOptions, options, image=_as_image("image", image))
    return _call("SegmentInteractively", values, lambda response: _answer(response.masks, response, Mask))


def click(first: Message, prompt: SegmentPrompt, *, restart: bool = False) -> Message:
    """A later request of SegmentInteractively, which answers as the first one asks for."""
    assert isinstance(first, segmentation_pb2.SegmentInteractivelyRequest)
    return segmentation_pb2.SegmentInteractivelyRequest(
        restart=restart,
        max_mask_count=first.max_mask_count,
        mask_format=first.mask_format,
        **_parts_of(prompt),
    )


def _parts_of(prompt: SegmentPrompt) -> dict[str, Any]:
    """Returns the fields `points` and `box` of a prompt."""
    if not isinstance(prompt, SegmentPrompt):
        raise TypeError(f"prompts: a SegmentPrompt is needed, got {type(prompt).__name__}")
    points = [segmentation_pb2.PromptPoint(x=x, y=y) for x, y in prompt.points]
    points += [segmentation_pb2.PromptPoint(x=x, y=y, outside=True) for x, y in prompt.outside_points]
    if prompt.box is None:
        return {"points": points}
    left, top, right, bottom = prompt.box
    return {"points": points, "box": common_pb2.Box(left=left, top=top, right=right, bottom=bottom)}


def generate_image(prompt: str, **options: Unpack[GenerateImageOptions]) -> Call[Answer[GeneratedImage]]:
    """GenerateImage."""
    values = _image_values(GenerateImageOptions, options, prompt)
    count = values.get("image_count")
    return _unary("GenerateImage", values, GeneratedImage, 1 if count is None else count)


def stream_generate_image(
    prompt: str, **options: Unpack[StreamGenerateImageOptions]
) -> Call[Answer[GeneratedImage] | None]:
    """StreamGenerateImage."""
    values = _image_values(StreamGenerateImageOptions, options, prompt)
    return _stream("StreamGenerateImage", values, GeneratedImage)


def _image_values(kind: Any, options: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    values = _values(kind, options, prompt=as_text("prompt", prompt))
    for name in ("image", "mask"):
        if (given := values.get(name)) is not None:
            values[name] = _as_image(name, given)
    values["parameters"] = _take(image_generation_pb2.DiffusionParameters, values)
    return values


def inspect_text(text: str, **options: Unpack[InspectTextOptions]) -> Call[Answer[TextInspection]]:
    """InspectText."""
    values = _values(InspectTextOptions, options, text=as_text("text", text))
    return _inspect("InspectText", values, TextInspection)


def inspect_image(image: Image = b"", **options: Unpack[InspectImageOptions]) -> Call[Answer[ImageInspection]]:
    """InspectImage."""
    values = _values(InspectImageOptions, options, image=_as_image("image", image))
    return _inspect("InspectImage", values, ImageInspection)


def inspect_generation(text: str, **options: Unpack[InspectGenerationOptions]) -> Call[Answer[TextInspection]]:
    """InspectGeneration."""
    values = _values(InspectGenerationOptions, options, text=as_text("text", text))
    return _inspect("InspectGeneration", values, TextInspection)


def inspect_translation(text: str, **options: Unpack[InspectTranslationOptions]) -> Call[Answer[TranslationInspection]]:
    """InspectTranslation."""
    values = _values(InspectTranslationOptions, options, text=as_text("text", text))
    return _inspect("InspectTranslation", values, TranslationInspection)


def _inspect(method: str, values: dict[str, Any], result_type: type[ResultT]) -> Call[Answer[ResultT]]:
    """Makes a call of the inspection service.

    Raises:
        ValueError: `summary` is none of `AttentionSummary`.
    """
    values["attention"] = _take(inspection_pb2.AttentionOptions, values)
    return _call(method, values, lambda response: _answer([response.result], response, result_type))


def list_models(task: str = "", capability: str = "") -> Call[ModelList]:
    """ListModels."""
    return _call("ListModels", {"task": task, "capability": capability}, lambda response: read(ModelList, response))


def get_model(model: str, *, model_version: str | None = None) -> Call[ModelDetails]:
    """GetModel."""
    return _call(
        "GetModel",
        {"model": as_text("model", model), "model_version": model_version or ""},
        lambda response: read(ModelDetails, response),
    )


def infer(
    model: str,
    inputs: Mapping[str, ArrayLike],
    *,
    model_version: str | None = None,
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Parameter] | None = None,
) -> Call[TensorAnswer]:
    """ModelInfer of the Open Inference Protocol; errors are those of `tensors.to_request`."""
    service = oip_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    return Call(
        path=f"/{service.full_name}/ModelInfer",
        request=to_request(
            as_text("model", model),
            inputs,
            model_version=model_version or "",
            outputs=as_texts("outputs", outputs),
            parameters=parameters or {},
        ),
        response_type=oip_pb.ModelInferResponse,
        read=read_answer,
    )


def list_bundles() -> Call[BundleList]:
    """ListBundles."""
    return _call("ListBundles", {}, lambda response: read(BundleList, response))


def load_model(model: str, *, model_version: str | None = None) -> Call[Model]:
    """LoadModel."""
    return _call(
        "LoadModel",
        {"model": as_text("model", model), "model_version": model_version or ""},
        lambda response: read(Model, response.model),
    )


def unload_model(model: str, *, model_version: str | None = None) -> Call[None]:
    """UnloadModel."""
    return _call(
        "UnloadModel", {"model": as_text("model", model), "model_version": model_version or ""}, lambda _: None
    )


def scan_store() -> Call[tuple[BundleStatus, ...]]:
    """ScanStore."""
    return _call("ScanStore", {}, lambda response: tuple(read(BundleStatus, bundle) for bundle in response.bundles))


def set_route(
    model: str,
    *,
    default_version: str | None = None,
    canary_version: str | None = None,
    canary_share: float | None = None,
) -> Call[RouteList]:
    """SetRoute."""
    return _call(
        "SetRoute",
        {
            "model": as_text("model", model),
            "default_version": default_version or "",
            "canary_version": canary_version or "",
            "canary_share": canary_share or 0.0,
        },
        lambda response: read(RouteList, response),
    )


def set_alias(alias: str, *, model: str | None = None, model_version: str | None = None) -> Call[AliasList]:
    """SetAlias."""
    return _call(
        "SetAlias",
        {"alias": as_text("alias", alias), "model": model or "", "model_version": model_version or ""},
        lambda response: read(AliasList, response),
    )


def health(service: str = "") -> Call[HealthStatus]:
    """Health check of the server, or of one service by its full name."""
    numbers = health_pb2.HealthCheckResponse.ServingStatus.items()
    statuses = {number: HealthStatus(name.lower()) for name, number in numbers}
    return Call(
        path="/grpc.health.v1.Health/Check",
        request=health_pb2.HealthCheckRequest(service=service),
        response_type=health_pb2.HealthCheckResponse,
        read=lambda response: statuses.get(response.status, HealthStatus.UNKNOWN),
    )


def join(answers: Sequence[Answer[EmbeddingT_co]]) -> EmbeddingAnswer[EmbeddingT_co]:
    """Joins the answers of the calls that the inputs were split into.

    Raises:
        ProtocolError: Different models answered, whose vectors cannot be compared.
    """
    return EmbeddingAnswer(*_joined(answers))


def join_scores(answers: Sequence[Answer[TextScore]]) -> Answer[TextScore]:
    """Joins the answers of the calls that the inputs were split into.

    Raises:
        ProtocolError: Different models answered, whose scores cannot be compared.
    """
    return Answer(*_joined(answers))


def _joined(answers: Sequence[Answer[ResultT]]) -> tuple[tuple[ResultT, ...], ModelReference, Timings]:
    models = {answer.model for answer in answers}
    if len(models) > 1:
        names = " and ".join(sorted(map(str, models)))
        raise ProtocolError(f"the inputs were sent in several calls and answered by {names}; name a model_version")
    timings = [answer.timings for answer in answers]
    return (
        tuple(result for answer in answers for result in answer),
        answers[0].model,
        Timings(
            sum(each.total_s for each in timings),
            sum(each.queue_s for each in timings),
            sum(each.preprocessing_s for each in timings),
            sum(each.inference_s for each in timings),
        ),
    )


def _generate(kind: Any, options: Mapping[str, Any], **inputs: list[Any]) -> Call[Answer[GeneratedText]]:
    values = _values(kind, options, **inputs)
    _gather_generation(values)
    sample_count = values.get("sample_count")
    count = sum(map(len, inputs.values())) * (1 if sample_count is None else sample_count)
    return _unary("GenerateText", values, GeneratedText, count)


def _stream_generate(kind: Any, options: Mapping[str, Any], **inputs: Any) -> Call[Answer[GeneratedText] | None]:
    values = _values(kind, options, **inputs)
    _gather_generation(values)
    return _stream("StreamGenerateText", values, GeneratedText)


def _gather_generation(values: dict[str, Any]) -> None:
    """Makes messages of the options that are no fields of the request itself."""
    if (biases := values.get("logit_biases")) is not None:
        values["logit_biases"] = [generation_pb2.LogitBias(token_id=token, bias=bias) for token, bias in biases.items()]
    values["constraint"] = _constraint(*(values.pop(name, None) for name in ("json_schema", "regex", "choices")))
    _gather(generation_pb2.GenerationParameters, values)
    if (tools := values.get("tools")) is not None:
        values["tools"] = [_as_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    if (variables := values.pop("chat_template_kwargs", None)) is not None:
        values["chat_template_kwargs_json"] = _as_json(variables)
    top_count, with_prompt = values.pop("log_probabilities", None), values.pop("prompt_log_probabilities", None)
    if top_count is not None or with_prompt:
        values["log_probabilities"] = generation_pb2.LogProbabilityOptions(
            top_token_count=top_count, include_prompt=with_prompt
        )


def _constraint(
    json_schema: str | Mapping[str, Any] | None, regex: str | None, choices: Texts | None
) -> generation_pb2.Constraint | None:
    given = {"json_schema": json_schema, "regex": regex, "choices": choices}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are given; a text can have one constraint")
    if json_schema is not None:
        return generation_pb2.Constraint(json_schema=_as_json(json_schema))
    if regex is not None:
        return generation_pb2.Constraint(regex=as_text("regex", regex))
    if choices is not None:
        return generation_pb2.Constraint(choices=generation_pb2.Choices(texts=as_texts("choices", choices)))
    return None


def _as_json(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _as_tool(name: str, value: object) -> generation_pb2.Tool:
    if isinstance(value, Mapping):
        value = Tool(**value)
    if not isinstance(value, Tool):
        raise TypeError(f"{name}: a Tool is needed, got {type(value).__name__}")
    return generation_pb2.Tool(
        name=value.name,
        description=value.description,
        parameters_json_schema=_as_json(value.parameters),
        strict=value.strict,
    )


def _as_tokens(name: str, value: object) -> generation_pb2.TokenIds:
    if not _is_list(value) or not all(isinstance(each, int) for each in value):
        raise TypeError(f"{name}: a str or a sequence of token ids is needed, got {type(value).__name__}")
    return generation_pb2.TokenIds(ids=value)


def _values(kind: Any, options: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
    """Puts options and inputs together.

    Raises:
        TypeError: An option is unknown.
    """
    if unknown := options.keys() - kind.__optional_keys__:
        names = ", ".join(sorted(map(repr, unknown)))
        raise TypeError(f"{kind.__name__.removesuffix('Options')} has no option {names}")
    return {**options, **inputs}


def _gather(kind: type[Message], values: dict[str, Any]) -> None:
    """Moves the values of the parameters, and of sampling within them, into a message in `parameters`."""
    values["sampling"] = _take(common_pb2.SamplingParameters, values)
    values["parameters"] = _take(kind, values)


def _take(kind: type[MessageT], values: dict[str, Any]) -> MessageT | None:
    """Moves the values that are fields of a message into one. Returns None if that sets nothing."""
    fields = _fields(kind)  # type: ignore[arg-type]  # mypy takes a class for not hashable
    given = {name: values.pop(name) for name in fields.keys() & values.keys()}
    # None stays unset.
    message = kind(**{name: value if value is None else fields[name](name, value) for name, value in given.items()})
    return message if message.ByteSize() else None


@cache
def _fields(kind: type[Message]) -> dict[str, Callable[[str, Any], Any]]:
    """Returns a converter from option name and value for each field of a message."""
    return {name: _converter(field) for name, field in kind.DESCRIPTOR.fields_by_name.items()}


def _converter(field: Any) -> Callable[[str, Any], Any]:
    if field.is_repeated and field.type == field.TYPE_STRING:
        return as_texts
    if field.enum_type is not None and (choices := _CHOICES.get(field.enum_type.name)) is not None:
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", choices.__name__).upper()
        return lambda _, value: f"{prefix}_{choices(value).name}"
    return lambda _, value: value


def _call(name: str, values: dict[str, Any], read_response: Callable[[Any], ResultT]) -> Call[ResultT]:
    """Makes a call of the method of this name."""
    method = _METHODS[name]
    request_type = GetMessageClass(method.input_type)
    files = {name: values.pop(name) for name in [name for name, value in values.items() if _waits_for_files(value)]}
    request = _take(request_type, values)
    assert not values, values
    return Call(
        path=f"/{method.containing_service.full_name}/{name}",
        request=request_type() if request is None else request,
        response_type=GetMessageClass(method.output_type),
        read=read_response,
        files=files,
    )


def _unary(name: str, values: dict[str, Any], result_type: type[ResultT], count: int) -> Call[Answer[ResultT]]:
    """Makes a call with `count` expected results."""

    def read_answer(response: Any) -> Answer[ResultT]:
        if len(response.results) != count:
            raise ProtocolError(f"the server answered {len(response.results)} results; expected {count}")
        return _answer(response.results, response, result_type)

    return _call(name, values, read_answer)


def _stream(name: str, values: dict[str, Any], result_type: type[ResultT]) -> Call[Answer[ResultT] | None]:
    def read_answer(response: Any) -> Answer[ResultT] | None:
        return _answer([response.result], response, result_type) if response.HasField("result") else None

    return _call(name, values, read_answer)


def _answer(results: Sequence[Any], response: Any, result_type: type[ResultT]) -> Answer[ResultT]:
    return Answer(
        tuple(read(result_type, result) for result in results),
        read(ModelReference, response.model),
        read_timings(response.timings),
    )


def as_text(name: str, value: object) -> str:
    """Checks that a value is a text; errors call it `name`."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: a str is needed, got {type(value).__name__}")
    return value


def as_texts(name: str, values: Texts) -> list[str]:
    """Makes a list of one text or several."""
    if isinstance(values, str):
        return [values]
    if not _is_list(values):
        raise TypeError(f"{name}: a str or a sequence of str is needed, got {type(values).__name__}")
    return [as_text(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _as_images(name: str, values: Images) -> list[bytes | Path]:
    """Makes a list of one image or several."""
    if not _is_list(values):
        return [_as_image(name, values)]
    return [_as_image(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _as_image(name: str, value: object) -> bytes | Path:
    """Checks that a value is an encoded image or audio, or the path of one."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise TypeError(f"{name}: bytes or a path is needed, got {type(value).__name__}")


def _waits_for_files(value: object) -> bool:
    """Returns True for a path or a list with one."""
    return isinstance(value, Path) or (isinstance(value, list) and any(isinstance(each, Path) for each in value))


def _read(value: bytes | Path | Sequence[bytes | Path]) -> bytes | list[bytes]:
    """Reads the files among encoded images or audio."""
    if isinstance(value, bytes | Path):
        return value.read_bytes() if isinstance(value, Path) else value
    return [each.read_bytes() if isinstance(each, Path) else each for each in value]


def _image_bytes(image: bytes | Path) -> int:
    """Returns the size of an image in bytes."""
    return image.stat().st_size if isinstance(image, Path) else len(image)


def _parts(sizes: Sequence[int], max_count: int, max_bytes: int) -> Iterator[slice]:
    """Splits inputs of these sizes into calls of at most `max_count` inputs and `max_bytes`; a larger input goes alone.

    Without inputs there is one call, which the server refuses with its own message.
    """
    start, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == max_count or num_bytes + size > max_bytes):
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    yield slice(start, len(sizes))


def _as_conversations(name: str, value: Conversations) -> list[generation_pb2.Conversation]:
    """Makes a list of one conversation or several."""
    is_one = isinstance(value, str) or (_is_list(value) and bool(value) and isinstance(value[0], tuple | Mapping))
    if is_one:
        return [_as_conversation(name, value)]
    if not _is_list(value):
        kind = type(value).__name__
        raise TypeError(f"{name}: a str, a sequence of messages, or a sequence of these is needed, got {kind}")
    return [_as_conversation(f"{name}[{index}]", conversation) for index, conversation in enumerate(value)]


def _as_conversation(name: str, value: object) -> generation_pb2.Conversation:
    """Makes a conversation of its turns.

    Raises:
        TypeError: It is no conversation.
        ValueError: The role is unknown, or a mapping has other keys.
    """
    if isinstance(value, str):
        value = [ChatMessage(Role.USER, value)]
    if not _is_list(value):
        raise TypeError(f"{name}: a str or a sequence of messages is needed, got {type(value).__name__}")
    return generation_pb2.Conversation(
        messages=[_as_message(f"{name}[{index}]", message) for index, message in enumerate(value)]
    )


def _as_message(name: str, value: object) -> generation_pb2.ChatMessage:
    if isinstance(value, Mapping):
        if not {"role", "content"} <= set(value) <= set(ChatMessage._fields):
            raise ValueError(
                f"{name}: has the keys {', '.join(map(repr, value))}; must be 'role' and 'content', and may be "
                f"{', '.join(map(repr, ChatMessage._fields[2:]))}"
            )
        value = ChatMessage(**value)
    if not isinstance(value, tuple) or not 2 <= len(value) <= len(ChatMessage._fields):
        raise TypeError(f"{name}: a pair of role and content is needed, got {type(value).__name__}")
    role, content, reasoning, tool_calls, tool_call_id = ChatMessage(*value)
    if not all(isinstance(part, str) for part in (role, reasoning, tool_call_id)):
        raise TypeError(f"{name}: a pair of role and content is needed, got {type(value).__name__}")
    if not isinstance(content, str) and not _is_list(content):
        raise TypeError(f"{name}: the content is a str, or a sequence of these and pictures")
    if role not in set(Role):
        raise ValueError(f"{name}: the role is {role!r}; must be one of {', '.join(Role)}")
    return generation_pb2.ChatMessage(
        role=generation_pb2.Role.Value(f"ROLE_{Role(role).name}"),
        content=content if isinstance(content, str) else "",
        parts=[] if isinstance(content, str) else [_as_part(name, part) for part in content],
        reasoning=reasoning,
        tool_calls=[_as_tool_call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(tool_calls)],
        tool_call_id=tool_call_id,
    )


def _as_part(name: str, part: object) -> generation_pb2.ContentPart:
    """Makes a part of a turn; a file is read."""
    if isinstance(part, str):
        return generation_pb2.ContentPart(text=part)
    if not isinstance(part, Picture):
        raise TypeError(f"{name}: a part is a str or a Picture, got {type(part).__name__}")
    if part.image_id and part.image:
        raise ValueError(f"{name}: a picture has an image or an image_id, not both")
    if part.image_id:
        return generation_pb2.ContentPart(image_id=part.image_id)
    image = _as_image(name, part.image)
    return generation_pb2.ContentPart(image=image.read_bytes() if isinstance(image, Path) else image)


def _as_tool_call(name: str, value: object) -> generation_pb2.ToolCall:
    if isinstance(value, Mapping):
        value = ToolCall(**value)
    if not isinstance(value, ToolCall):
        raise TypeError(f"{name}: a ToolCall is needed, got {type(value).__name__}")
    return generation_pb2.ToolCall(id=value.id, name=value.name, arguments_json=value.arguments_json)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Returns True for a sequence of inputs, False for a single input."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
