"""Masks of what prompts point at in images.

M masks of a prompt, S side of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.agreement import Rows
from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.graphs import Outputs, StatelessGraph, float_dtype
from headway_export.inputs import NUM_MASKED, Inputs
from headway_export.parity import BATCH_SIZES, SEED, Comparison, sample_images
from headway_export.quality import Quality, figure_of
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource, Segments
from headway_export.tasks.images import ImageTask
from headway_export.tasks.task import NOT_LOOKED_AT, Metric
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import Limits, Manifest, Segmentation, demanded
from headway_server.preprocessing.image import ImageTransform
from headway_server.tasks.images.model import SeenImage
from headway_server.tasks.segmentation.decoder import (
    BOTTOM_RIGHT,
    INSIDE,
    MASKS,
    MAX_POINTS,
    MAX_PROMPTS,
    PADDING,
    PREDICTED_IOU,
    TOP_LEFT,
    PromptGraph,
    PromptKind,
    answer_order,
    as_item,
)
from headway_server.tasks.segmentation.model import Frame
from headway_training.models.protocols import PromptSegmenter

_MOST_PIXELS: Final = 1 << 20
"""Of images that are embedded together for a proof, more than one."""


class PromptedSegmentation(ImageTask):
    """An encoder of images and a decoder of prompts."""

    metrics = (Metric(name="first_mask_iou", allowed_loss=0.5),)
    protocols = (PromptSegmenter,)
    recorded = MASKS
    own_kind = "mask"
    names_columns = False
    takes_fixed_scales = False
    is_evaluated_served = False
    num_items = NUM_MASKED
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False

    def limits(self, module: nn.Module) -> Limits:
        """None; a module says what its masks are."""
        segmenter = cast("PromptSegmenter", module)
        _ = segmenter.encoder, segmenter.decoder, int(segmenter.mask_size)
        return Limits()

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how prompts are answered."""
        return {"segmentation": source.segmentation}

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads images and the segments in them."""
        with np.load(file) as arrays:
            segments = Segments(**{name: arrays[name] for name in ("image_index", "points", "boxes", "masks")})
            return {"images": arrays["images"], "segments": segments}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how fine masks are, and how much a call may ask."""
        _, _, cells, _ = next(iter(manifest.variants.values())).graphs["decoder"].outputs[0].shape
        most = f"{MAX_PROMPTS} prompts about an image, and a prompt {MAX_POINTS} points"
        return [
            f"Masks are found in {cells} x {cells} cells, and brought to the image's pixels between them.",
            f"A call has at most {most}.",
        ]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces images to embeddings, and prompts about embedded images to masks."""
        module, segmenter = asked.module, cast("PromptSegmenter", asked.module)
        encoder_module, decoder_module = cast("nn.Module", segmenter.encoder), cast("nn.Module", segmenter.decoder)
        encoder = trace_graph("encoder", module, StatelessGraph(encoder_module), [asked.pixels])
        shapes = {spec.name: spec.shape[1:] for spec in encoder.outputs}
        cells = segmenter.mask_size
        prompts = [
            *(make_spec(name, "float32", "prompts", *shape) for name, shape in shapes.items()),
            make_spec("points", "float32", "prompts", "points", 2),
            make_spec("point_labels", "int64", "prompts", "points"),
            make_spec("earlier_mask", "float32", "prompts", cells, cells),
            make_spec("has_earlier_mask", "int64", "prompts"),
        ]
        decoder = trace_graph("decoder", module, PromptDecoderGraph(decoder_module, tuple(shapes)), prompts)
        return TracedModel(graphs=(encoder, decoder))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds embeddings against PyTorch's, and masks of drawn prompts: their images, kinds and numbers of points."""
        source, (encoder, decoder) = candidate.source, open_segmenter(candidate)
        most = max(2, _MOST_PIXELS // prod(demanded(source.image_preprocessing).largest))
        images = pixel_values_of(source, sample_images(source, min(max(BATCH_SIZES), most)))
        random, side = np.random.default_rng(SEED), decoder.mask_size
        for num_images in sorted({min(size, most) for size in BATCH_SIZES}):
            embeddings = embed_images(encoder, images[:num_images])
            items = []
            for number in range(2 * num_images + 1):
                points = random.random((random.integers(1, 7), 2), np.float32)
                labels = random.integers(PADDING, BOTTOM_RIGHT + 1, len(points))
                earlier = random.normal(size=(side, side)).astype(np.float32) if number % 2 else None
                items.append(as_item(embeddings[random.integers(num_images)], points, labels, earlier))
            where = f"{num_images} images, {len(items)} prompts"
            for pixels, embedding in zip(images, embeddings, strict=False):
                flat = {name: one.ravel() for name, one in embedding.items()}
                comparison.add_outputs(flat, where, partial(_flat_embedding, reference, pixels))
            for item, found in zip(items, answer_prompts(decoder, items), strict=True):
                masks = found[MASKS].reshape(len(found[PREDICTED_IOU]), -1)
                answer = partial(reference.prompt_outputs, item)
                comparison.add_outputs({MASKS: masks, PREDICTED_IOU: found[PREDICTED_IOU]}, where, answer)
            comparison.num_shapes += 1

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what the model gives for one place of each image: logits of M masks, and their predicted IoU.

        In one row, (1, M S S + M).
        """
        encoder, decoder = open_segmenter(candidate)
        random = np.random.default_rng(SEED)
        for number, item in enumerate(inputs.items):
            [embedding] = embed_images(encoder, item["pixel_values"][np.newaxis])
            prompt = as_item(embedding, random.random((1, 2), np.float32), np.array([INSIDE]))
            [found] = answer_prompts(decoder, [prompt])
            row = np.concatenate([found[MASKS].ravel(), found[PREDICTED_IOU].ravel()]).astype(np.float32)
            yield Rows(row[np.newaxis], np.zeros(1, np.int64), number)

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Mean IoU in percent of the mask that an answer has first, of all segments at a point and at a box."""
        source, (encoder, decoder) = candidate.source, open_segmenter(candidate)
        segments = data.segments
        assert segments is not None, "the source has read them"
        height, width = data.images.shape[1:3]
        seen = SeenImage(width, height, ImageTransform(scale=(1.0, 1.0), offset=(0.0, 0.0)))
        frame = Frame(seen, (width, height), decoder.mask_size, source.segmentation or Segmentation())
        found: dict[str, list[float]] = {}
        for start in range(0, len(data), NUM_ROWS):
            images = embed_images(encoder, pixel_values_of(source, data.images[start : start + NUM_ROWS]))
            rows = np.flatnonzero((segments.image_index >= start) & (segments.image_index < start + len(images)))
            kinds: tuple[PromptKind, ...] = ("point", "box")
            for kind in kinds:
                items = []
                for row in rows:
                    is_point = kind == "point"
                    points = segments.points[row].reshape(1, 2) if is_point else segments.boxes[row].reshape(2, 2)
                    labels = np.array([INSIDE] if is_point else [TOP_LEFT, BOTTOM_RIGHT])
                    items.append(as_item(images[segments.image_index[row] - start], points, labels))
                answers: list[dict[str, NDArray[np.float32]]] = []
                for begin in range(0, len(items), NUM_ROWS):
                    answers += answer_prompts(decoder, items[begin : begin + NUM_ROWS])
                for row, answer in zip(rows, answers, strict=True):
                    truth = segments.mask(int(row), height, width)
                    ious = []
                    order = answer_order(answer[MASKS], answer[PREDICTED_IOU], kind, frame.scheme.stable_mask)
                    for number in order:
                        pixels = frame.pixels(answer[MASKS][number]).pixels()
                        ious.append(100 * float((pixels & truth).sum() / max(1, (pixels | truth).sum())))
                    found.setdefault(kind, []).append(ious[0])
                    found.setdefault(f"{kind}, best", []).append(max(ious))
        means = {name: float(np.mean(values)) for name, values in found.items()}
        sizes = np.array([segments.mask(row, height, width).mean() for row in range(len(segments.masks))])
        both = np.mean([found["point"], found["box"]], axis=0)
        by_size = [
            f"{name} {both[of].mean():.1f} ({of.sum():,})"
            for name, of in (
                ("less than 1 % of the image", sizes < 0.01),
                ("1 to 10 %", (sizes >= 0.01) & (sizes < 0.1)),
                ("more", sizes >= 0.1),
            )
            if of.any()
        ]
        return Quality(
            figure=figure_of(data, (means["point"] + means["box"]) / 2),
            weak_points=(
                f"Mean IoU in percent of the mask it is surest of: {means['point']:.1f} at a point, {means['box']:.1f} "
                f"at a box; of the best of its three: {means['point, best']:.1f} and {means['box, best']:.1f}.",
                f"The same by the segment's size, and how many there are: {', '.join(by_size)}.",
            ),
        )


def _flat_embedding(reference: Reference, pixel_values: NDArray[np.float32]) -> Tensors:
    return {name: tensor.ravel() for name, tensor in reference.image_embedding(pixel_values).items()}


def open_segmenter(candidate: Candidate) -> tuple[BatchGraph, PromptGraph]:
    """Opens encoder and decoder."""
    encoder, decoder = (
        candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]) for role in ("encoder", "decoder")
    )
    return BatchGraph(encoder), PromptGraph(decoder)


