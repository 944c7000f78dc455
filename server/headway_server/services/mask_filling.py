"""MaskFillingService."""

from __future__ import annotations

import time

from headway.v1 import mask_filling_service_pb2 as pb
from headway_server.services.messages import build, find_model, signed, text_span
from headway_server.serving.host import ModelHost
from headway_server.tasks.mask_filling.model import FilledMask, FilledText
from headway_server.tasks.table import FILL_MASKS
from headway_server.tasks.text.model import TextInputs


class MaskFillingService:
    """Servicer of masked language models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def FillMask(self, request: pb.FillMaskRequest, deadline: float | None) -> pb.FillMaskResponse:
        """Finds tokens for the masks of every text."""
        arrived = time.monotonic()
        model = find_model(self._host, FILL_MASKS, request)
        answer = await model.fill(
            TextInputs(texts=list(request.texts), truncate=request.truncate),
            top_k=request.top_k,
            targets=list(request.targets),
            deadline=deadline,
        )
        return await build(
            sum(len(mask.tokens) for result in answer.results for mask in result.masks),
            lambda: pb.FillMaskResponse(
                results=[_filled_text(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )


def _filled_text(result: FilledText) -> pb.FilledText:
    return pb.FilledText(
        masks=list(map(_filled_mask, result.masks)), token_count=result.num_tokens, truncated=result.truncated
    )


def _filled_mask(mask: FilledMask) -> pb.FilledMask:
    return pb.FilledMask(
        span=text_span((mask.start, mask.end)),
        tokens=[
            pb.MaskToken(
                token=one.token, token_id=one.token_id, probability=one.probability, filled_text=one.filled_text
            )
            for one in mask.tokens
        ],
    )
