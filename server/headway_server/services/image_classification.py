"""ImageClassificationService."""

from __future__ import annotations

import time

from headway.v1 import image_classification_service_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.images import images_of
from headway_server.services.messages import build, find_model, label_scores, signed
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.images.classifier import ClassifiedImage, ImageClassifier
from headway_server.tasks.table import CLASSIFY_IMAGES, LABEL_IMAGES


class ImageClassificationService:
    """Servicer of image classification models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyImage(self, request: pb.ClassifyImageRequest, deadline: float | None) -> pb.ClassifyImageResponse:
        """Classifies every image."""
        arrived = time.monotonic()
        if request.candidate_labels:
            model, answer = await self._match(request, deadline)
        else:
            if request.templates:
                raise InvalidInputError("templates", "requires candidate_labels; leave it out")
            model = find_model(self._host, CLASSIFY_IMAGES, request)
            images = await images_of(self._host, request.images, request.image_ids)
            answer = await model.classify(images, top_k=request.top_k, deadline=deadline)
        return await build(
            sum(len(result.labels) for result in answer.results),
            lambda: pb.ClassifyImageResponse(
                results=[_image_classification(result) for result in answer.results],
                **signed(model, answer.timings, arrived),
            ),
        )

    async def _match(
        self, request: pb.ClassifyImageRequest, deadline: float | None
    ) -> tuple[ImageClassifier, Answer[ClassifiedImage]]:
        """Classifies images by the labels of the request."""
        model, texts = self._host.find_able_pair(LABEL_IMAGES, request.model, request.model_version)
        images, labels = await images_of(self._host, request.images, request.image_ids), list(request.candidate_labels)
        vectors = await texts.embed_labels(labels, list(request.templates), deadline=deadline)
        answer = await model.match(images, labels, vectors, top_k=request.top_k, deadline=deadline)
        return model, answer


def _image_classification(result: ClassifiedImage) -> pb.ImageClassification:
    return pb.ImageClassification(labels=label_scores(result.labels), width=result.width, height=result.height)
