"""ImageClassificationService."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc

from headway.v1 import image_classification_service_pb2 as pb
from headway.v1 import image_classification_service_pb2_grpc as pb_grpc
from headway_server.batching import ClassifiedImage, ImageClassifier
from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Task
from headway_server.registry import ModelRegistry
from headway_server.services.messages import (
    check_count,
    check_top_k,
    deadline_of,
    label_scores,
    model_reference,
    timings_of_call,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyImageCall:
    """A checked request of ClassifyImage; the images themselves are checked when they are decoded."""

    images: list[bytes]
    fields: list[str]
    top_k: int

    @classmethod
    def parse(cls, request: pb.ClassifyImageRequest, num_labels: int) -> ClassifyImageCall:
        """Checks a request to a model of `num_labels` labels.

        Raises:
            InvalidInputError: A field is out of range.
        """
        images = list(request.images)
        check_count("images", len(images), MAX_IMAGES)
        return cls(
            images=images,
            fields=[f"images[{index}]" for index in range(len(images))],
            top_k=check_top_k(request.top_k, num_labels),
        )


class ImageClassificationService(pb_grpc.ImageClassificationServiceServicer):
    """Answers from the registry's image models."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def ClassifyImage(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyImageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyImageResponse:
        """Gives every image its most likely labels."""
        arrived = time.monotonic()
        model = self._registry.find(Task.IMAGE_CLASSIFICATION, request.model, request.model_version)
        assert isinstance(model, ImageClassifier)  # by the registry's table of loaders
        call = ClassifyImageCall.parse(request, len(model.labels))
        answer = await model.classify(call.images, fields=call.fields, top_k=call.top_k, deadline=deadline_of(context))
        return pb.ClassifyImageResponse(
            results=[_image_labels(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )


def _image_labels(result: ClassifiedImage) -> pb.ImageLabels:
    return pb.ImageLabels(labels=label_scores(result.labels), width=result.width, height=result.height)
