"""ImageClassificationService."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from headway.v1 import image_classification_service_pb2 as pb
from headway.v1 import image_classification_service_pb2_grpc as pb_grpc
from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Task
from headway_server.serving.host import ModelHost
from headway_server.serving.limits import check_count, check_top_k
from headway_server.tasks.images.classifier import ClassifiedImage, EmbeddedImage, ImageClassifier
from headway_server.transports.grpc.messages import deadline_of, label_scores, model_reference, timings_of_call


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
        return cls(
            images=images,
            fields=_check_images(images),
            top_k=check_top_k(request.top_k, num_labels),
        )


class ImageClassificationService(pb_grpc.ImageClassificationServiceServicer):
    """Answers from the host's image models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ClassifyImage(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ClassifyImageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyImageResponse:
        """Gives every image its most likely labels."""
        arrived = time.monotonic()
        model = self._host.find(Task.IMAGE_CLASSIFICATION, request.model, request.model_version)
        assert isinstance(model, ImageClassifier)  # by the table of families
        call = ClassifyImageCall.parse(request, len(model.labels))
        answer = await model.classify(call.images, fields=call.fields, top_k=call.top_k, deadline=deadline_of(context))
        return pb.ClassifyImageResponse(
            results=[_image_classification(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )

    async def EmbedImage(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.EmbedImageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedImageResponse:
        """Turns every image into a vector."""
        arrived = time.monotonic()
        model = self._host.find_embedder((Task.IMAGE_CLASSIFICATION,), "images", request.model, request.model_version)
        assert isinstance(model, ImageClassifier)  # by the table of families
        images = list(request.images)
        answer = await model.embed(
            images,
            fields=_check_images(images),
            normalize=request.normalize if request.HasField("normalize") else True,
            deadline=deadline_of(context),
        )
        return pb.EmbedImageResponse(
            results=[_image_embedding(result) for result in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )


def _check_images(images: Sequence[bytes]) -> list[str]:
    """Checks how many images there are and returns what to call each of them in messages.

    Raises:
        InvalidInputError: There are none, or too many.
    """
    check_count("images", len(images), MAX_IMAGES)
    return [f"images[{index}]" for index in range(len(images))]


def _image_embedding(result: EmbeddedImage) -> pb.ImageEmbedding:
    return pb.ImageEmbedding(values=result.values.tolist(), width=result.width, height=result.height)


def _image_classification(result: ClassifiedImage) -> pb.ImageClassification:
    return pb.ImageClassification(labels=label_scores(result.labels), width=result.width, height=result.height)
