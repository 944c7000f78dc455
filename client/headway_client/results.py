"""What the client answers: immutable, typed, free of protocol buffers.

Durations are seconds, probabilities range from 0 to 1, positions in a text count Unicode code points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

ResultT_co = TypeVar("ResultT_co", covariant=True)


class FinishReason(StrEnum):
    """Why a text ended."""

    UNSPECIFIED = "unspecified"
    END_OF_SEQUENCE = "end_of_sequence"
    STOP = "stop"
    LENGTH = "length"
    CONSTRAINT = "constraint"


class Task(StrEnum):
    """What a model was made for; the names are those of the exporter and of the manifest."""

    UNSPECIFIED = "unspecified"
    GENERATION = "generation"
    TRANSLATION = "translation"
    TEXT_CLASSIFICATION = "text_classification"
    TOKEN_CLASSIFICATION = "token_classification"  # noqa: S105 (a task, not a password)
    TEXT_EMBEDDING = "text_embedding"
    IMAGE_CLASSIFICATION = "image_classification"


class HealthStatus(StrEnum):
    """What the server says of itself or of a service (`grpc.health.v1`)."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The model that answered a call."""

    name: str
    version: str
    variant: str
    """Precision that ran: "fp32", "int8" or "fp16"."""

    def __str__(self) -> str:
        """Name, version and variant on a few characters."""
        return f"{self.name} {self.version} ({self.variant})"


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a call went in the server, in seconds; the parts may overlap."""

    total_s: float
    queue_s: float
    preprocessing_s: float
    inference_s: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[ResultT_co]):
    """The results of a call in the order of its inputs; iterate it, index it or take its `results`.

    There is one result for every input, or as many as `samples` asked for, one after the other.
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
class TokenCandidate:
    """A token that might have been chosen."""

    token_id: int
    text: str
    """The token by itself; what is not a whole character reads as U+FFFD."""
    log_probability: float
    """Natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class TokenLogProbability:
    """A token and how likely the model found it, before anything the request says of how to choose tokens."""

    token_id: int
    text: str
    """The token by itself; what is not a whole character reads as U+FFFD."""
    log_probability: float | None
    """Natural logarithm of its probability; None for the first token of a prompt."""
    top_tokens: tuple[TokenCandidate, ...] = ()
    """The likeliest tokens at its place, the likeliest first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A continuation of a prompt."""

    text: str
    """What follows the prompt; with `echo`, the prompt and what follows it."""
    finish_reason: FinishReason
    prompt_token_count: int
    new_token_count: int
    truncated: bool
    seed: int
    sample_index: int = 0
    """Number of the text among those of its prompt, from 0."""
    cached_prompt_token_count: int = 0
    """Tokens of the prompt that had been read for an earlier call."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """The tokens produced, where log-probabilities were asked for."""
    prompt_tokens: tuple[TokenLogProbability, ...] = ()
    """The prompt's tokens, where theirs were asked for."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """The next piece of a streamed text."""

    text: str
    """Whole characters, possibly none."""
    new_token_count: int
    """Tokens produced so far."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """The tokens produced since the last piece, where log-probabilities were asked for."""


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label with its probability."""

    label: str
    probability: float
    is_selected: bool = False
    """Whether the label applies: the likeliest one, or each that reaches its threshold where several may."""


@dataclass(frozen=True, slots=True)
class TextLabels:
    """The labels of a text, the most likely first."""

    labels: tuple[LabelScore, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class LabeledSpan:
    """A labelled span of a text: characters `start` to `end`, `end` excluded."""

    label: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TextSpans:
    """The labelled spans of a text, in its order."""

    spans: tuple[LabeledSpan, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class TextEmbedding:
    """The vector of a text."""

    values: tuple[float, ...]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """The vector of an image, and the image's size in pixels."""

    values: tuple[float, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageLabels:
    """The labels of an image, the most likely first, and its size in pixels."""

    labels: tuple[LabelScore, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class QualityFigure:
    """A figure that was measured when the model was exported."""

    variant: str
    metric: str
    value: float
    example_count: int
    dataset: str


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a generation request takes for parameters it does not set; None where the model names none."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded model."""

    name: str
    version: str
    task: Task
    description: str
    architecture: str
    parameter_count: int
    variant: str
    device: str
    max_input_token_count: int
    max_token_count: int
    labels: tuple[str, ...]
    source_language: str
    target_language: str
    default_sampling: SamplingDefaults | None
    quality: tuple[QualityFigure, ...]
    license: str
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class RejectedBundle:
    """A bundle of the store that could not be loaded."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelList:
    """The loaded models, by name and version, and the bundles that could not be loaded."""

    models: tuple[Model, ...]
    rejected_bundles: tuple[RejectedBundle, ...]

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """Everything about a model: what the server tells of it and its bundle's manifest, as JSON."""

    model: Model
    manifest_json: str
