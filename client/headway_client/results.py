"""Results of the calls: immutable, typed, free of protocol buffers.

Results have the fields of their messages (`headway/v1/*.proto`), under the same names. Times are
seconds, probabilities range from 0 to 1, and positions in a text count Unicode code points.
"""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.duration_pb2 import Duration

from headway.v1 import common_pb2, depth_estimation_service_pb2, model_service_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_LEVEL = 2**16 - 1
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)

_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*|[^\w\s]")
"""A word with the hyphens and apostrophes within it, or a punctuation mark."""


class FinishReason(StrEnum):
    """Reason of a text's end."""

    UNSPECIFIED = "unspecified"
    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    CONSTRAINT = "constraint"


class HealthStatus(StrEnum):
    """Health of the server or of one service (`grpc.health.v1`)."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


class Variant(StrEnum):
    """Precision of a model's weights and products."""

    UNSPECIFIED = "unspecified"
    """Unknown."""
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT8_STATIC = "int8-static"
    INT4 = "int4"


class DepthKind(StrEnum):
    """Meaning of the values of a depth map."""

    UNSPECIFIED = "unspecified"
    """The checkpoint does not say."""
    METRIC = "metric"
    """Distance from the camera in metres."""
    INVERSE = "inverse"
    """Inverse of the distance, up to an unknown scale and shift."""


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The model that answered a call."""

    name: str
    version: str
    variant: Variant
    """Precision in use."""

    def __str__(self) -> str:
        """Name, version and variant, such as `ag-news 1 (int8)`."""
        return f"{self.name} {self.version} ({self.variant})"


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of a call in the server, in seconds. They may overlap."""

    total_s: float
    queue_s: float
    preprocessing_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[ResultT_co]):
    """The results of a call, in the order of its inputs. Can be iterated over and indexed.

    There is one result for each input, or `sample_count` consecutive ones.
    """

    results: tuple[ResultT_co, ...]
    model: ModelReference
    timings: Timings

    def __iter__(self) -> Iterator[ResultT_co]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> ResultT_co:
        return self.results[index]


@dataclass(frozen=True, slots=True)
class TokenVector:
    """The vector of a token, of length 1."""

    values: tuple[float, ...]
    token_id: int
    text: str
    """The token as text, by itself; bytes that are not valid UTF-8 read as U+FFFD."""


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The vector of a text, or those of its tokens."""

    values: tuple[float, ...]
    token_count: int
    truncated: bool
    indices: tuple[int, ...] = ()
    """Of a sparse vector: the index of each value, a token of the vocabulary. Empty for a dense one."""
    token_vectors: tuple[TokenVector, ...] = ()
    """With `multi_vector`: the vectors of the tokens that a score is made of, in order. `values` is empty then."""


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """The vector of an image, and the image's size in pixels."""

    values: tuple[float, ...]
    width: int
    height: int


EmbeddingT_co = TypeVar("EmbeddingT_co", bound=TextEmbedding | ImageEmbedding, covariant=True)


@dataclass(frozen=True, slots=True)
class EmbeddingAnswer(Answer[EmbeddingT_co]):
    """The vectors of texts or images, in order.

    Inputs beyond the limits of one call are sent in several; `timings` are sums over these calls.
    """

    def to_numpy(self) -> NDArray[np.float32]:
        """Returns dense vectors as the rows of one array, float32 (inputs, width).

        Raises:
            ImportError: NumPy is not installed.
            ValueError: The vectors are sparse, or of tokens.
        """
        if any(getattr(result, "token_vectors", ()) for result in self.results):
            raise ValueError("the vectors are of tokens; read token_vectors of each result")
        if any(getattr(result, "indices", ()) for result in self.results):
            raise ValueError("the vectors are sparse; read indices and values of each result")
        array: NDArray[np.float32] = import_numpy().array([result.values for result in self.results], "float32")
        return array


