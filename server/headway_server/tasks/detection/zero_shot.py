"""Detector of the caller's labels: images and texts are encoded apart, and each box is compared with each label.

An image and a set of labels that come again are encoded once.

Q boxes of an image, C labels, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.bundles import Bundle, Manifest, demanded
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelUsage, Observer
from headway_server.preprocessing import EncodedText
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.model import MAX_LABELS, DetectedObjects, DetectionParameters, ObjectDetector
from headway_server.tasks.detection.objects import BOXES, LABEL_QUERIES, LOGIT_OFFSETS
from headway_server.tasks.images.model import Images, SeenImage
from headway_server.tasks.outputs import EMBEDDING
from headway_server.tasks.text.labels import SetVectors
from headway_server.tasks.text.model import TextInputs, TextModel

_LABELS: Final = "labels"


class LabelEncoder(TextModel):
    """Graph of a detector that embeds labels."""

    _role = "text_encoder"

    @classmethod
    def _expected(cls, manifest: Manifest, length: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG003
        """Returns the shape of an embedding."""
        return {EMBEDDING: (width_of(manifest),)}

    async def encode(self, labels: Sequence[str], *, deadline: float | None) -> NDArray[np.float32]:
        """Returns the embeddings of labels, (C, D); those of repeated sets are cached.

        Args:
            labels: 1 to `MAX_LABELS` texts.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: A label is empty, too long or repeated, the queue is full, the deadline passed, the server is
                draining.
        """

        async def embed(texts: Sequence[str], fields: Sequence[str]) -> SetVectors:
            def read(row: Tensors, _: int, encoded: EncodedText) -> tuple[NDArray[np.float32], int]:
                return row[EMBEDDING].copy(), len(encoded)

            answer = await self._answer(TextInputs(texts=texts, fields=fields), (EMBEDDING,), read, deadline=deadline)
            vectors, counts = zip(*answer.results, strict=True)
            return SetVectors(np.stack(vectors), num_truncated=0, num_tokens=sum(counts))

        limit = self._max_text_bytes
        return (await self.label_vectors.of_texts(labels, (), max_text_bytes=limit, embed=embed, field=_LABELS)).vectors


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
        if not labels:
            raise InvalidInputError(
                _LABELS,
                f"is empty, and {self.bundle.manifest.name} has no labels of its own; give 1 to {MAX_LABELS} texts of "
                "what to look for, such as 'a red car'",
            )
        for index, label in enumerate(labels):
            if label in labels[:index]:
                raise InvalidInputError(
                    f"{_LABELS}[{index}]", f"repeats {_LABELS}[{labels.index(label)}]; give each label once"
                )
        vectors = await self._encoder.encode(labels, deadline=deadline)  # (C, D)

        def read(row: Tensors, image: SeenImage) -> DetectedObjects:
            logits = row[LABEL_QUERIES] @ vectors.T + row[LOGIT_OFFSETS][:, np.newaxis]  # (Q, C)
            return self._read(logits, row[BOXES], image, parameters, names=labels)

        num_values = self._num_values(len(labels) + vectors.shape[1])
        return await self._answer(images, self._outputs, read, deadline, num_labels=num_values)


def width_of(manifest: Manifest) -> int:
    """Returns the width of a label's embedding, D."""
    [width] = next(iter(manifest.variants.values())).graphs["text_encoder"].outputs[0].shape[1:]
    assert isinstance(width, int), "the manifest's validator demands it"
    return width
