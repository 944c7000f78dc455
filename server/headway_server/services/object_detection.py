"""ObjectDetectionService."""

from __future__ import annotations

import time

from headway.v1 import object_detection_service_pb2 as pb
from headway_server.services.images import images_of
from headway_server.services.messages import box, build, find_model, signed
from headway_server.serving.host import ModelHost
from headway_server.tasks.detection.model import DetectedObjects, DetectionParameters
from headway_server.tasks.table import DETECT_OBJECTS


class ObjectDetectionService:
    """Servicer of object detection models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def DetectObjects(self, request: pb.DetectObjectsRequest, deadline: float | None) -> pb.DetectObjectsResponse:
        """Finds objects in every image."""
        arrived = time.monotonic()
        model = find_model(self._host, DETECT_OBJECTS, request)
        parameters = DetectionParameters(
            threshold=request.threshold if request.HasField("threshold") else None,
            nms_threshold=request.nms_threshold if request.HasField("nms_threshold") else None,
            max_objects=request.max_object_count,
            labels=list(request.labels),
        )
        images = await images_of(self._host, request.images, request.image_ids)
        answer = await model.detect(images, parameters, deadline=deadline)
        return await build(
            sum(len(result.objects.scores) for result in answer.results),
            lambda: pb.DetectObjectsResponse(
                results=[_object_detection(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )


def _object_detection(result: DetectedObjects) -> pb.ObjectDetection:
    found, names = result.objects, result.names
    rows = zip(found.scores.tolist(), found.labels.tolist(), found.boxes.tolist(), strict=True)
    return pb.ObjectDetection(
        objects=[
            pb.DetectedObject(label=names[label], label_index=label, score=score, box=box(sides))
            for score, label, sides in rows
        ],
        width=result.width,
        height=result.height,
    )
