"""CaptionService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from headway.v1 import caption_service_pb2 as pb
from headway_server.bundles import PatchGrid
from headway_server.decoding.sequence import Delta
from headway_server.preprocessing.pool import text_pool
from headway_server.services.images import image_of, images_of
from headway_server.services.messages import Parts, box, find_model, signed, stream_of, text_delta, text_span
from headway_server.services.text_to_text import hypothesis_fields, text_fields
from headway_server.services.text_to_text_requests import parse_parameters
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.captioning.model import Caption, CaptioningModel
from headway_server.tasks.table import CAPTION_IMAGES
from headway_server.tasks.text_to_text.alignment import Alignment
from headway_server.tasks.text_to_text.request import TextToTextRequest


class CaptionService:
    """Servicer of captioning models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def CaptionImage(self, request: pb.CaptionImageRequest, deadline: float | None) -> pb.CaptionImageResponse:
        """Captions every image."""
        arrived = time.monotonic()
        model = self._find(request)
        images = await images_of(self._host, request.images, request.image_ids)
        asked = _asked(request, tuple(request.prefixes), tuple(request.questions), deadline)
        answer = await model.caption(images, request=asked)
        if request.include_attention:  # many numbers
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(text_pool(), _response, answer, model, arrived)
        return _response(answer, model, arrived)

    def StreamCaptionImage(
        self, request: pb.StreamCaptionImageRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamCaptionImageResponse, None]:
        """Captions an image and streams the caption."""
        arrived = time.monotonic()
        model = self._find(request)

        async def begin() -> Parts[Delta, Caption]:
            image = await image_of(self._host, request.image, request.image_id)
            prefixes, questions = ((text,) if text else () for text in (request.prefix, request.question))
            asked = _asked(request, prefixes, questions, deadline)
            return model.stream_caption(image, field=image.field, request=asked)

        return stream_of(pb.StreamCaptionImageResponse, begin, model, arrived, delta=text_delta, last=_last)

    def _find(self, request: pb.CaptionImageRequest | pb.StreamCaptionImageRequest) -> CaptioningModel:
        return find_model(self._host, CAPTION_IMAGES, request)


def _asked(
    request: pb.CaptionImageRequest | pb.StreamCaptionImageRequest,
    prefixes: tuple[str, ...],
    questions: tuple[str, ...],
    deadline: float | None,
) -> TextToTextRequest:
    return TextToTextRequest(
        parameters=parse_parameters(request.parameters),
        target_prefixes=prefixes,
        questions=questions,
        wants_alignment=request.include_attention,
        target_language=request.language,
        deadline=deadline,
    )


def _response(answer: Answer[Caption], model: CaptioningModel, arrived: float) -> pb.CaptionImageResponse:
    return pb.CaptionImageResponse(
        results=[_caption(caption) for caption in answer.results],
        **signed(model, answer.timings, arrived),
    )


def _last(caption: Caption) -> dict[str, Any]:
    return {"new_token_count": caption.written.num_new_tokens, "result": _caption(caption)}


def _caption(caption: Caption) -> pb.ImageCaption:
    written = caption.written
    fields = text_fields(written)
    del fields["source_token_count"], fields["truncated"]  # fields of texts only
    return pb.ImageCaption(
        **fields,
        hypotheses=[
            pb.CaptionHypothesis(**hypothesis_fields(one), tokens=_tokens(one.alignment, caption.grid))
            for one in written.hypotheses
        ],
        tokens=_tokens(written.alignments[0] if written.alignments else None, caption.grid),
        patch_row_count=caption.grid.rows,
        patch_column_count=caption.grid.columns,
        seen_part=box(caption.seen_part),
        width=caption.width,
        height=caption.height,
    )


def _tokens(alignment: Alignment | None, grid: PatchGrid) -> list[pb.CaptionToken]:
    if alignment is None:
        return []
    rows = zip(alignment.target_spans, alignment.attention[:, grid.num_leading : grid.num_tokens].tolist(), strict=True)
    return [pb.CaptionToken(span=text_span(span), patch_attention=row) for span, row in rows]
