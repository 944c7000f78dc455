"""Served object detection model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.bundles import Manifest, demanded
from headway_server.errors import InvalidInputError
from headway_server.field_rules import maximum, most_elements
from headway_server.serving.answers import Answer
from headway_server.tasks.detection.objects import BOXES, Objects
from headway_server.tasks.images.model import ImageModel, Images, SeenImage
from headway_server.tasks.outputs import LOGITS

MAX_OBJECTS: Final = maximum("DetectObjectsRequest.max_object_count")
MAX_LABELS: Final = most_elements("DetectObjectsRequest.labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionParameters:
    """Which objects are returned."""

    threshold: float | None = None
    """Objects with a score of at most this are left out; None: the model's."""
    nms_threshold: float | None = None
    """Intersection over union above which the worse of two objects of a label is left out; None: the model's."""
    max_objects: int = 0
    """Most objects of an image, the best first; 0: all that the model gives."""
    labels: Sequence[str] = ()
    """Labels whose objects are returned; none: all. Of a model without labels of its own: texts."""

    def __post_init__(self) -> None:
        for name in ("threshold", "nms_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InvalidInputError(name, f"is {value:g}; it goes from 0 to 1")
        if not 0 <= self.max_objects <= MAX_OBJECTS:
            raise InvalidInputError(
                "max_object_count", f"is {self.max_objects}; it goes from 1 to {MAX_OBJECTS}, 0 for all"
            )
        if len(self.labels) > MAX_LABELS:
            raise InvalidInputError(
                "labels", f"has {len(self.labels)} elements, the limit is {MAX_LABELS}; leave some out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedObjects:
    """Objects of one image, and the image's size in pixels."""

    objects: Objects
    names: Sequence[str]
    """Names of the labels, by number."""
    width: int
    height: int


class ObjectDetector(ImageModel):
    """Finds objects of the model's labels in images."""

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        detection = demanded(manifest.detection)
        num_classes = len(manifest.labels) + detection.num_extra_classes
        return {LOGITS: (detection.num_queries, num_classes), BOXES: (detection.num_queries, 4)}

    async def detect(
        self, images: Images, parameters: DetectionParameters, *, deadline: float | None
    ) -> Answer[DetectedObjects]:
        """Finds objects.

        Args:
            images: 1 to `MAX_IMAGES` images.
            parameters: Which objects are returned.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: A label is none of the model's, the images cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        chosen = self._choose(parameters.labels) if parameters.labels else None

        def read(row: Tensors, image: SeenImage) -> DetectedObjects:
            return self._read(row[LOGITS], row[BOXES], image, parameters, names=self.labels, chosen=chosen)

        return await self._answer(images, self._outputs, read, deadline, num_labels=self._num_values(len(self.labels)))

    def _num_values(self, num_labels: int) -> int:
        """Returns how many numbers are read of an image."""
        return demanded(self.bundle.manifest.detection).num_queries * num_labels

    def _read(
        self,
        logits: NDArray[np.float32],
        boxes: NDArray[np.float32],
        image: SeenImage,
        parameters: DetectionParameters,
        *,
        names: Sequence[str],
        chosen: NDArray[np.bool_] | None = None,
    ) -> DetectedObjects:
        """Reads the objects of an image of its logits (Q, C) and boxes (Q, 4)."""
        scheme, most = demanded(self.bundle.manifest.detection), parameters.max_objects or None
        asked = {name: getattr(parameters, name) for name in ("threshold", "nms_threshold")}
        chosen_thresholds = {name: getattr(scheme, name) if value is None else value for name, value in asked.items()}
        is_square = demanded(self.bundle.manifest.image_preprocessing).fills_square
        size = (max(image.width, image.height),) * 2 if is_square else (image.width, image.height)
        found = Objects.of(logits, boxes, scheme, size=size, chosen=chosen, **chosen_thresholds)
        objects = Objects(found.scores[:most], found.labels[:most], found.boxes[:most])
        return DetectedObjects(objects=objects, names=names, width=image.width, height=image.height)

    def _choose(self, labels: Sequence[str]) -> NDArray[np.bool_]:
        """Returns which of the model's labels are asked for, (C,).

        Raises:
            InvalidInputError: The model does not have one.
        """
        known = set(self.labels)
        for index, label in enumerate(labels):
            if label not in known:
                raise InvalidInputError(
                    f"labels[{index}]",
                    f"is {label[:64]!r}, which is no label of {self.bundle.manifest.name}; GetModel lists its "
                    f"{len(self.labels)} labels, such as {self.labels[-1]!r}",
                )
        asked = set(labels)
        return np.array([label in asked for label in self.labels])