@dataclass(frozen=True, slots=True)
class TokenCandidate:
    """One of the most likely tokens at a position."""

    token_id: int
    text: str
    """The token as text, by itself; bytes that are not valid UTF-8 read as U+FFFD."""
    log_probability: float
    """Natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class TokenLogProbability:
    """A token and the probability that the model gave it, before penalties, biases, constraints and temperature."""

    token_id: int
    text: str
    """The token as text, by itself; bytes that are not valid UTF-8 read as U+FFFD."""
    log_probability: float | None
    """Natural logarithm of its probability; None for the first token of a prompt."""
    top_tokens: tuple[TokenCandidate, ...] = ()
    """The most likely tokens at this position, the most likely first."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model. Its result is sent as a `ChatMessage` of role tool with this id."""

    id: str
    name: str
    arguments_json: str
    """A JSON object, as JSON text."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        arguments: dict[str, Any] = json.loads(self.arguments_json)
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A further part of a call of a tool."""

    index: int
    """Index of the call in the answer, from 0."""
    id: str
    """Set in the first part of a call, like `name`."""
    name: str
    arguments_delta: str
    """The next characters of the arguments."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """One generated text."""

    text: str
    """The continuation; with `echo`, the prompt and the continuation."""
    finish_reason: FinishReason
    prompt_token_count: int
    new_token_count: int
    truncated: bool
    """True if the prompt was cut."""
    seed: int
    sample_index: int = 0
    """Index among the samples of the prompt, from 0."""
    cached_prompt_token_count: int = 0
    """Tokens of the prompt that were read from the prefix cache."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """The generated tokens, if `log_probabilities` was given."""
    prompt_tokens: tuple[TokenLogProbability, ...] = ()
    """The prompt's tokens, if `prompt_log_probabilities` was given."""
    reasoning: str = ""
    """Reasoning of a conversation's answer, before `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the model, if `tools` was given."""


@dataclass(frozen=True, slots=True)
class SpeechWord:
    """A word of a transcript."""

    text: str
    start_seconds: float
    """Start, from the beginning of the audio."""
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """A part of a transcript."""

    text: str
    """Text of the segment, with a leading space if the model writes one."""
    start_seconds: float
    """Start, from the beginning of the audio."""
    end_seconds: float
    token_ids: tuple[int, ...]
    """Tokens of the segment, timestamp tokens included."""
    mean_log_probability: float
    """Mean log-probability of its window's tokens; of a model without a decoder, of the segment's frames."""
    words: tuple[SpeechWord, ...] = ()
    """Its words with their times, of a model without a decoder."""


@dataclass(frozen=True, slots=True)
class LanguageProbability:
    """Probability of a spoken language, among the model's languages."""

    language: str
    probability: float


@dataclass(frozen=True, slots=True)
class SpeechHypothesis:
    """One of several transcripts of an audio."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking: log-probability divided by the token count to the power of the length penalty."""
    finish_reason: FinishReason
    new_token_count: int
    segments: tuple[SpeechSegment, ...] = ()
    """Set if `include_timestamps` was given."""


@dataclass(frozen=True, slots=True)
class SpeechTranscript:
    """Transcript of one audio. Counts are sums over its windows."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking."""
    finish_reason: FinishReason
    new_token_count: int
    language: str
    """Language of the request, or detected; empty if the model has no name for it."""
    duration_seconds: float
    """Of the audio."""
    window_count: int
    seed: int | None = None
    """Seed of the random stream, if tokens were drawn at random."""
    segments: tuple[SpeechSegment, ...] = ()
    """Set if `include_timestamps` was given."""
    language_probabilities: tuple[LanguageProbability, ...] = ()
    """Likeliest languages first; empty if the language was not detected."""
    hypotheses: tuple[SpeechHypothesis, ...] = ()
    """All transcripts, this one included, the best first; empty if `hypothesis_count` is 1."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The part of a streamed text that one message brought."""

    text: str
    """Whole characters, possibly none."""
    new_token_count: int
    """Tokens generated so far."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """The tokens generated since the last delta, if `log_probabilities` was given."""
    segments: tuple[SpeechSegment, ...] = ()
    """Segments finished since the last delta; for transcripts with `include_timestamps`."""
    reasoning: str = ""
    """Reasoning since the last delta; for conversations with a reasoning model."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """Parts of tool calls since the last delta."""


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its probability."""

    label: str
    probability: float
    selected: bool = False
    """True if the label applies. In a multi-label model each label that reaches its threshold does."""


