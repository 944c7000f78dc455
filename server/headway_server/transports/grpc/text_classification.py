"""TextClassificationService."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc

from headway.v1 import text_classification_service_pb2 as pb
from headway.v1 import text_classification_service_pb2_grpc as pb_grpc
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import Manifest, Task
from headway_server.errors import InvalidInputError
from headway_server.serving.host import ModelHost
from headway_server.serving.limits import check_texts, check_top_k
from headway_server.settings import DEFAULT_MAX_TEXT_KIB
from headway_server.tasks.text.classifier import ClassifiedText, TextClassifier
from headway_server.tasks.text.model import EmbeddedText, TextInputs, TextModel
from headway_server.tasks.tokens.classifier import TaggedText, TokenClassifier
from headway_server.transports.grpc.messages import deadline_of, label_scores, model_reference, timings_of_call

_READ_TEXTS = (Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyTextCall:
    """A checked request of ClassifyText."""

    inputs: TextInputs
    top_k: int
    threshold: float | None
    """None: the model's own."""

    @classmethod
    def parse(cls, request: pb.ClassifyTextRequest, manifest: Manifest, max_text_bytes: int) -> ClassifyTextCall:
        """Checks a request to a model, of texts of at most `max_text_bytes`.

        Raises:
            InvalidInputError: A field is out of range.
        """
        return cls(
            inputs=parse_inputs(request, manifest, max_text_bytes),
            top_k=check_top_k(request.top_k, len(manifest.labels)),
            threshold=check_threshold(request.threshold) if request.HasField("threshold") else None,
        )


def parse_inputs(
    request: pb.ClassifyTextRequest | pb.EmbedTextRequest, manifest: Manifest, max_text_bytes: int
) -> TextInputs:
    """Checks the texts of a request to a model, each of at most `max_text_bytes`.

    Raises:
        InvalidInputError: A field is out of range, or there are pairs where the model takes none, or the reverse.
    """
    texts, pairs = list(request.texts), list(request.text_pairs)
    fields = check_texts("texts", texts, MAX_TEXTS, max_text_bytes)
    if pairs and manifest.text_pairs == "never":
        raise InvalidInputError("text_pairs", f"is set, and model {manifest.name} reads single texts; leave it out")
    if not pairs and manifest.text_pairs == "required":
        raise InvalidInputError(
            "text_pairs", f"is empty, and model {manifest.name} reads pairs of texts; give one for every text"
        )
    if pairs and len(pairs) != len(texts):
        raise InvalidInputError(
            "text_pairs", f"has {len(pairs)} elements and texts has {len(texts)}; give one for every text, or none"
        )
    if pairs:
        check_texts("text_pairs", pairs, MAX_TEXTS, max_text_bytes)
    return TextInputs(texts=texts, fields=fields, text_pairs=pairs or None, truncate=request.truncate)


def check_threshold(threshold: float) -> float:
    """Checks a probability from which labels apply.

    Raises:
        InvalidInputError: It is not in 0 to 1.
    """
    if not 0 <= threshold <= 1:  # a NaN is not either
        raise InvalidInputError("threshold", f"is {threshold}; give a probability of 0 to 1")
    return threshold


class TextClassificationService(pb_grpc.TextClassificationServiceServicer):
    """Answers from the host's text models."""

    def __init__(self, host: ModelHost, *, max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10) -> None:
        """Answers from `host`; a text of more than `max_text_bytes` in UTF-8 is refused unread."""
        self._host = host
        self._max_text_bytes = max_text_bytes

    async def ClassifyText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyTextResponse:
        """Gives every text its most likely labels."""
        arrived = time.monotonic()
        model = self._host.find(Task.TEXT_CLASSIFICATION, request.model, request.model_version)
        assert isinstance(model, TextClassifier)  # by the table of families
        call = ClassifyTextCall.parse(request, model.bundle.manifest, self._max_text_bytes)
        answer = await model.classify(
            call.inputs, top_k=call.top_k, threshold=call.threshold, deadline=deadline_of(context)
        )
        return pb.ClassifyTextResponse(
            results=[_text_classification(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )

    async def ClassifyTokens(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyTokensResponse:
        """Labels spans of every text."""
        arrived = time.monotonic()
        model = self._host.find(Task.TOKEN_CLASSIFICATION, request.model, request.model_version)
        assert isinstance(model, TokenClassifier)  # by the table of families
        texts = list(request.texts)
        fields = check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        inputs = TextInputs(texts=texts, fields=fields, truncate=request.truncate)
        answer = await model.classify(inputs, deadline=deadline_of(context))
        return pb.ClassifyTokensResponse(
            results=[_token_classification(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )

    async def EmbedText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.EmbedTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedTextResponse:
        """Turns every text into a vector."""
        arrived = time.monotonic()
        model = self._host.find_embedder(_READ_TEXTS, "texts", request.model, request.model_version)
        assert isinstance(model, TextModel)  # by the table of families
        answer = await model.embed(
            parse_inputs(request, model.bundle.manifest, self._max_text_bytes),
            normalize=request.normalize if request.HasField("normalize") else True,
            deadline=deadline_of(context),
        )
        return pb.EmbedTextResponse(
            results=[_text_embedding(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )


def _text_classification(result: ClassifiedText) -> pb.TextClassification:
    return pb.TextClassification(
        labels=label_scores(result.labels), token_count=result.num_tokens, truncated=result.truncated
    )


def _text_embedding(result: EmbeddedText) -> pb.TextEmbedding:
    return pb.TextEmbedding(values=result.values.tolist(), token_count=result.num_tokens, truncated=result.truncated)


def _token_classification(result: TaggedText) -> pb.TokenClassification:
    spans = [
        pb.LabeledSpan(label=span.label, probability=span.probability, start=span.start, end=span.end)
        for span in result.spans
    ]
    return pb.TokenClassification(spans=spans, token_count=result.num_tokens, truncated=result.truncated)
