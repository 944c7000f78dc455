"""Images that a model without state reads.

N examples, C labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.inputs import NUM_CALIBRATED, Draw, apart, evenly, image_items, image_positions
from headway_export.parity import BATCH_SIZES, SEED, Comparison, sample_images
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource, read_images
from headway_export.tasks.stateless import Embedding, Stateless
from headway_export.tasks.task import Metric
from headway_export.tracing import Traceable
from headway_server.batching import Tensors
from headway_server.bundles import ImagePreprocessing, Limits, TensorSpec, demanded
from headway_training.checkpoint import Checkpoint

_SHARES: Final = ((1.0, 1.0), (0.5, 0.75), (0.5, 0.25))
"""Height and width of compared images where a model reads many sizes, as shares of the usual ones."""


def size_of(image: ImagePreprocessing, of_height: float, of_width: float) -> tuple[int, int]:
    """Returns height and width of an image, as shares of the usual ones; the usual ones if all have one size."""
    if not image.keeps_proportions:
        return image.height, image.width
    whole = 1.0 if image.resize != "multiple" else 0.5  # which states no size but the largest
    height, width = (
        max(1, int(whole * share * side / image.multiple)) * image.multiple
        for share, side in ((of_height, image.height), (of_width, image.width))
    )
    return height, width


class ImageTask(Stateless):
    """A model of images."""

    inspection = "inspect-image FILE"
    num_items = (128, 512)

    def limits(self, module: nn.Module) -> Limits:
        """None: the preprocessing says how large an image is."""
        return Limits()

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads images and their labels."""
        with np.load(file) as arrays:
            return {"images": arrays["images"], "labels": arrays["labels"]}

    def attention_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Pixels."""
        return [asked.pixels]

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of images."""
        graph = candidate.open_stateless()
        for items in self.attention_items(candidate):
            for item, found in zip(items, run_batch(graph, items), strict=True):
                comparison.add_outputs(found, f"batch {len(items)}", partial(reference.outputs, item["pixel_values"]))
            comparison.num_shapes += 1

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields images, of several sizes if the model reads many."""
        source = candidate.source
        if (image := demanded(source.image_preprocessing)).keeps_proportions:
            random = np.random.default_rng(SEED)
            for batch_size, shares in zip(BATCH_SIZES, _SHARES, strict=True):
                drawn = random.integers(0, 256, (batch_size, *size_of(image, *shares), 3)).astype(np.uint8)
                yield [{"pixel_values": pixels} for pixels in pixel_values_of(source, drawn)]
            return
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        for batch_size in BATCH_SIZES:
            yield [{"pixel_values": image} for image in images[:batch_size]]

    def items(self, source: ExportSource, data: EvaluationData) -> Sequence[Tensors]:
        """Makes them of images."""
        return image_items(source, data.images)

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns images that are given or drawn."""
        source, count = draw.source, self.num_inputs(draw.source)
        if source.images is not None:
            return apart(list(image_items(source, evenly(source.images, count))))
        items = draw.pixels(count + NUM_CALIBRATED)
        return items[:count], items[count:]

    def positions(self, source: ExportSource) -> float:
        """Patches."""
        return image_positions(source)

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


class ImageEmbedding(Embedding, ImageTask):
    """Vectors of images."""

    def parts_of_checkpoint(self, path: Path, module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
        """Takes images of the evaluation data to judge by how near their vectors stay."""
        evaluation = checkpoint.evaluation
        return {} if evaluation is None else {"images": read_images(path), "texts_name": evaluation.dataset}