@dataclass(frozen=True, slots=True)
class TextClassification:
    """The labels of a text, the most likely first."""

    labels: tuple[LabelScore, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class TextScore:
    """The score of a text or of a pair of texts."""

    score: float
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image that the server caches for further calls."""

    image_id: str
    """Id for further calls; expires after the server's time to live without a call."""


@dataclass(frozen=True, slots=True)
class RankedImage:
    """One image of a ranking."""

    index: int
    """Index in the request, from 0."""
    score: float
    """Cosine similarity to the query, -1 to 1."""


@dataclass(frozen=True, slots=True)
class RankedText:
    """One text of a ranking."""

    index: int
    """Index in the request, from 0."""
    score: float
    """Score of a cross-encoder, as in `TextScore`; otherwise the cosine similarity to the query, -1 to 1."""


@dataclass(frozen=True, slots=True)
class LabeledSpan:
    """A labelled span of a text or a page."""

    label: str
    probability: float
    span: TextSpan
    """Its characters; of a page those of `Page.text`."""
    words: WordSpan | None = None
    """Its words, of a page."""


@dataclass(frozen=True, slots=True)
class TokenClassification:
    """The labelled spans of a text or a page, in order."""

    spans: tuple[LabeledSpan, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """A part of a context that answers a question."""

    text: str
    span: TextSpan
    score: float
    """Product of the probabilities of its first and last token, 0 to 1."""


@dataclass(frozen=True, slots=True)
class QuestionAnswers:
    """The answers to one question in one context, the best first."""

    answers: tuple[ExtractedAnswer, ...]
    no_answer_score: float
    """Score of the context having no answer, 0 to 1."""
    token_count: int
    window_count: int
    """Windows that the context was read in."""


@dataclass(frozen=True, slots=True)
class MaskToken:
    """A token for a mask."""

    token: str
    """Text of the token, with a space before it if it begins a word."""
    token_id: int
    probability: float
    filled_text: str
    """The text with the token in place of the mask."""


@dataclass(frozen=True, slots=True)
class FilledMask:
    """A mask of a text, and the likeliest tokens for it."""

    span: TextSpan
    tokens: tuple[MaskToken, ...]


@dataclass(frozen=True, slots=True)
class FilledText:
    """The masks of a text, in order; each is filled by itself."""

    masks: tuple[FilledMask, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ImageClassification:
    """The labels of an image, the most likely first, and the image's size in pixels."""

    labels: tuple[LabelScore, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class AudioClassification:
    """The labels of an audio, the most likely first."""

    labels: tuple[LabelScore, ...]
    duration_seconds: float
    truncated: bool
    """True if the model has read the beginning of the audio alone."""


@dataclass(frozen=True, slots=True)
class VideoClassification:
    """The labels of a video, the most likely first."""

    labels: tuple[LabelScore, ...]
    frame_indices: tuple[int, ...]
    """Which of the frames the model has read, counted from 0."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels of an image; right and bottom are exclusive."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """An object in an image."""

    label: str
    label_index: int
    """Number of the label among the model's labels."""
    score: float
    """Probability of the label."""
    box: Box
    """In pixels of the image; a side may be a little outside of it."""


@dataclass(frozen=True, slots=True)
class ObjectDetection:
    """The objects of an image, the one with the highest score first, and the image's size in pixels."""

    objects: tuple[DetectedObject, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PixelLabel:
    """A label of an image's pixels."""

    label: str
    label_index: int
    """Number of the label among the model's labels, or the given ones, its level in the map."""
    share: float
    """Share of the pixels, 0 to 1."""
    score: float
    """Mean of the label's score over these pixels."""
    probability_map: bytes = b""
    """Grey PNG of a given label, of which level 255 is a probability of 1; empty for labels of the model."""


@dataclass(frozen=True, slots=True)
class PixelClassification:
    """Labels of an image's pixels."""

    class_map: bytes
    """A grey PNG, whose levels are numbers of labels."""
    labels: tuple[PixelLabel, ...]
    """Labels in the map, the most frequent first."""
    width: int
    """Of the image, in pixels."""
    height: int

    def to_numpy(self) -> NDArray[np.integer[Any]]:
        """Returns the number of each pixel's label, uint8 (height, width), or uint16 for more than 256 labels.

        Raises:
            ImportError: NumPy or Pillow is not installed.
        """
        return _levels(self.class_map)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class DepthMap:
    """Depth of an image's pixels."""

    png: bytes
    """A grey PNG of 16 bits a pixel: level 0 is the minimum, level 65535 the maximum."""
    minimum: float
    maximum: float
    kind: DepthKind
    width: int
    """Of the image, in pixels."""
    height: int

    def to_numpy(self) -> NDArray[np.float32]:
        """Returns the depth of each pixel, float32 (height, width).

        Raises:
            ImportError: NumPy or Pillow is not installed.
        """
        levels = _levels(self.png).astype("float32")
        return levels * ((self.maximum - self.minimum) / _MOST_LEVEL) + self.minimum  # type: ignore[no-any-return]


def _levels(png: bytes) -> Any:
    """Returns the levels of a grey PNG, (height, width)."""
    numpy = import_numpy()
    from PIL import Image  # noqa: PLC0415 (an extra)

    levels = numpy.asarray(Image.open(io.BytesIO(png)))
    return levels if levels.dtype == "uint8" else levels.astype("uint16")


@dataclass(frozen=True, slots=True)
class Mask:
    """A segment of an image."""

    counts: tuple[int, ...]
    """Run lengths by columns: outside, inside, outside ... Empty in PNG format."""
    png: bytes
    predicted_iou: float
    """The model's estimate of the mask's IoU."""
    stability: float
    """Stability of the mask under its threshold, 0 to 1."""
    box: Box
    area: int
    """Pixels."""
    width: int
    """Of the image."""
    height: int

    def to_numpy(self) -> NDArray[np.bool_]:
        """Returns the mask, bool (height, width).

        Raises:
            ImportError: NumPy is not installed, or Pillow for a PNG mask.
        """
        numpy = import_numpy()
        if not self.counts:
            from PIL import Image  # noqa: PLC0415 (an extra)

            return numpy.asarray(Image.open(io.BytesIO(self.png)))  # type: ignore[no-any-return]
        inside = numpy.repeat(numpy.arange(len(self.counts)) % 2 == 1, self.counts)
        return inside.reshape(self.width, self.height).T  # type: ignore[no-any-return]

    def to_coco(self) -> dict[str, list[int]]:
        """Returns COCO's uncompressed run lengths, `size` and `counts`."""
        return {"size": [self.height, self.width], "counts": list(self.counts)}


@dataclass(frozen=True, slots=True)
class SynthesizedSpeech:
    """A spoken text."""

    audio: bytes
    """Encoded audio, mono; empty in a stream, after its samples."""
    duration_seconds: float
    """Of the audio."""
    sampling_rate: int
    """Samples a second."""
    finish_reason: FinishReason
    new_token_count: int
    """Codes generated, the end included."""
    seed: int
    """Seed: the same request with it gives the same samples."""


@dataclass(frozen=True, slots=True)
class SpeechDelta:
    """The next samples of a spoken text."""

    pcm: bytes
    """Signed 16-bit samples, little-endian, mono; empty in the last message."""
    sampling_rate: int
    """Samples a second."""
    new_token_count: int
    """Codes so far."""


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """A generated image."""

    png: bytes
    seed: int
    """Seed: a request for one image with it gives this image again."""
    step_count: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """Progress of an image."""

    completed_step_count: int
    step_count: int
    preview_png: bytes
    """The image as predicted at this step; empty if no preview was due."""


@dataclass(frozen=True, slots=True)
class PromptMasks:
    """The masks of a prompt, the best first."""

    masks: tuple[Mask, ...]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A span of a text: characters `start` to `end`, `end` excluded."""

    start: int
    end: int

    def of(self, text: str) -> str:
        """Returns this span of a text."""
        return text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class WordSpan:
    """A span of the words of a page: words `start` to `end`, `end` excluded."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenAlignment:
    """A token's span of a translation, and its attention over the source tokens, which adds up to 1."""

    span: TextSpan
    source_attention: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WordPair:
    """A word of a translation, and the word of the source text that it attended to most."""

    target: TextSpan
    source: TextSpan | None
    """None if it attended most to a token without text, such as the end-of-sequence token."""
    attention: float
    """Share of its attention that the source word has."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which words of one sentence were translated to which."""

    source_tokens: tuple[TextSpan, ...]
    """The source tokens' spans; a token without text, such as the end-of-sequence token, has an empty one."""
    target_tokens: tuple[TokenAlignment, ...]

    def word_pairs(self, source: str, translation: str) -> tuple[WordPair, ...]:
        """Pairs each word and punctuation mark of the translation with the source word that it attended to most.

        A word's attention is the mean of its tokens' attention; a source word gets the sum over its tokens.

        Args:
            source: The whole text that was translated.
            translation: Its whole translation.
        """
        sources = _words_of(self.source_tokens, source)
        targets = _words_of((token.span for token in self.target_tokens), translation)
        rows: dict[TextSpan, list[tuple[float, ...]]] = defaultdict(list)
        for token, word in zip(self.target_tokens, targets, strict=True):
            if word is not None:
                rows[word].append(token.source_attention)
        return tuple(_pair(word, rows[word], sources) for word in sorted(rows, key=lambda word: word.start))


@dataclass(frozen=True, slots=True)
class TranslationHypothesis:
    """One of several translations of a text."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking: log-probability divided by the token count to the power of the length penalty."""
    finish_reason: FinishReason
    new_token_count: int
    alignment: Alignment | None = None
    """Set if `include_alignment` was given."""


@dataclass(frozen=True, slots=True)
class TranslatedText:
    """One translated text."""

    text: str
    log_probability: float
    score: float
    """What it was ranked by; with `split_sentences`, the sum over the sentences."""
    finish_reason: FinishReason
    source_token_count: int
    new_token_count: int
    truncated: bool
    """True if the source text was cut."""
    seed: int | None = None
    """Seed of the random stream, if tokens were drawn at random."""
    sentence_count: int = 1
    hypotheses: tuple[TranslationHypothesis, ...] = ()
    """All translations, this one included, the best first; empty if `hypothesis_count` is 1."""
    alignments: tuple[Alignment, ...] = ()
    """If `include_alignment` was given: one for the text, or one for each of its sentences."""

    def word_pairs(self, source: str) -> tuple[WordPair, ...]:
        """Pairs each word of the translation with the word of `source`, its text, that it attended to most.

        Raises:
            ValueError: The call did not ask for an alignment.
        """
        if not self.alignments:
            raise ValueError("the result has no alignment; call translate_text with include_alignment=True")
        return tuple(pair for alignment in self.alignments for pair in alignment.word_pairs(source, self.text))


@dataclass(frozen=True, slots=True)
class CaptionToken:
    """A token's span of a caption, and its attention over the patches of the image, row by row.

    It adds up to 1, less what the token attends to a class token.
    """

    span: TextSpan
    patch_attention: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CaptionHypothesis:
    """One of several captions of an image."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking: log-probability divided by the token count to the power of the length penalty."""
    finish_reason: FinishReason
    new_token_count: int
    tokens: tuple[CaptionToken, ...] = ()
    """Set if `include_attention` was given."""


@dataclass(frozen=True, slots=True)
class WordMap:
    """A word of a caption and its attention over the image."""

    word: TextSpan
    attention: tuple[tuple[float, ...], ...]
    """Attention by patch rows; adds up to 1, less that to a class token."""


@dataclass(frozen=True, slots=True)
class ImageCaption:
    """One image's caption."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking."""
    finish_reason: FinishReason
    new_token_count: int
    patch_row_count: int
    patch_column_count: int
    seen_part: Box
    """Part of the image that the patches cover."""
    width: int
    """Width of the upright image, in pixels."""
    height: int
    seed: int | None = None
    """Seed of the random stream, if tokens were drawn at random."""
    hypotheses: tuple[CaptionHypothesis, ...] = ()
    """All captions, this one included, the best first; empty if `hypothesis_count` is 1."""
    tokens: tuple[CaptionToken, ...] = ()
    """Set if `include_attention` was given."""

    def word_maps(self) -> tuple[WordMap, ...]:
        """Attention of each word and punctuation mark of the caption: the mean of its tokens' attention.

        Raises:
            ValueError: The call did not ask for attention.
        """
        if not self.tokens:
            raise ValueError("the result has no attention; call caption_image with include_attention=True")
        rows: dict[TextSpan, list[tuple[float, ...]]] = defaultdict(list)
        words = _words_of((token.span for token in self.tokens), self.text)
        for token, word in zip(self.tokens, words, strict=True):
            if word is not None:
                rows[word].append(token.patch_attention)
        width = self.patch_column_count
        maps = []
        for word in sorted(rows, key=lambda word: word.start):
            mean = tuple(sum(column) / len(column) for column in zip(*rows[word], strict=True))
            maps.append(WordMap(word, tuple(mean[place : place + width] for place in range(0, len(mean), width))))
        return tuple(maps)


@dataclass(frozen=True, slots=True)
class RewriteHypothesis:
    """One of several new texts."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking: log-probability divided by the token count to the power of the length penalty."""
    finish_reason: FinishReason
    new_token_count: int


@dataclass(frozen=True, slots=True)
class RewrittenText:
    """One rewritten text."""

    text: str
    log_probability: float
    score: float
    """Score of the ranking."""
    finish_reason: FinishReason
    source_token_count: int
    new_token_count: int
    truncated: bool
    """True if the source text was cut."""
    seed: int | None = None
    """Seed of the random stream, if tokens were drawn at random."""
    hypotheses: tuple[RewriteHypothesis, ...] = ()
    """All new texts, this one included, the best first; empty if `hypothesis_count` is 1."""


@dataclass(frozen=True, slots=True)
class AttentionMap:
    """How much each token of the rows attends to each token of the columns."""

    layer: int | None
    """Layer, from 0; None: a rollout through all layers of the request."""
    head: int | None
    """Head, from 0; None: a summary of all heads of the request."""
    weights: tuple[float, ...]
    """Weights, row by row."""

    @property
    def title(self) -> str:
        """Title, such as `layer 0, head 3`."""
        if self.layer is None:
            return "rollout"
        return f"layer {self.layer}" if self.head is None else f"layer {self.layer}, head {self.head}"


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention maps with the same rows and columns."""

    row_count: int
    """Attending tokens."""
    column_count: int
    """Attended tokens."""
    maps: tuple[AttentionMap, ...]

    def to_numpy(self) -> NDArray[np.float32]:
        """Returns the maps as one array, float32 (maps, rows, columns).

        Raises:
            ImportError: NumPy is not installed.
        """
        values = import_numpy().array([each.weights for each in self.maps], "float32")
        array: NDArray[np.float32] = values.reshape(len(self.maps), self.row_count, self.column_count)
        return array


@dataclass(frozen=True, slots=True)
class InspectedToken:
    """A token of the model's input."""

    token_id: int
    text: str
    """Text of the token; a special token's name."""
    span: TextSpan
    """Span in the text; empty for a token without characters."""
    of_pair: bool = False
    """True for the second text of a pair; `span` then counts in that text."""


@dataclass(frozen=True, slots=True)
class TextInspection:
    """Tokens of a text and their attention."""

    tokens: tuple[InspectedToken, ...]
    attention: Attention
    truncated: bool


@dataclass(frozen=True, slots=True)
class ImageInspection:
    """Patches of an image, their attention, and the image's size in pixels."""

    patches: tuple[Box, ...]
    """Boxes in pixels of the upright image, row by row. A class token comes first, with an empty box."""
    patch_row_count: int
    patch_column_count: int
    attention: Attention
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class TranslationInspection:
    """Tokens of a source and of its translation, and their attention."""

    source_tokens: tuple[InspectedToken, ...]
    target_tokens: tuple[InspectedToken, ...]
    """Decoder input: the start token, then the translation. A token's attention is that of predicting the next."""
    translation: str
    encoder_attention: Attention
    decoder_attention: Attention
    cross_attention: Attention
    """Attention of the translation's tokens, the rows, to the source's tokens."""
    truncated: bool


@dataclass(frozen=True, slots=True)
class QualityFigure:
    """A figure measured at export."""

    variant: Variant
    metric: str
    value: float
    example_count: int
    dataset: str


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling defaults; None where the model has none."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    """Defaults of a generation request; None where the model has none."""

    max_new_tokens: int | None
    sampling: SamplingParameters
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model."""

    name: str
    version: str
    task: str
    """Task, such as "generation"."""
    description: str
    architecture: str
    parameter_count: int
    variant: Variant
    device: str
    max_input_token_count: int
    max_token_count: int
    labels: tuple[str, ...]
    source_language: str
    target_language: str
    default_parameters: GenerationParameters | None
    quality: tuple[QualityFigure, ...]
    license: str
    capabilities: tuple[str, ...] = ()
    """Capabilities, such as "generate_text" and "chat"; docs/api.md lists them."""
    embedding_dimension: int = 0
    """Dimension of an embedding; 0 if the model has none."""
    prompt_names: tuple[str, ...] = ()
    """Prompts that `embed_text` can put before each text."""
    embedding_space: str = ""
    """Name of an embedding space shared with other models; empty if it shares none."""
    source_languages: tuple[str, ...] = ()
    """Source languages of a translation model; each can be translated to each of `target_languages`."""
    target_languages: tuple[str, ...] = ()
    """Output languages of translations or captions; spoken languages of a transcription model."""


@dataclass(frozen=True, slots=True)
class RejectedBundle:
    """A bundle that could not be loaded."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelList:
    """The loaded models, sorted by name and version, and the bundles that could not be loaded."""

    models: tuple[Model, ...]
    rejected_bundles: tuple[RejectedBundle, ...]

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)


class BundleState(StrEnum):
    """State of a bundle in the store."""

    UNSPECIFIED = "unspecified"
    """Unknown."""
    LOADING = "loading"
    """Being loaded."""
    READY = "ready"
    """Serving calls."""
    UNLOADING = "unloading"
    """Closed to new calls; running calls are finished."""
    FAILED = "failed"
    """Ended by itself after it was ready."""
    REJECTED = "rejected"
    """Loading failed."""
    INCOMPLETE = "incomplete"
    """Incomplete, perhaps still being copied."""
    AVAILABLE = "available"
    """Not loaded: it was unloaded, or enough newer versions are loaded."""


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """A bundle of the store."""

    name: str
    version: str
    state: BundleState
    reason: str
    """Reason why it is not ready, or why a newer copy could not be loaded."""


@dataclass(frozen=True, slots=True)
class Route:
    """Versions of a model that answer calls without a version."""

    model: str
    default_version: str
    """Default version. Empty: the latest loaded version, canary excluded."""
    canary_version: str
    canary_share: float


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name for a model."""

    alias: str
    model: str
    model_version: str
    """Version. Empty: by the model's route."""


@dataclass(frozen=True, slots=True)
class BundleList:
    """The bundles of the store, loaded or not, and the routes of calls without a version."""

    bundles: tuple[BundleStatus, ...]
    routes: tuple[Route, ...]
    aliases: tuple[Alias, ...]
    store_problem: str
    """Reason why the store or the route file could not be read; empty if it could."""

    def __iter__(self) -> Iterator[BundleStatus]:
        return iter(self.bundles)

    def __len__(self) -> int:
        return len(self.bundles)


@dataclass(frozen=True, slots=True)
class RouteList:
    """Routes after a change, by model name. Without a route the latest version answers."""

    routes: tuple[Route, ...]
    not_kept_reason: str
    """Reason why the change is lost at a restart, such as a read-only store; empty if it is saved."""

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __len__(self) -> int:
        return len(self.routes)


@dataclass(frozen=True, slots=True)
class AliasList:
    """Aliases after a change, by name."""

    aliases: tuple[Alias, ...]
    not_kept_reason: str
    """Reason why the change is lost at a restart, such as a read-only store; empty if it is saved."""

    def __iter__(self) -> Iterator[Alias]:
        return iter(self.aliases)

    def __len__(self) -> int:
        return len(self.aliases)


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """A model, and its bundle's manifest as JSON."""

    model: Model
    manifest_json: str


def import_numpy() -> Any:
    """Imports NumPy, an extra.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import numpy as np  # noqa: PLC0415 (an extra)
    except ImportError:
        message = "NumPy is not installed; run: pip install 'headway-client[numpy]', or use the numbers as they came"
        raise ImportError(message) from None
    return np


def read(kind: type[ResultT], message: Any) -> ResultT:
    """Makes a result from the fields of a message with the same names."""
    converters = _converters(kind)  # type: ignore[arg-type]  # mypy takes a class for not hashable
    return kind(*[convert(message) for convert in converters])


def read_timings(message: common_pb2.Timings) -> Timings:
    """Reads the timings of a call."""
    parts = (message.total, message.queue, message.preprocessing, message.inference)
    return Timings(*map(_seconds, parts))


_NUMBERED: dict[type[StrEnum], Any] = {
    FinishReason: common_pb2.FinishReason,
    Variant: common_pb2.Variant,
    BundleState: model_service_pb2.BundleState,
    DepthKind: depth_estimation_service_pb2.DepthKind,
}
"""Protocol enum of each enum of this module."""


@cache
def _converters(kind: type[Any]) -> list[Callable[[Any], Any]]:
    """Returns a converter from the message for each field of a result."""
    return [_converter(name, hint) for name, hint in get_type_hints(kind).items()]


def _converter(name: str, hint: Any) -> Callable[[Any], Any]:
    arguments = get_args(hint)
    if type(None) in arguments:
        convert = _converter(name, arguments[0])
        return lambda message: convert(message) if message.HasField(name) else None
    if get_origin(hint) is tuple:
        element = arguments[0]
        if isinstance(element, type) and is_dataclass(element):
            return lambda message: tuple(read(element, each) for each in getattr(message, name))
        return lambda message: tuple(getattr(message, name))
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda message: read(hint, getattr(message, name))
    if issubclass(hint, StrEnum):
        members = _members_by_number(hint)
        return lambda message: members.get(getattr(message, name), hint("unspecified"))
    return attrgetter(name)


def _members_by_number(kind: type[StrEnum]) -> dict[int, StrEnum]:
    """Returns the members of an enum by their protocol numbers; the protocol's names have the enum's prefix."""
    numbers = _NUMBERED[kind].items()
    prefix = len(numbers[0][0]) - len("UNSPECIFIED")
    return {number: kind[name[prefix:]] for name, number in numbers}


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _words_of(spans: Iterable[TextSpan], text: str) -> list[TextSpan | None]:
    """Returns the word at the middle of each span; None for an empty span."""
    spans = list(spans)
    word_at: dict[int, TextSpan] = {}
    stop = max((span.end for span in spans), default=0)
    # Only the part of the text under the spans: a long text has many sentences.
    for match in _WORD.finditer(text, min((span.start for span in spans), default=0)):
        if match.start() >= stop:
            break
        word_at.update(dict.fromkeys(range(match.start(), match.end()), TextSpan(match.start(), match.end())))
    return [word_at.get((span.start + span.end - 1) // 2) if span.start < span.end else None for span in spans]


def _pair(target: TextSpan, rows: list[tuple[float, ...]], sources: list[TextSpan | None]) -> WordPair:
    shares: dict[TextSpan | None, float] = defaultdict(float)
    for row in rows:
        for word, attention in zip(sources, row, strict=True):
            shares[word] += attention / len(rows)
    source = max(shares, key=lambda word: shares[word])
    return WordPair(target, source, shares[source])
