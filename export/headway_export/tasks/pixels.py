"""Labels and depth of images' pixels.

B images, C labels, R, S rows and columns of cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export import synthetic
from headway_export.agreement import Rows
from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import StatelessGraph
from headway_export.inputs import NUM_MASKED, Draw, Inputs, image_items, places
from headway_export.parity import Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.detection import compare_labels, encoder_of, judged_labels
from headway_export.tasks.images import ImageTask, size_of
from headway_export.tasks.task import NOT_LOOKED_AT
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph
from headway_server.bundles import Limits, Manifest, demanded
from headway_server.tasks.outputs import EMBEDDING, LOGITS, log_softmax
from headway_server.tasks.pixels.model import DEPTH
from headway_server.tasks.pixels.zero_shot import FEATURES, MAX_LABELS

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

    def limits(self, module: nn.Module) -> Limits:
        """Reads that of labels, where they are texts of the caller."""
        return Limits(max_input_tokens=getattr(module, "max_length", None))

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how labels of the caller are limited."""
        if demanded(manifest.semantic_segmentation).labels == "fixed":
            return []
        length = demanded(manifest.limits.max_input_tokens)
        return [
            f"It has no labels of its own: a call gives 1 to {MAX_LABELS} texts of what to look for, each of at most "
            f"{length} tokens."
        ]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces images to maps; or images, labels, and both to maps where labels are texts of the caller."""
        traced, module = super().trace(asked), asked.module
        encoder = encoder_of(module)
        if encoder is None:
            return traced
        texts = [make_spec(name, "int64", "batch", "length") for name in ("input_ids", "attention_mask")]
        embedded = trace_graph("text_encoder", module, StatelessGraph(encoder), texts)
        [features], [embedding] = traced.graphs[0].outputs, embedded.outputs
        decoder = trace_graph("decoder", module, StatelessGraph(cast("Any", module).decoder), [features, embedding])
        return TracedModel(graphs=(*traced.graphs, embedded, decoder))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares maps of images, or features, labels' embeddings and maps of these."""
        encoder = encoder_of(reference.module)
        if encoder is None:
            super().compare(candidate, reference, comparison)
            return
        ImageTask.compare(self, candidate, reference, comparison)
        compare_labels(candidate, reference, StatelessGraph(encoder), comparison)
        decoder = StatelessGraph(cast("Any", reference.module).decoder)
        graph, embeddings = open_decoder(candidate), judged_labels(candidate)
        for items in self.attention_items(candidate):
            pairs = [
                {FEATURES: reference.outputs(item["pixel_values"])[FEATURES], EMBEDDING: embedding}
                for item, embedding in zip(items, embeddings, strict=False)
            ]
            for pair, found in zip(pairs, run_batch(graph, pairs), strict=True):
                answer = partial(reference.row_outputs, "decoder", decoder, pair)
                comparison.add_outputs(found, f"batch {len(pairs)} of images and labels", answer)
            comparison.num_shapes += 1

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what the model gives for each image."""
        if demanded(candidate.source.semantic_segmentation).labels == "fixed":
            yield from super().answers(candidate, inputs)
            return
        graph, decoder, embeddings = candidate.open_stateless(), open_decoder(candidate), judged_labels(candidate)
        for number, item in enumerate(inputs.items):
            [found] = run_batch(graph, [item])
            pairs = [{FEATURES: found[FEATURES], EMBEDDING: embedding} for embedding in embeddings]
            logits = np.stack([row[LOGITS] for row in run_batch(decoder, pairs)])
            rows = self.judged(candidate.source, self.rows(logits))
            yield Rows(rows, np.zeros(len(rows), np.int64), number)

    def has_softmax(self, source: ExportSource) -> bool:
        """True unless they are sums of probabilities, or each a logit by itself."""
        return demanded(source.semantic_segmentation).scores == "softmax"

    def least_size(self, source: ExportSource) -> float:
        """Of sums 1: a mask's probability of 1e-9 is right if it is below 1e-4, whatever its own size."""
        is_sum = demanded(source.semantic_segmentation).scores == "sum"
        return 1.0 if is_sum else super().least_size(source)

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


def open_decoder(candidate: Candidate) -> BatchGraph:
    """Opens the graph that makes a map of an image and a label."""
    return BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs["decoder"]))
