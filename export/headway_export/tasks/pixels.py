"""Labels and depth of images' pixels.

B images, C labels, R, S rows and columns of cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from headway_export import synthetic
from headway_export.agreement import Rows
from headway_export.candidate import Candidate, run_batch
from headway_export.inputs import NUM_MASKED, Draw, Inputs, image_items, places
from headway_export.parity import Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.images import ImageTask, size_of
from headway_export.tasks.task import NOT_LOOKED_AT
from headway_server.bundles import Manifest, demanded
from headway_server.tasks.outputs import LOGITS, log_softmax
from headway_server.tasks.pixels.model import DEPTH

_NUM_CELLS: Final = 512
"""Cells of an image that are judged, evenly from all of them."""


class _PixelTask(ImageTask):
    """A map of cells for each image."""

    num_items = NUM_MASKED
    is_read = False
    names_columns = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False
    is_evaluated_served = False
    part: ClassVar[str]
    """Field of the manifest and of the source."""

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says what the outputs are."""
        return {self.part: getattr(source, self.part)}

    def image_limits(self, manifest: Manifest) -> list[str]:
        """Says which sizes images become."""
        image = demanded(manifest.image_preprocessing)
        if image.resize == "nearest_side":
            return [
                f"Every image is resized to a height of {image.height} or a width of {image.width} pixels, whichever "
                f"changes it less, and to multiples of {image.multiple}; it has at most {image.max_pixels} pixels then."
            ]
        if image.resize == "multiple":
            return [
                f"Every image is resized to the multiples of {image.multiple} below its sides, and has at most "
                f"{image.max_pixels} pixels."
            ]
        return super().image_limits(manifest)

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares the cells of batches of images."""
        graph = candidate.open_stateless()
        for items in self.attention_items(candidate):
            for item, found in zip(items, run_batch(graph, items), strict=True):
                pixels = item["pixel_values"]

                def answer(pixels: NDArray[np.float32] = pixels) -> dict[str, NDArray[Any]]:
                    return {name: self.rows(values) for name, values in reference.outputs(pixels).items()}

                where = f"batch {len(items)} of {pixels.shape[2]} x {pixels.shape[1]}"
                comparison.add_outputs({name: self.rows(values) for name, values in found.items()}, where, answer)
            comparison.num_shapes += 1

    @abstractmethod
    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the map of an image as rows that are judged one by one."""

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns images that are given or drawn; no scales are taken from them."""
        source, count = draw.source, self.num_inputs(draw.source)
        if source.images is not None:
            items = draw.pixels(count)
        else:
            size = size_of(demanded(source.image_preprocessing), 1, 1)
            items = list(image_items(source, synthetic.draw_images(count, *size, draw.generator)))
        return items, items

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what the model gives for each image."""
        graph = candidate.open_stateless()
        for number, item in enumerate(inputs.items):
            [found] = run_batch(graph, [item])
            rows = self.judged(candidate.source, self.rows(found[self.recorded]))
            yield Rows(rows, np.zeros(len(rows), np.int64), number)

    @abstractmethod
    def judged(self, source: ExportSource, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the rows that variants are judged by."""


class PixelLabels(_PixelTask):
    """Labels of pixels."""

    own_kind = "pixel"
    part = "semantic_segmentation"
    recorded = LOGITS

    def has_softmax(self, source: ExportSource) -> bool:
        """True unless they are sums of probabilities."""
        return demanded(source.semantic_segmentation).scores == "softmax"

    def least_size(self, source: ExportSource) -> float:
        """Of sums 1: a mask's probability of 1e-9 is right if it is below 1e-4, whatever its own size."""
        return 1.0

    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """(C, R, S) -> (R S, C)."""
        return values.reshape(len(values), -1).T

    def judged(self, source: ExportSource, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Logarithms of probabilities of some cells, or of shares of a sum."""
        some = np.ascontiguousarray(rows[places(len(rows), _NUM_CELLS)], np.float32)
        if demanded(source.semantic_segmentation).scores == "sum":
            some = np.log(np.maximum(some, np.finfo(np.float32).tiny))
        return log_softmax(some)


class PixelDepth(_PixelTask):
    """Depth of pixels."""

    own_kind = "depth"
    part = "depth"
    recorded = DEPTH
    words_of_error = "depth error"

    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """(R, S) -> (1, R S)."""
        return values.reshape(1, -1)

    def judged(self, source: ExportSource, rows: NDArray[Any]) -> NDArray[np.float32]:
        """Depth of all cells."""
        return rows.astype(np.float32)
