"""SegmentationService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Final

from headway.v1 import common_pb2
from headway.v1 import segmentation_service_pb2 as pb
from headway_server.errors import DeadlineError, DrainingError, InvalidInputError
from headway_server.services.enums import WireEnum
from headway_server.services.images import image_of
from headway_server.services.messages import box, build, set_fields, signed
from headway_server.services.procedure import StreamedCall, StreamedCalls
from headway_server.serving.answers import NO_TIMINGS
from headway_server.serving.host import ModelHost
from headway_server.tasks.segmentation.model import (
    ClickSession,
    EverythingRequest,
    MaskFormat,
    Point,
    SegmentationModel,
    SegmentMask,
    SegmentPrompt,
)
from headway_server.tasks.table import SEGMENT_IMAGES

_FORMATS: Final = WireEnum(pb.MaskFormat, MaskFormat, unspecified=MaskFormat.RUNS)
_EVERYTHING: Final = tuple(field.name for field in fields(EverythingRequest))
"""Fields of the request with the names of `EverythingRequest`."""


class SegmentationService:
    """Servicer of segmentation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def SegmentImage(self, request: pb.SegmentImageRequest, deadline: float | None) -> pb.SegmentImageResponse:
        """Returns the masks of every prompt."""
        arrived = time.monotonic()
        model = self._find(request.model, request.model_version)
        answer = await model.segment(
            await image_of(self._host, request.image, request.image_id),
            [_prompt(one.points, one.box if one.HasField("box") else None) for one in request.prompts],
            max_masks=request.max_mask_count,
            mask_format=_FORMATS.read("mask_format", request.mask_format),
            deadline=deadline,
        )
        return await build(
            sum(_num_parts(mask) for row in answer.results for mask in row),
            lambda: pb.SegmentImageResponse(
                results=[pb.PromptMasks(masks=[_mask(mask) for mask in row]) for row in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )

    async def SegmentEverything(
        self, request: pb.SegmentEverythingRequest, deadline: float | None
    ) -> AsyncGenerator[pb.SegmentEverythingResponse, None]:
        """Streams the segments of an image, and last the model and timings."""
        arrived = time.monotonic()
        model = self._find(request.model, request.model_version)
        given = set_fields(request)
        wanted = EverythingRequest(**{name: given[name] for name in _EVERYTHING if name in given})
        segments = await model.segment_everything(
            await image_of(self._host, request.image, request.image_id),
            wanted,
            mask_format=_FORMATS.read("mask_format", request.mask_format),
            deadline=deadline,
        )
        async with segments:
            async for mask in segments.masks:
                yield pb.SegmentEverythingResponse(mask=await build(_num_parts(mask), partial(_mask, mask)))
        yield pb.SegmentEverythingResponse(**signed(model, segments.timings, arrived))

    async def SegmentInteractively(self, calls: StreamedCalls[pb.SegmentInteractivelyRequest]) -> None:
        """Answers the clicks of a stream in order. An error ends the stream."""
        stream = _Clicks(self, calls.deadline)
        requests = aiter(calls)
        try:
            while (call := await stream.next_call(requests)) is not None:
                await calls.send(await stream.answer(call))
        finally:
            stream.close()

    def _find(self, name: str, version: str) -> SegmentationModel:
        return self._host.find_able(SEGMENT_IMAGES, name, version)

    async def _open_clicks(
        self, request: pb.SegmentInteractivelyRequest, deadline: float | None
    ) -> tuple[SegmentationModel, ClickSession]:
        model = self._find(request.model, request.model_version)
        image = await image_of(self._host, request.image, request.image_id)
        return model, await model.open_clicks(image, deadline=deadline)


class _Clicks:
    """State of a stream of clicks."""

    def __init__(self, service: SegmentationService, deadline: float | None) -> None:
        self._service = service
        self._deadline = deadline
        self._clicks: ClickSession | None = None

    async def next_call(
        self, requests: AsyncIterator[StreamedCall[pb.SegmentInteractivelyRequest]]
    ) -> StreamedCall[pb.SegmentInteractivelyRequest] | None:
        """Waits for a request; None at the end of the stream.

        Raises:
            DeadlineError: The stream has an image, and no request arrived in time.
        """
        max_idle_s = None if self._clicks is None else self._clicks.model.max_idle_s
        try:
            async with asyncio.timeout(max_idle_s):
                return await anext(requests, None)
        except TimeoutError:
            raise DeadlineError(f"no request came for {max_idle_s:g} s; open the stream again to go on") from None

    async def answer(self, call: StreamedCall[pb.SegmentInteractivelyRequest]) -> pb.SegmentInteractivelyResponse:
        """Answers a request of the stream."""
        arrived = time.monotonic()
        async with call.answer() as request:
            timings = NO_TIMINGS
            if self._clicks is None or request.image or request.image_id:
                self.close()
                model, self._clicks = await self._service._open_clicks(request, self._deadline)  # noqa: SLF001
                timings = self._clicks.timings
            else:
                if request.model or request.model_version:
                    raise InvalidInputError("model", "is set without an image; set it in the request with the image")
                manifest = self._clicks.model.bundle.manifest
                model = self._service._find(manifest.name, manifest.version)  # noqa: SLF001 (kept open until the call ends)
                if model is not self._clicks.model:
                    raise DrainingError("the model was loaded anew; open the stream again with the image")
            pointing = self._clicks
            if request.restart:
                pointing.restart()
            masks: list[SegmentMask] = []
            if request.points or request.HasField("box"):
                pointing.add(_prompt(request.points, request.box if request.HasField("box") else None))
                masks, more = await model.click(
                    pointing,
                    max_masks=request.max_mask_count,
                    mask_format=_FORMATS.read("mask_format", request.mask_format),
                    deadline=self._deadline,
                )
                timings += more
            image = pointing.embedded.image
            return await build(
                sum(map(_num_parts, masks)),
                lambda: pb.SegmentInteractivelyResponse(
                    masks=[_mask(mask) for mask in masks],
                    width=image.width,
                    height=image.height,
                    **signed(model, timings, arrived),
                ),
            )

    def close(self) -> None:
        """Releases the image."""
        if self._clicks is not None:
            with self._clicks:
                self._clicks = None


def _prompt(points: Sequence[pb.PromptPoint], box: common_pb2.Box | None) -> SegmentPrompt:
    return SegmentPrompt(
        points=tuple(Point(point.x, point.y, is_inside=not point.outside) for point in points),
        box=None if box is None else (box.left, box.top, box.right, box.bottom),
    )


def _num_parts(mask: SegmentMask) -> int:
    """Returns the weight of a mask in `build`: a number takes a hundredth of a message's time."""
    return 1 + (0 if mask.counts is None else len(mask.counts) // 100)


def _mask(mask: SegmentMask) -> pb.Mask:
    return pb.Mask(
        counts=None if mask.counts is None else mask.counts.tolist(),
        png=mask.png or b"",
        predicted_iou=mask.predicted_iou,
        stability=mask.stability,
        box=box(mask.box),
        area=mask.area,
        width=mask.width,
        height=mask.height,
    )
