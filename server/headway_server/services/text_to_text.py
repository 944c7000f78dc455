"""TextToTextService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from headway.v1 import text_to_text_service_pb2 as pb
from headway_server.services.messages import FINISH_REASONS, as_unary, find_model, signed, stream_of, text_delta
from headway_server.services.text_to_text_requests import parse_rewrite_request
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import REWRITE_TEXTS
from headway_server.tasks.text_to_text.answer import WrittenHypothesis, WrittenText
from headway_server.tasks.text_to_text.model import TextToTextModel


class TextToTextService:
    """Servicer of text-to-text models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def RewriteText(self, request: pb.RewriteTextRequest, deadline: float | None) -> pb.RewriteTextResponse:
        """Rewrites every text."""
        arrived = time.monotonic()
        model = self._find(request)
        asked = parse_rewrite_request(request, deadline=deadline)
        answer = await model.write(list(request.texts), request=asked)
        return pb.RewriteTextResponse(
            results=[_rewritten_text(text) for text in answer.results],
            **signed(model, answer.timings, arrived),
        )

    def StreamRewriteText(
        self, request: pb.StreamRewriteTextRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamRewriteTextResponse, None]:
        """Rewrites a text and streams the output."""
        arrived = time.monotonic()
        model = self._find(request)
        asked = parse_rewrite_request(as_unary(request, pb.RewriteTextRequest), deadline=deadline)
        parts = model.stream(request.text, field="text", request=asked)
        return stream_of(pb.StreamRewriteTextResponse, parts, model, arrived, delta=text_delta, last=_last)

    def _find(self, request: pb.RewriteTextRequest | pb.StreamRewriteTextRequest) -> TextToTextModel:
        return find_model(self._host, REWRITE_TEXTS, request)


def text_fields(text: WrittenText) -> dict[str, Any]:
    """Returns the common fields of the messages of translations and other outputs."""
    return {
        "text": text.text,
        "log_probability": text.log_probability,
        "score": text.score,
        "finish_reason": FINISH_REASONS.number(text.finish_reason),
        "source_token_count": text.num_source_tokens,
        "new_token_count": text.num_new_tokens,
        "truncated": text.truncated,
        "seed": text.seed,
    }


def hypothesis_fields(hypothesis: WrittenHypothesis) -> dict[str, Any]:
    """Returns the common fields of the messages of their hypotheses."""
    return {
        "text": hypothesis.text,
        "log_probability": hypothesis.log_probability,
        "score": hypothesis.score,
        "finish_reason": FINISH_REASONS.number(hypothesis.finish_reason),
        "new_token_count": hypothesis.num_new_tokens,
    }


def _last(text: WrittenText) -> dict[str, Any]:
    return {"new_token_count": text.num_new_tokens, "result": _rewritten_text(text)}


def _rewritten_text(text: WrittenText) -> pb.RewrittenText:
    return pb.RewrittenText(
        **text_fields(text),
        hypotheses=[pb.RewriteHypothesis(**hypothesis_fields(hypothesis)) for hypothesis in text.hypotheses],
    )
