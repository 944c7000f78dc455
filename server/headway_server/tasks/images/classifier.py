"""Image classification and embedding.

D is the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Postprocess, Tensors
from headway_server.bundles import ClassificationScheme, Manifest, PatchGrid, demanded
from headway_server.preprocessing import PreparedImage
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_top_k
from headway_server.tasks.images.model import ImageModel, Images, SeenImage
from headway_server.tasks.inspection.maps import AttentionRequest, Maps
from headway_server.tasks.outputs import (
    EMBEDDING,
    LOGITS,
    LabelReader,
    ScoredLabel,
    logits_postprocess,
    read_embedding,
    read_vector,
    sigmoid,
    softmax,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedImage:
    """Labels of one image, the most likely first, and the image's size in pixels."""

    labels: tuple[ScoredLabel, ...]
    width: int
    height: int
    embedding: NDArray[np.float32] | None = None
    """(D,), if requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedImage:
    """The vector of one image, and the image's size in pixels."""

    values: NDArray[np.float32]
    """(D,)"""
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedImage:
    """Patches of one image with their attention maps, and the image's size in pixels."""

    boxes: NDArray[np.float64]
    """(T, 4): left, top, right and bottom of each token, in pixels of the image; zeros for the class token."""
    grid: PatchGrid
    maps: Maps
    width: int
    height: int
    timings: CallTimings


class ImageClassifier(ImageModel):
    """Classifies images, and embeds them if its graph has embeddings."""

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:
        return logits_postprocess(manifest)

    async def classify(
        self,
        images: Images,
        *,
        top_k: int,
        deadline: float | None,
        embedding: Literal["none", "raw", "normalized"] = "none",
    ) -> Answer[ClassifiedImage]:
        """Classifies images.

        Args:
            images: 1 to `MAX_IMAGES` images.
            top_k: Labels to answer an image, 1 to the number of labels; 0: all of them.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            embedding: Embedding to return with each image, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: An argument is out of its range, the images cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))

        def read(row: Tensors, image: SeenImage) -> ClassifiedImage:
            return ClassifiedImage(
                labels=self._label_reader.read(row[LOGITS], num_labels),
                width=image.width,
                height=image.height,
                embedding=read_embedding(row, embedding),
            )

        outputs = (LOGITS,) if embedding == "none" else (LOGITS, EMBEDDING)
        return await self._answer(images, outputs, read, deadline, num_labels=len(self.labels))

    async def match(
        self,
        images: Images,
        labels: Sequence[str],
        vectors: NDArray[np.float32],
        *,
        top_k: int,
        deadline: float | None,
    ) -> Answer[ClassifiedImage]:
        """Classifies images by the caller's labels; for bundles whose embeddings share a space.

        Args:
            images: 1 to `MAX_IMAGES` images.
            labels: The labels.
            vectors: Embeddings of the labels in the same space, (C, D) of length one.
            top_k: Labels to answer an image, 1 to the number of labels; 0: all of them.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `classify`.
        """
        embedding = self.bundle.manifest.embedding
        assert embedding is not None, "the ability requires it"
        assert embedding.space is not None, "the ability requires it"
        space, num_labels = embedding.space, check_top_k(top_k, len(labels))
        is_softmax = space.probabilities == "softmax"
        scheme = ClassificationScheme() if is_softmax else _each_by_itself(len(labels))
        reader = LabelReader(labels, scheme)
        scale, bias = np.float32(space.scale), np.float32(space.bias)

        def read(row: Tensors, image: SeenImage) -> ClassifiedImage:
            logits = vectors @ read_vector(row[EMBEDDING], normalize=True) * scale + bias  # (C,)
            return ClassifiedImage(
                labels=reader.read(softmax(logits) if is_softmax else sigmoid(logits), num_labels),
                width=image.width,
                height=image.height,
            )

        return await self._answer(images, (EMBEDDING,), read, deadline, num_labels=len(labels))

    async def embed(self, images: Images, *, normalize: bool, deadline: float | None) -> Answer[EmbeddedImage]:
        """Embeds images; for bundles whose graphs have embeddings.

        Args:
            images: 1 to `MAX_IMAGES` images.
            normalize: True to scale vectors to length 1.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `classify`.
        """

        def read(row: Tensors, image: SeenImage) -> EmbeddedImage:
            values = read_vector(row[EMBEDDING], normalize=normalize)
            return EmbeddedImage(values=values, width=image.width, height=image.height)

        return await self._answer(images, (EMBEDDING,), read, deadline)

    async def inspect(
        self, image: bytes | SentImage, *, request: AttentionRequest, deadline: float | None
    ) -> InspectedImage:
        """Computes attention maps over the patches of an image.

        Args:
            image: The encoded image.
            request: Layers, heads and summary of the requested weights.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: As `classify`; the bundle has no attention graph, or the weights exceed the limit.
        """
        with self._inspector.begin(request, deadline) as job:
            with job.preparing():
                data, field = (image.data, image.field) if isinstance(image, SentImage) else (image, "image")
                [prepared] = await self._preprocessor.prepare_batch([data], fields=[field])
            item = {"pixel_values": prepared.pixel_values}
            maps = await job.read(item, field="image", num_tokens=0)
        grid = demanded(self.bundle.manifest.patches)
        return InspectedImage(
            boxes=_boxes_of(grid, prepared),
            grid=grid,
            maps=maps,
            width=prepared.width,
            height=prepared.height,
            timings=job.timings,
        )


def _each_by_itself(num_labels: int) -> ClassificationScheme:
    """Returns the scheme of independent labels, each applied from a probability of one half."""
    return ClassificationScheme(kind="multi_label", thresholds=(0.5,) * num_labels)


def _boxes_of(grid: PatchGrid, image: PreparedImage) -> NDArray[np.float64]:
    """Returns the boxes of an image's tokens, (T, 4)."""
    height, width = image.pixel_values.shape[1:]
    row, column = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
    size = np.array([width / grid.columns, height / grid.rows])
    corners = np.stack([column, row], axis=-1) * size  # (T, 2), upper left
    boxes = np.concatenate([image.transform.to_image(corners), image.transform.to_image(corners + size)], axis=-1)
    return np.concatenate([np.zeros((1, 4)), boxes]) if grid.has_class_token else boxes
