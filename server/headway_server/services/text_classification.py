"""TextClassificationService."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc

from headway.v1 import text_classification_service_pb2 as pb
from headway.v1 import text_classification_service_pb2_grpc as pb_grpc
from headway_server.batching import ClassifiedText, TextClassifier
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import Task
from headway_server.registry import ModelRegistry
from headway_server.services.messages import (
    check_texts,
    check_top_k,
    deadline_of,
    label_scores,
    model_reference,
    timings_of_call,
)
from headway_server.settings import DEFAULT_MAX_TEXT_KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyTextCall:
    """A checked request of ClassifyText."""

    texts: list[str]
    fields: list[str]
    top_k: int
    truncate: bool

    @classmethod
    def parse(cls, request: pb.ClassifyTextRequest, num_labels: int, max_text_bytes: int) -> ClassifyTextCall:
        """Checks a request to a model of `num_labels` labels, of texts of at most `max_text_bytes`.

        Raises:
            InvalidInputError: A field is out of range.
        """
        texts = list(request.texts)
        return cls(
            texts=texts,
            fields=check_texts("texts", texts, MAX_TEXTS, max_text_bytes),
            top_k=check_top_k(request.top_k, num_labels),
            truncate=request.truncate,
        )


class TextClassificationService(pb_grpc.TextClassificationServiceServicer):
    """Answers from the registry's text models."""

    def __init__(self, registry: ModelRegistry, *, max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10) -> None:
        """Answers from `registry`; a text of more than `max_text_bytes` in UTF-8 is refused unread."""
        self._registry = registry
        self._max_text_bytes = max_text_bytes

    async def ClassifyText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyTextResponse:
        """Gives every text its most likely labels."""
        arrived = time.monotonic()
        model = self._registry.find(Task.TEXT_CLASSIFICATION, request.model, request.model_version)
        assert isinstance(model, TextClassifier)  # by the registry's table of loaders
        call = ClassifyTextCall.parse(request, len(model.labels), self._max_text_bytes)
        answer = await model.classify(
            call.texts, fields=call.fields, top_k=call.top_k, truncate=call.truncate, deadline=deadline_of(context)
        )
        return pb.ClassifyTextResponse(
            results=[_text_labels(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )

    async def ClassifyTokens(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyTokensRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyTokensResponse:
        """Refuses, naming a model that can: the registry has no loader for this task yet, so it finds none."""
        model = self._registry.find(Task.TOKEN_CLASSIFICATION, request.model, request.model_version)
        raise AssertionError(f"{model!r} has no loader")

    async def EmbedText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.EmbedTextRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedTextResponse:
        """Refuses, naming a model that can: the registry has no loader for this task yet, so it finds none."""
        model = self._registry.find(Task.TEXT_EMBEDDING, request.model, request.model_version)
        raise AssertionError(f"{model!r} has no loader")


def _text_labels(result: ClassifiedText) -> pb.TextLabels:
    return pb.TextLabels(labels=label_scores(result.labels), token_count=result.num_tokens, truncated=result.truncated)
