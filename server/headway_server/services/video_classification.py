"""VideoClassificationService."""

from __future__ import annotations

import time

from headway.v1 import video_classification_service_pb2 as pb
from headway_server.services.messages import build, find_model, label_scores, signed
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import CLASSIFY_VIDEOS


class VideoClassificationService:
    """Servicer of video classification models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyVideo(self, request: pb.ClassifyVideoRequest, deadline: float | None) -> pb.ClassifyVideoResponse:
        """Classifies a video."""
        arrived = time.monotonic()
        model = find_model(self._host, CLASSIFY_VIDEOS, request)
        answer = await model.classify(list(request.frames), top_k=request.top_k, deadline=deadline)
        return await build(
            sum(len(result.labels) for result in answer.results),
            lambda: pb.ClassifyVideoResponse(
                results=[
                    pb.VideoClassification(labels=label_scores(result.labels), frame_indices=result.frame_indices)
                    for result in answer.results
                ],
                **signed(model, answer.timings, arrived),
            ),
        )
