"""TextClassificationService."""

from __future__ import annotations

import time

from headway.v1 import text_classification_service_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.messages import build, find_model, label_scores, signed, text_inputs, text_span
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import CLASSIFY_PAGES, CLASSIFY_TEXTS, CLASSIFY_TOKENS
from headway_server.tasks.text.classifier import ClassifiedText
from headway_server.tasks.text.entailment import GivenLabels
from headway_server.tasks.text.model import TextInputs
from headway_server.tasks.tokens.classifier import TaggedText
from headway_server.tasks.tokens.pages import Page, PageInputs


class TextClassificationService:
    """Servicer of text and token classification models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyText(self, request: pb.ClassifyTextRequest, deadline: float | None) -> pb.ClassifyTextResponse:
        """Classifies every text."""
        arrived = time.monotonic()
        model = find_model(self._host, CLASSIFY_TEXTS, request)
        threshold = request.threshold if request.HasField("threshold") else None
        inputs, given = text_inputs(request), _given_labels(request)
        if given is None:
            answer = await model.classify(inputs, top_k=request.top_k, threshold=threshold, deadline=deadline)
        else:
            answer = await model.classify_by_entailment(
                inputs, given, top_k=request.top_k, threshold=threshold, deadline=deadline
            )
        return await build(
            sum(len(result.labels) for result in answer.results),
            lambda: pb.ClassifyTextResponse(
                results=[_text_classification(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )

    async def ClassifyTokens(
        self, request: pb.ClassifyTokensRequest, deadline: float | None
    ) -> pb.ClassifyTokensResponse:
        """Finds labelled spans of every text or page."""
        arrived = time.monotonic()
        model = find_model(self._host, CLASSIFY_PAGES if request.pages else CLASSIFY_TOKENS, request)
        if request.pages and request.texts:
            raise InvalidInputError("texts", "is set together with pages; send one of the two")
        inputs = (
            PageInputs.of(list(map(_page, request.pages)), truncate=request.truncate)
            if request.pages
            else TextInputs(texts=list(request.texts), truncate=request.truncate)
        )
        answer = await model.classify(inputs, deadline=deadline)
        return await build(
            sum(len(result.spans) for result in answer.results),
            lambda: pb.ClassifyTokensResponse(
                results=[_token_classification(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )


def _given_labels(request: pb.ClassifyTextRequest) -> GivenLabels | None:
    if not request.candidate_labels:
        for field in ("hypothesis_template", "independent_labels"):
            if getattr(request, field):
                raise InvalidInputError(field, "requires candidate_labels; give these too")
        return None
    return GivenLabels(
        labels=list(request.candidate_labels),
        template=request.hypothesis_template,
        are_independent=request.independent_labels,
    )


def _page(page: pb.Page) -> Page:
    return Page(words=list(page.words), boxes=page.boxes, width=page.width, height=page.height)


def _text_classification(result: ClassifiedText) -> pb.TextClassification:
    return pb.TextClassification(
        labels=label_scores(result.labels), token_count=result.num_tokens, truncated=result.truncated
    )


def _token_classification(result: TaggedText) -> pb.TokenClassification:
    spans = [
        pb.LabeledSpan(
            label=span.label,
            probability=span.probability,
            span=text_span((span.start, span.end)),
            words=None if span.words is None else pb.WordSpan(start=span.words[0], end=span.words[1]),
        )
        for span in result.spans
    ]
    return pb.TokenClassification(spans=spans, token_count=result.num_tokens, truncated=result.truncated)
