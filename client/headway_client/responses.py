"""From the API's messages to results: the one place where responses are read, for both clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from headway.v1 import (
    common_pb2,
    generation_service_pb2,
    image_classification_service_pb2,
    model_service_pb2,
    text_classification_service_pb2,
)
from headway_client.errors import ProtocolError
from headway_client.results import (
    Answer,
    FinishReason,
    GeneratedText,
    HealthStatus,
    ImageEmbedding,
    ImageLabels,
    LabeledSpan,
    LabelScore,
    Model,
    ModelDetails,
    ModelList,
    ModelReference,
    QualityFigure,
    RejectedBundle,
    SamplingDefaults,
    Task,
    TextEmbedding,
    TextLabels,
    TextSpans,
    Timings,
    TokenCandidate,
    TokenLogProbability,
)

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")

# Values of the API by number; a number of a newer protocol is in none of them.
_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CONSTRAINT: FinishReason.CONSTRAINT,
}
TASKS: dict[int, Task] = {
    model_service_pb2.TASK_UNSPECIFIED: Task.UNSPECIFIED,
    model_service_pb2.TASK_GENERATION: Task.GENERATION,
    model_service_pb2.TASK_TRANSLATION: Task.TRANSLATION,
    model_service_pb2.TASK_TEXT_CLASSIFICATION: Task.TEXT_CLASSIFICATION,
    model_service_pb2.TASK_TOKEN_CLASSIFICATION: Task.TOKEN_CLASSIFICATION,
    model_service_pb2.TASK_TEXT_EMBEDDING: Task.TEXT_EMBEDDING,
    model_service_pb2.TASK_IMAGE_CLASSIFICATION: Task.IMAGE_CLASSIFICATION,
}
_HEALTH: dict[int, HealthStatus] = {
    health_pb2.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}


class Reply(Protocol):
    """What every answering message carries besides its results."""

    @property
    def model(self) -> common_pb2.ModelReference:
        """The model that answered."""

    @property
    def timings(self) -> common_pb2.Timings:
        """Where the time went."""


def answer(
    reply: Reply, messages: Iterable[MessageT], convert: Callable[[MessageT], ResultT], expected_count: int
) -> Answer[ResultT]:
    """Makes the answer of a call that asks for `expected_count` results.

    Raises:
        ProtocolError: There are more or fewer.
    """
    results = tuple(convert(message) for message in messages)
    if len(results) != expected_count:
        raise ProtocolError(f"the server answered {len(results)} results, {expected_count} were asked for")
    return Answer(results, _model_reference(reply.model), _timings(reply.timings))


def finish_reason(number: int) -> FinishReason:
    """Reads why a text ended."""
    return _FINISH_REASONS.get(number, FinishReason.UNSPECIFIED)


def generated_text(message: generation_service_pb2.GeneratedText) -> GeneratedText:
    """Reads a continuation."""
    return GeneratedText(
        text=message.text,
        finish_reason=finish_reason(message.finish_reason),
        prompt_token_count=message.prompt_token_count,
        new_token_count=message.new_token_count,
        truncated=message.truncated,
        seed=message.seed,
        sample_index=message.sample_index,
        cached_prompt_token_count=message.cached_prompt_token_count,
        tokens=token_log_probabilities(message.tokens),
        prompt_tokens=token_log_probabilities(message.prompt_tokens),
    )


def token_log_probabilities(
    messages: Iterable[generation_service_pb2.TokenLogProbability],
) -> tuple[TokenLogProbability, ...]:
    """Reads tokens and how likely the model found them."""
    return tuple(
        TokenLogProbability(
            token_id=message.token_id,
            text=message.text,
            log_probability=message.log_probability if message.HasField("log_probability") else None,
            top_tokens=tuple(
                TokenCandidate(token.token_id, token.text, token.log_probability) for token in message.top_tokens
            ),
        )
        for message in messages
    )


def text_labels(message: text_classification_service_pb2.TextClassification) -> TextLabels:
    """Reads the labels of a text."""
    return TextLabels(_label_scores(message.labels), message.token_count, message.truncated)


def text_spans(message: text_classification_service_pb2.TokenClassification) -> TextSpans:
    """Reads the spans of a text."""
    spans = tuple(LabeledSpan(span.label, span.probability, span.start, span.end) for span in message.spans)
    return TextSpans(spans, message.token_count, message.truncated)


def text_embedding(message: text_classification_service_pb2.TextEmbedding) -> TextEmbedding:
    """Reads the vector of a text."""
    return TextEmbedding(tuple(message.values), message.token_count, message.truncated)


def image_embedding(message: image_classification_service_pb2.ImageEmbedding) -> ImageEmbedding:
    """Reads the vector of an image."""
    return ImageEmbedding(tuple(message.values), message.width, message.height)


def image_labels(message: image_classification_service_pb2.ImageClassification) -> ImageLabels:
    """Reads the labels of an image."""
    return ImageLabels(_label_scores(message.labels), message.width, message.height)


def model_list(response: model_service_pb2.ListModelsResponse) -> ModelList:
    """Reads the loaded models and the bundles that could not be loaded."""
    return ModelList(
        tuple(_model(message) for message in response.models),
        tuple(RejectedBundle(bundle.path, bundle.reason) for bundle in response.rejected_bundles),
    )


def model_details(response: model_service_pb2.GetModelResponse) -> ModelDetails:
    """Reads one model and its manifest."""
    return ModelDetails(_model(response.model), response.manifest_json)


def health_status(response: health_pb2.HealthCheckResponse) -> HealthStatus:
    """Reads a health check; a status of a newer protocol is unknown."""
    return _HEALTH.get(response.status, HealthStatus.UNKNOWN)


def _model(message: model_service_pb2.Model) -> Model:
    return Model(
        name=message.name,
        version=message.version,
        task=TASKS.get(message.task, Task.UNSPECIFIED),
        description=message.description,
        architecture=message.architecture,
        parameter_count=message.parameter_count,
        variant=message.variant,
        device=message.device,
        max_input_token_count=message.max_input_token_count,
        max_token_count=message.max_token_count,
        labels=tuple(message.labels),
        source_language=message.source_language,
        target_language=message.target_language,
        default_sampling=_sampling(message.default_parameters) if message.HasField("default_parameters") else None,
        quality=tuple(_quality_figure(figure) for figure in message.quality),
        license=message.license,
        has_chat_template=message.has_chat_template,
    )


def _quality_figure(message: model_service_pb2.QualityFigure) -> QualityFigure:
    return QualityFigure(message.variant, message.metric, message.value, message.example_count, message.dataset)


def _sampling(message: generation_service_pb2.GenerationParameters) -> SamplingDefaults:
    named = {field.name: value for part in (message, message.sampling) for field, value in part.ListFields()}
    return SamplingDefaults(
        max_new_tokens=named.get("max_new_tokens"),
        temperature=named.get("temperature"),
        top_k=named.get("top_k"),
        top_p=named.get("top_p"),
        min_p=named.get("min_p"),
        repetition_penalty=named.get("repetition_penalty"),
        presence_penalty=named.get("presence_penalty"),
        frequency_penalty=named.get("frequency_penalty"),
    )


def _label_scores(messages: Iterable[common_pb2.LabelScore]) -> tuple[LabelScore, ...]:
    return tuple(LabelScore(message.label, message.probability, message.selected) for message in messages)


def _model_reference(message: common_pb2.ModelReference) -> ModelReference:
    return ModelReference(message.name, message.version, message.variant)


def _timings(message: common_pb2.Timings) -> Timings:
    return Timings(
        total_s=_seconds(message.total),
        queue_s=_seconds(message.queue),
        preprocessing_s=_seconds(message.preprocessing),
        inference_s=_seconds(message.inference),
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
