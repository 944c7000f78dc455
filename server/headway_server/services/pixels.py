"""SemanticSegmentationService and DepthEstimationService."""

from __future__ import annotations

import time
from typing import Final

from headway.v1 import depth_estimation_service_pb2 as depth_pb
from headway.v1 import semantic_segmentation_service_pb2 as pb
from headway_server.services.images import images_of
from headway_server.services.messages import build, find_model, signed
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import CLASSIFY_PIXELS, ESTIMATE_DEPTH

_KINDS: Final = {
    "metric": depth_pb.DEPTH_KIND_METRIC,
    "inverse": depth_pb.DEPTH_KIND_INVERSE,
    "unspecified": depth_pb.DEPTH_KIND_UNSPECIFIED,
}


class SemanticSegmentationService:
    """Servicer of semantic segmentation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyPixels(
        self, request: pb.ClassifyPixelsRequest, deadline: float | None
    ) -> pb.ClassifyPixelsResponse:
        """Labels the pixels of every image."""
        arrived = time.monotonic()
        model = find_model(self._host, CLASSIFY_PIXELS, request)
        images = await images_of(self._host, request.images, request.image_ids)
        answer = await model.classify(images, request.labels, deadline=deadline)
        return await build(
            sum(len(result.labels) for result in answer.results),
            lambda: pb.ClassifyPixelsResponse(
                results=[
                    pb.PixelClassification(
                        class_map=result.class_map,
                        labels=[
                            pb.PixelLabel(
                                label=one.label,
                                label_index=one.index,
                                share=one.share,
                                score=one.score,
                                probability_map=one.probability_map,
                            )
                            for one in result.labels
                        ],
                        width=result.width,
                        height=result.height,
                    )
                    for result in answer.results
                ],
                **signed(model, answer.timings, arrived),
            ),
        )


class DepthEstimationService:
    """Servicer of depth estimation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def EstimateDepth(
        self, request: depth_pb.EstimateDepthRequest, deadline: float | None
    ) -> depth_pb.EstimateDepthResponse:
        """Estimates the depth of every image's pixels."""
        arrived = time.monotonic()
        model = find_model(self._host, ESTIMATE_DEPTH, request)
        images = await images_of(self._host, request.images, request.image_ids)
        answer = await model.estimate(images, deadline=deadline)
        return depth_pb.EstimateDepthResponse(
            results=[
                depth_pb.DepthMap(
                    png=result.png,
                    minimum=result.minimum,
                    maximum=result.maximum,
                    kind=_KINDS[model.depth.kind],
                    width=result.width,
                    height=result.height,
                )
                for result in answer.results
            ],
            **signed(model, answer.timings, arrived),
        )
