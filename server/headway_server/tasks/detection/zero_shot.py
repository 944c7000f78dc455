"""Detector of the caller's labels: images and texts are encoded apart, and each box is compared with each label.

An image and a set of labels that come again are encoded once.

Q boxes of an image, C labels, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import numpy as np

from headway_server.batching import Tensors
from headway_server.bundles import Bundle, Manifest, demanded
from headway_server.observers import NO_OBSERVER, ModelUsage, Observer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.model import MAX_LABELS, DetectedObjects, DetectionParameters, ObjectDetector
from headway_server.tasks.detection.objects import BOXES, LABEL_QUERIES, LOGIT_OFFSETS
from headway_server.tasks.images.labels import LabelEncoder, check_given, width_of
from headway_server.tasks.images.model import Images, SeenImage


class ZeroShotDetector(ObjectDetector):
    """Finds objects of the caller's labels in images."""

    _encoder: LabelEncoder

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads both graphs; errors are those of `ImageModel.load`."""
        detector = super().load(bundle, runtime, settings, observer)
        detector.encode_by(LabelEncoder.load(bundle, runtime, settings, observer))
        return detector

    def encode_by(self, encoder: LabelEncoder) -> None:
        """Takes what embeds labels, whose life is the model's."""
        self._encoder = encoder
        self.workers += encoder.workers
        self.closers += encoder.closers

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        count = demanded(manifest.detection).num_queries
        return {LABEL_QUERIES: (count, width_of(manifest)), LOGIT_OFFSETS: (count,), BOXES: (count, 4)}

    def usage(self) -> ModelUsage:
        """Returns the number of waiting inputs, and the sizes of the caches of images and of labels."""
        usage = super().usage()
        return replace(usage, caches=(*usage.caches, self._encoder.label_vectors.usage()))

    async def detect(
        self, images: Images, parameters: DetectionParameters, *, deadline: float | None
    ) -> Answer[DetectedObjects]:
        """Finds objects; arguments are those of `ObjectDetector.detect`.

        Raises:
            RequestError: There are no labels, one is empty, too long or repeated, the images cannot be read, the queue
                is full, the deadline passed, the server is draining.
        """
        labels = tuple(parameters.labels)
        check_given(labels, MAX_LABELS, owner=self.bundle.manifest.name)
        vectors = await self._encoder.encode(labels, deadline=deadline)  # (C, D)

        def read(row: Tensors, image: SeenImage) -> DetectedObjects:
            logits = row[LABEL_QUERIES] @ vectors.T + row[LOGIT_OFFSETS][:, np.newaxis]  # (Q, C)
            return self._read(logits, row[BOXES], image, parameters, names=labels)

        num_values = self._num_values(len(labels) + vectors.shape[1])
        return await self._answer(images, self._outputs, read, deadline, num_labels=num_values)
