"""InspectionService."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from headway.v1 import inspection_service_pb2 as pb
from headway_server.services.enums import WireEnum
from headway_server.services.images import image_of
from headway_server.services.messages import box, build, find_model, signed, text_span
from headway_server.serving.host import ModelHost
from headway_server.serving.limits import check_count
from headway_server.tasks.images.classifier import InspectedImage
from headway_server.tasks.inspection.inspector import InspectedText, InspectedToken, InspectedTranslation
from headway_server.tasks.inspection.maps import AttentionMap, AttentionRequest, Maps, Summary
from headway_server.tasks.table import INSPECT_GENERATION, INSPECT_IMAGES, INSPECT_TEXTS, INSPECT_TRANSLATION

_SUMMARIES: Final = WireEnum(pb.AttentionSummary, Summary, unspecified=Summary.EACH_HEAD)
_MAX_NUMBERS: Final = 1024
"""Maximum layers, or heads, named by a call."""
_WEIGHTS_OF_A_PART: Final = 16
"""Weights whose serialization takes as long as one small message."""


class InspectionService:
    """Servicer of attention maps."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def InspectText(self, request: pb.InspectTextRequest, deadline: float | None) -> pb.InspectTextResponse:
        """Returns attention maps of a text."""
        arrived = time.monotonic()
        model = find_model(self._host, INSPECT_TEXTS, request)
        found = await model.inspect(
            request.text,
            text_pair=request.text_pair or None,
            request=_asked(request.attention),
            truncate=request.truncate,
            deadline=deadline,
        )
        return await build(
            _num_parts(found.maps),
            lambda: pb.InspectTextResponse(
                result=_text(found),
                **signed(model, found.timings, arrived),
            ),
        )

    async def InspectImage(self, request: pb.InspectImageRequest, deadline: float | None) -> pb.InspectImageResponse:
        """Returns attention maps of an image."""
        arrived = time.monotonic()
        model = find_model(self._host, INSPECT_IMAGES, request)
        image = await image_of(self._host, request.image, request.image_id)
        found = await model.inspect(image, request=_asked(request.attention), deadline=deadline)
        return await build(
            _num_parts(found.maps),
            lambda: pb.InspectImageResponse(
                result=_image(found),
                **signed(model, found.timings, arrived),
            ),
        )

    async def InspectGeneration(
        self, request: pb.InspectGenerationRequest, deadline: float | None
    ) -> pb.InspectGenerationResponse:
        """Returns attention maps of a text in a generation model."""
        arrived = time.monotonic()
        model = find_model(self._host, INSPECT_GENERATION, request)
        found = await model.inspect(
            request.text,
            request=_asked(request.attention),
            truncate=request.truncate,
            deadline=deadline,
        )
        return await build(
            _num_parts(found.maps),
            lambda: pb.InspectGenerationResponse(
                result=_text(found),
                **signed(model, found.timings, arrived),
            ),
        )

    async def InspectTranslation(
        self, request: pb.InspectTranslationRequest, deadline: float | None
    ) -> pb.InspectTranslationResponse:
        """Returns attention maps of a source and its translation."""
        arrived = time.monotonic()
        model = find_model(self._host, INSPECT_TRANSLATION, request)
        found = await model.inspect(
            request.text,
            translation=request.translation or None,
            request=_asked(request.attention),
            truncate=request.truncate,
            deadline=deadline,
        )
        return await build(
            _num_parts(found.maps),
            lambda: pb.InspectTranslationResponse(
                result=_translation(found),
                **signed(model, found.timings, arrived),
            ),
        )


def _asked(options: pb.AttentionOptions) -> AttentionRequest:
    """Parses the layers, heads and summary of a request.

    Raises:
        InvalidInputError: The summary is unknown, or there are more layers or heads than any model has.
    """
    for field, numbers in (("attention.layers", options.layers), ("attention.heads", options.heads)):
        if numbers:
            check_count(field, len(numbers), _MAX_NUMBERS, "name each once, or leave it out for all")
    return AttentionRequest(
        layers=tuple(options.layers),
        heads=tuple(options.heads),
        summary=_SUMMARIES.read("attention.summary", options.summary),
    )


def _num_parts(maps: Maps) -> int:
    return sum(found.weights.size for kind in maps.values() for found in kind) // _WEIGHTS_OF_A_PART


def _text(found: InspectedText) -> pb.TextInspection:
    return pb.TextInspection(
        tokens=_tokens(found.tokens), attention=_attention(found.maps["attention"]), truncated=found.truncated
    )


def _image(found: InspectedImage) -> pb.ImageInspection:
    return pb.ImageInspection(
        patches=[box(sides) for sides in found.boxes.tolist()],
        patch_row_count=found.grid.rows,
        patch_column_count=found.grid.columns,
        attention=_attention(found.maps["attention"]),
        width=found.width,
        height=found.height,
    )


def _translation(found: InspectedTranslation) -> pb.TranslationInspection:
    return pb.TranslationInspection(
        source_tokens=_tokens(found.tokens),
        target_tokens=_tokens(found.target_tokens),
        translation=found.translation,
        encoder_attention=_attention(found.maps["encoder_attention"]),
        decoder_attention=_attention(found.maps["decoder_attention"]),
        cross_attention=_attention(found.maps["cross_attention"]),
        truncated=found.truncated,
    )


def _tokens(tokens: Iterable[InspectedToken]) -> list[pb.InspectedToken]:
    return [
        pb.InspectedToken(
            token_id=token.token_id, text=token.text, span=text_span((token.start, token.end)), of_pair=token.of_pair
        )
        for token in tokens
    ]


def _attention(maps: Sequence[AttentionMap]) -> pb.Attention:
    # A list would take eight times the memory of the array.
    rows, columns = maps[0].weights.shape if maps else (0, 0)
    return pb.Attention(
        row_count=rows,
        column_count=columns,
        maps=[
            pb.AttentionMap(layer=found.layer, head=found.head, weights=found.weights.ravel().data) for found in maps
        ],
    )
