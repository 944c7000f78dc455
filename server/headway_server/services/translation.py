"""TranslationService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

from headway.v1 import translation_service_pb2 as pb
from headway_server.preprocessing.pool import text_pool
from headway_server.services.messages import as_unary, signed, stream_of, text_delta, text_span
from headway_server.services.text_to_text import hypothesis_fields, text_fields
from headway_server.services.text_to_text_requests import parse_request
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import TRANSLATE_TEXTS
from headway_server.tasks.text_to_text.alignment import Alignment
from headway_server.tasks.text_to_text.answer import WrittenHypothesis, WrittenText
from headway_server.tasks.text_to_text.translation import TranslationModel


class TranslationService:
    """Servicer of translation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def TranslateText(self, request: pb.TranslateTextRequest, deadline: float | None) -> pb.TranslateTextResponse:
        """Translates every text."""
        arrived = time.monotonic()
        model = self._find(request)
        answer = await model.write(list(request.texts), request=parse_request(request, deadline=deadline))
        if request.include_alignment:  # many small messages
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(text_pool(), _response, answer, model, arrived)
        return _response(answer, model, arrived)

    def StreamTranslateText(
        self, request: pb.StreamTranslateTextRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamTranslateTextResponse, None]:
        """Translates a text and streams the translation."""
        arrived = time.monotonic()
        model = self._find(request)
        asked = parse_request(as_unary(request, pb.TranslateTextRequest), deadline=deadline)
        parts = model.stream(request.text, field="text", request=asked)
        return stream_of(pb.StreamTranslateTextResponse, parts, model, arrived, delta=text_delta, last=_last)

    def _find(self, request: pb.TranslateTextRequest | pb.StreamTranslateTextRequest) -> TranslationModel:
        languages = request.source_language, request.target_language
        model = self._host.find_translation(TRANSLATE_TEXTS, request.model, request.model_version, *languages)
        return cast("TranslationModel", model)


def _response(answer: Answer[WrittenText], model: TranslationModel, arrived: float) -> pb.TranslateTextResponse:
    return pb.TranslateTextResponse(
        results=[_translated_text(text) for text in answer.results],
        **signed(model, answer.timings, arrived),
    )


def _last(text: WrittenText) -> dict[str, Any]:
    return {"new_token_count": text.num_new_tokens, "result": _translated_text(text)}


def _translated_text(text: WrittenText) -> pb.TranslatedText:
    return pb.TranslatedText(
        **text_fields(text),
        hypotheses=[_hypothesis(hypothesis) for hypothesis in text.hypotheses],
        alignments=[_alignment(alignment) for alignment in text.alignments],
        sentence_count=text.num_sentences,
    )


def _hypothesis(hypothesis: WrittenHypothesis) -> pb.TranslationHypothesis:
    return pb.TranslationHypothesis(
        **hypothesis_fields(hypothesis),
        alignment=None if hypothesis.alignment is None else _alignment(hypothesis.alignment),
    )


def _alignment(alignment: Alignment) -> pb.Alignment:
    return pb.Alignment(
        source_tokens=[text_span(span) for span in alignment.source_spans],
        target_tokens=[
            pb.TokenAlignment(span=text_span(span), source_attention=row)
            for span, row in zip(alignment.target_spans, alignment.attention.tolist(), strict=True)
        ],
    )
