"""Objects in images.

Q boxes of an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from headway_export.agreement import Rows
from headway_export.candidate import Candidate, pixel_values_of, run_batch
from headway_export.inputs import NUM_MASKED, Draw, Inputs
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.images import ImageTask
from headway_export.tasks.task import NOT_LOOKED_AT
from headway_server.bundles import ImagePreprocessing, Manifest, demanded
from headway_server.tasks.detection.objects import BOXES
from headway_server.tasks.outputs import LOGITS

_SHARES: Final = (0.5, 0.3)
"""Sides of compared images after the first where a model reads many sizes, as shares of the largest."""


class ObjectDetection(ImageTask):
    """Boxes and their labels."""

    own_kind = "objects"
    num_items = NUM_MASKED
    is_read = False
    names_columns = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how outputs become objects."""
        return {"detection": source.detection}

    def image_limits(self, manifest: Manifest) -> list[str]:
        """Says which sizes images become."""
        image = demanded(manifest.image_preprocessing)
        if image.resize != "fit":
            return super().image_limits(manifest)
        shorter, longer = image.largest
        return [
            f"Every image is resized to a shorter side of {shorter} pixels, or to a longer one of {longer} if that is "
            "smaller."
        ]

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how many objects are found."""
        return [f"At most {demanded(manifest.detection).max_objects} objects are found in an image."]

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares boxes and logits of batches of images of several sizes, whatever the order of the boxes."""
        source, graph = candidate.source, candidate.open_stateless()
        image = demanded(source.image_preprocessing)
        random = np.random.default_rng(SEED)
        for batch_size, (height, width) in zip(BATCH_SIZES, _sizes(image), strict=True):
            drawn = random.integers(0, 256, (batch_size, height, width, 3)).astype(np.uint8)
            items = [{"pixel_values": pixels} for pixels in pixel_values_of(source, drawn)]
            for item, found in zip(items, run_batch(graph, items), strict=True):
                answer = partial(reference.outputs, item["pixel_values"])
                where = f"batch {batch_size} of {width} x {height}"
                comparison.add_outputs(_in_order_of(answer(), found), where, answer)
            comparison.num_shapes += 1

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns images that are given or drawn; no scales are taken from them."""
        items = draw.pixels(self.num_inputs(draw.source))
        return items, items

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what the model gives for each image, logits and boxes in one row."""
        graph = candidate.open_stateless()
        for number, item in enumerate(inputs.items):
            [found] = run_batch(graph, [item])
            row = np.concatenate([found[LOGITS].ravel(), found[BOXES].ravel()]).astype(np.float32)
            yield Rows(row[np.newaxis], np.zeros(1, np.int64), number)


def _sizes(image: ImagePreprocessing) -> list[tuple[int, int]]:
    """Returns heights and widths of compared images: those of all, or the largest lying, smaller ones upright."""
    if image.resize != "fit":
        return [image.largest] * len(BATCH_SIZES)
    (shorter, longer), unit = image.largest, image.multiple

    def scaled(side: int, share: float) -> int:
        return max(1, int(share * side / unit)) * unit

    return [(shorter, longer), *((scaled(longer, share), scaled(shorter, share)) for share in _SHARES)]


def _in_order_of(
    expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[np.float32]]:
    """Returns found boxes in the order of the expected ones that they are nearest to.

    A model that chooses its boxes by their scores may exchange two of the same score.
    """
    if any(not np.isfinite(values).all() for values in found.values()):
        return dict(found)
    rows = [np.concatenate([one[LOGITS], one[BOXES]], axis=-1, dtype=np.float64) for one in (expected, found)]
    distances = np.abs(rows[0][:, np.newaxis] - rows[1]).max(axis=-1)  # (Q, Q)
    order = linear_sum_assignment(distances)[1]
    return {name: values[order] for name, values in found.items()}