def answer_prompts(graph: PromptGraph, items: Sequence[Tensors]) -> list[dict[str, NDArray[Any]]]:
    """Runs prompts of any images in one batch and returns the outputs of each, as a server does."""
    return graph.split(graph.run(graph.collate(items), [MASKS, PREDICTED_IOU]), items)


def embed_images(graph: BatchGraph, pixel_values: NDArray[np.float32]) -> list[dict[str, NDArray[Any]]]:
    """Embeds images for a mask decoder: (N, 3, height, width) -> the tensors of each, by their names."""
    return run_batch(graph, [{"pixel_values": pixels} for pixels in pixel_values])


# Graphs


class PromptDecoderGraph(nn.Module):
    """Graph `decoder` of a segmentation model: prompts, each with the embedding of its image."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *inputs: Tensor) -> Outputs:
        """The tensors of an embedding of each prompt, and the inputs of `MaskDecoder` in turn -> its outputs."""
        dtype, count = float_dtype(self.module), len(self.names)
        points, point_labels, earlier_mask, has_earlier_mask = inputs[count:]
        outputs: Outputs = self.module(
            **{name: one.to(dtype) for name, one in zip(self.names, inputs[:count], strict=True)},
            points=points,
            point_labels=point_labels,
            earlier_mask=earlier_mask.to(dtype),
            has_earlier_mask=has_earlier_mask,
        )
        return outputs
