"""Served models of an image's pixels: labels and depth.

C labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from headway_server.batching import Tensors
from headway_server.bundles import Depth, Manifest, demanded
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.tasks.images.model import ImageModel, Images, SeenImage
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.pixels.maps import ClassMap, depth_png, enlarge_depth
from headway_server.tasks.stateless import StatelessParts

DEPTH: Final = "depth"
"""Output of a depth estimation model."""
MAX_PIXELS: Final = 2**27
"""Maximum pixels of a call's images, since each has an element of a map."""
_MAX_RUN_BYTES: Final = 2**26
"""Maximum bytes of a batch's maps, unless one image has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLabel:
    """A label of an image's pixels."""

    label: str
    index: int
    """Number of the label among the model's."""
    share: float
    """Share of the pixels."""
    score: float
    """`ClassMap.scores`, or `ProbabilityMaps.scores`."""
    probability_map: bytes = b""
    """`ProbabilityMaps.pngs`, of a label of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedPixels:
    """Labels of one image's pixels."""

    class_map: bytes
    """`ClassMap.png`."""
    labels: Sequence[FoundLabel]
    """The most frequent first."""
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedDepth:
    """Depth of one image's pixels."""

    png: bytes
    """Grey, of 16 bits a pixel, from minimum to maximum."""
    minimum: float
    maximum: float
    width: int
    height: int


class PixelModel(ImageModel):
    """Model of pixels. The cache has finished maps, as files: logits of cells take a hundred times as much."""

    _memory_noun = "maps"
    _bytes_per_pixel: ClassVar[int]
    """Memory of an answer while it is made."""

    @classmethod
    def _batch_images(cls, manifest: Manifest, parts: StatelessParts, preprocessor: ImagePreprocessor) -> int:
        most = super()._batch_images(manifest, parts, preprocessor)
        [output] = parts.graph.session.graph.outputs
        cells = zip(output.shape[-2:], demanded(manifest.image_preprocessing).largest, strict=True)
        sides = (axis if isinstance(axis, int) else side for axis, side in cells)  # at most those of the image
        num_values = math.prod(sides) * max(1, len(manifest.labels))
        return max(1, min(most, _MAX_RUN_BYTES // (4 * num_values)))

    def _reserve_answers(self, images: Sequence[SeenImage]) -> AbstractContextManager[object]:
        num_pixels = sum(image.width * image.height for image in images)
        if num_pixels > MAX_PIXELS:
            raise InvalidInputError(
                "images",
                f"have {num_pixels} pixels together, the limit is {MAX_PIXELS}; send them in several calls, or smaller "
                "ones",
            )
        return self._memory.admit(len(images), num_pixels * self._bytes_per_pixel, caller=current_caller())


class PixelClassifier(PixelModel):
    """Labels the pixels of images."""

    _bytes_per_pixel = 3  # labels of at most 16 bits, and their file

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        return {LOGITS: (len(manifest.labels), -1, -1)}

    async def classify(
        self, images: Images, labels: Sequence[str] = (), *, deadline: float | None
    ) -> Answer[ClassifiedPixels]:
        """Labels pixels.

        Args:
            images: 1 to `MAX_IMAGES` images.
            labels: None; they are for models without labels of their own.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: There are labels, the images cannot be read or have too many pixels, the queue is full, the
                deadline passed, the server is draining.
        """
        if labels:
            raise InvalidInputError(
                "labels",
                f"is given, and {self.bundle.manifest.name} has {len(self.labels)} labels of its own, all of which are "
                "looked for; leave it out",
            )
        return await self._answer(images, (LOGITS,), self._read, deadline)

    def _reduce(self, row: Tensors, image: SeenImage) -> Tensors:
        is_score = demanded(self.bundle.manifest.semantic_segmentation).scores == "sum"
        found = ClassMap.of(row[LOGITS], (image.width, image.height), is_score=is_score)
        order = np.argsort(-found.counts, kind="stable")[: np.count_nonzero(found.counts)]
        return {
            "png": np.frombuffer(found.png(), np.uint8),
            "labels": order,
            "counts": found.counts[order],
            "scores": found.scores[order],
        }

    def _read(self, row: Tensors, image: SeenImage) -> ClassifiedPixels:
        num_pixels = image.width * image.height
        rows = zip(row["labels"].tolist(), row["counts"].tolist(), row["scores"].tolist(), strict=True)
        return ClassifiedPixels(
            class_map=row["png"].tobytes(),
            labels=[
                FoundLabel(label=self.labels[index], index=index, share=count / num_pixels, score=score)
                for index, count, score in rows
            ],
            width=image.width,
            height=image.height,
        )


class DepthEstimator(PixelModel):
    """Estimates the depth of pixels."""

    _bytes_per_pixel = 8  # float32, 16 bits, and their file

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG003
        return {DEPTH: (-1, -1)}

    @property
    def depth(self) -> Depth:
        """Meaning of the values."""
        return demanded(self.bundle.manifest.depth)

    async def estimate(self, images: Images, *, deadline: float | None) -> Answer[EstimatedDepth]:
        """Estimates depth; arguments and errors are those of `PixelClassifier.classify`."""
        return await self._answer(images, (DEPTH,), _read_depth, deadline)

    def _reduce(self, row: Tensors, image: SeenImage) -> Tensors:
        png, least, most = depth_png(enlarge_depth(row[DEPTH], (image.width, image.height)))
        return {"png": np.frombuffer(png, np.uint8), "bounds": np.array([least, most], np.float32)}


def _read_depth(row: Tensors, image: SeenImage) -> EstimatedDepth:
    least, most = row["bounds"].tolist()
    return EstimatedDepth(png=row["png"].tobytes(), minimum=least, maximum=most, width=image.width, height=image.height)
