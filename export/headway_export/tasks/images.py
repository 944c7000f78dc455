"""Images that a model without state reads.

N examples, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headway_export.agreement import Kind
from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.inputs import (
    NUM_CALIBRATED,
    NUM_VECTORS,
    Draw,
    Inputs,
    affordable,
    apart,
    image_items,
    image_positions,
    places,
)
from headway_export.parity import BATCH_SIZES, Comparison, sample_images
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.stateless import Stateless
from headway_export.tasks.task import Metric
from headway_server.batching import Tensors


class ImageTask(Stateless):
    """A model of images."""

    num_items: ClassVar[tuple[int, int]] = (128, 512)
    """The least and the most inputs that judge."""

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of images."""
        source, graph = candidate.source, candidate.open_stateless()
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        for batch_size in BATCH_SIZES:
            items = [{"pixel_values": image} for image in images[:batch_size]]
            for image, found in zip(images, run_batch(graph, items), strict=False):
                comparison.add_outputs(found, reference.outputs(image), f"batch {batch_size}")
            comparison.num_shapes += 1

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields images."""
        source = candidate.source
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        for batch_size in BATCH_SIZES:
            yield [{"pixel_values": image} for image in images[:batch_size]]

    def inputs_of(
        self,
        source: ExportSource,
        data: EvaluationData,
        most: int | None,
        candidate: Candidate | None,  # noqa: ARG002
    ) -> Inputs:
        """Returns images."""
        rows = data.take(places(len(data), most or self._num_images(source)))
        return Inputs(dataset=data.dataset, items=image_items(source, rows.images))

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns images that are given or drawn."""
        source, count = draw.source, self._num_images(draw.source)
        if source.images is not None:
            return apart(list(image_items(source, source.images[places(len(source.images), count)])))
        items = draw.pixels(count + NUM_CALIBRATED)
        return items[:count], items[count:]

    def _num_images(self, source: ExportSource) -> int:
        return affordable(source, image_positions(source), *self.num_items)

    def num_positions(self, length: int) -> int:
        """Returns the patches of a square image."""
        return max(1, length * length // 256)

    def logits(self, candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
        """Logits of the examples, (N, C)."""
        source, graph = candidate.source, candidate.open_stateless()
        logits = np.empty((len(data), len(source.labels)), np.float32)
        for start in range(0, len(data), NUM_ROWS):
            batch = slice(start, start + NUM_ROWS)
            images = pixel_values_of(source, data.images[batch])
            logits[batch] = [found["logits"] for found in run_batch(graph, [{"pixel_values": i} for i in images])]
        return logits


class ImageClassification(ImageTask):
    """Labels of images."""

    metrics = (Metric(name="accuracy", allowed_loss=0.5),)


class ImageEmbedding(ImageTask):
    """Vectors of images."""

    recorded = "embedding"
    num_items = NUM_VECTORS

    def kind(self, source: ExportSource) -> Kind:  # noqa: ARG002
        """A vector."""
        return "vector"
