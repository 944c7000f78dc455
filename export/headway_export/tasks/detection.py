"""Objects in images: of labels of the model's own, or of texts of the caller.

Q boxes of an image, C labels, D width of a label's embedding, P true objects of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headway_export.agreement import Rows
from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.differences import nearest_rows, relative_errors
from headway_export.graphs import StatelessGraph
from headway_export.inputs import NUM_MASKED, Draw, Inputs
from headway_export.parity import BATCH_SIZES, SEED, Comparison, batches, sample_tokens
from headway_export.quality import Quality, figure_of
from headway_export.reference import Reference
from headway_export.rounding import FACTOR, LARGEST, rounded_answers
from headway_export.source import EvaluationData, ExportSource, TrueObjects
from headway_export.tasks.images import ImageTask
from headway_export.tasks.task import NOT_LOOKED_AT, Metric
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import Tensors
from headway_server.bundles import Detection, ImagePreprocessing, Limits, Manifest, demanded
from headway_server.tasks.detection.model import MAX_LABELS
from headway_server.tasks.detection.objects import (
    BOXES,
    FEATURES,
    LABEL_QUERIES,
    LOGIT_OFFSETS,
    MAP_SIZES,
    TOKEN_LOGITS,
    Objects,
    join_labels,
    label_logits,
)
from headway_server.tasks.outputs import EMBEDDING, LOGITS
from headway_server.tasks.text.model import text_graph, text_tensors
from headway_training.checkpoint import Checkpoint
from headway_training.metrics import FoundObjects, mean_average_precision
from headway_training.tasks.detection import MOST_OBJECTS, OVERLAP

JUDGED_LABELS: Final = ("a person", "a cat", "a red car", "a tree", "a house", "a cup", "a book", "a photo of a dog")
"""Labels that variants of a model without labels of its own are judged by."""
_OWN_THRESHOLD: Final = 0.35
"""Of the kit's detectors: where precision and recall of the recipe `detect` are equal, 82 and 83 %."""
_NUM_HARDEST: Final = 5
_TRACED_MAP: Final = 48
"""Rows and columns of the finest map of features that a graph is traced at; each further map has half as many."""
_MOST_EXCHANGED: Final = 0.05
"""Share of the boxes of an image that rounding may exchange for others."""
_SHARES: Final = (0.5, 0.3)
"""Sides of compared images after the first where a model reads many sizes, as shares of the largest."""


class ObjectDetection(ImageTask):
    """Boxes and their labels."""

    metrics = (Metric(name="mean_average_precision", allowed_loss=0.5),)
    own_kind = "objects"
    num_items = NUM_MASKED
    is_of_the_kit = True
    is_evaluated_served = False
    names_columns = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False

    def limits(self, module: nn.Module) -> Limits:
        """Reads that of labels, where they are texts of the caller."""
        return Limits(max_input_tokens=getattr(module, "max_length", None))

    def parts_of_checkpoint(self, path: Path, module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
        """Reads evaluation data, and says how the kit's detectors are read."""
        detection = Detection(
            scores="sigmoid",
            num_queries=cast("Any", module).configuration.num_cells,
            max_objects=MOST_OBJECTS,
            threshold=_OWN_THRESHOLD,
            nms_threshold=OVERLAP,
        )
        return super().parts_of_checkpoint(path, module, checkpoint) | {"detection": detection}

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads images and the objects in them."""
        with np.load(file) as arrays:
            objects = TrueObjects(**{name: arrays[name] for name in ("image_index", "boxes", "labels")})
            return {"images": arrays["images"], "objects": objects}

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces images to boxes, and labels to embeddings; or images to features, and these with labels to boxes."""
        if _is_joined(asked.module):
            return _trace_joined(asked)
        encoder = encoder_of(asked.module)
        traced = super().trace(asked)
        if encoder is None:
            return traced
        inputs = [make_spec(name, "int64", "batch", "length") for name in ("input_ids", "attention_mask")]
        graph = trace_graph("text_encoder", asked.module, StatelessGraph(encoder), inputs)
        return TracedModel(graphs=(*traced.graphs, graph))

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
        """Says how many objects are found, and of which labels."""
        detection = demanded(manifest.detection)
        limits = [f"At most {detection.max_objects} objects are found in an image."]
        if detection.labels != "fixed":
            length = demanded(manifest.limits.max_input_tokens)
            limits.append(
                f"It has no labels of its own: a call gives 1 to {MAX_LABELS} texts of what to look for, each of at "
                f"most {length} tokens."
            )
        return limits

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
                add_objects(comparison, found, where, answer)
            comparison.num_shapes += 1
        if _is_joined(reference.module):
            _compare_joined(candidate, reference, comparison)
        elif (encoder := encoder_of(reference.module)) is not None:
            compare_labels(candidate, reference, StatelessGraph(encoder), comparison)

    def output_of(self, source: ExportSource) -> str:
        """Returns the output that scores are made of."""
        return {"fixed": LOGITS, "embedded": LABEL_QUERIES, "joined": TOKEN_LOGITS}[demanded(source.detection).labels]

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns images that are given or drawn; no scales are taken from them."""
        items = draw.pixels(self.num_inputs(draw.source))
        return items, items

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what the model gives for each image, logits and boxes in one row."""
        graph, source = candidate.open_stateless(), candidate.source
        if demanded(source.detection).labels == "joined":
            yield from _joined_answers(candidate, inputs)
            return
        labels = None
        if source.tokenizer is not None:
            labels = judged_labels(candidate)
        for number, item in enumerate(inputs.items):
            [found] = run_batch(graph, [item])
            row = np.concatenate([_logits_of(found, labels).ravel(), found[BOXES].ravel()]).astype(np.float32)
            yield Rows(row[np.newaxis], np.zeros(1, np.int64), number)

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Mean average precision in percent, at an intersection over union of one half, of objects of any score."""
        graph, source = candidate.open_stateless(), candidate.source
        scheme, truth = source.detection, data.objects
        assert scheme is not None, "a detector has it"
        assert truth is not None, "the source has read them"
        found: list[FoundObjects] = []
        for start in range(0, len(data), NUM_ROWS):
            pixels = pixel_values_of(source, data.images[start : start + NUM_ROWS])
            for row in run_batch(graph, [{"pixel_values": one} for one in pixels]):
                objects = Objects.of(
                    row[LOGITS], row[BOXES], scheme, threshold=0.0, size=(1, 1), nms_threshold=scheme.nms_threshold
                )
                found.append(FoundObjects(scores=objects.scores, labels=objects.labels, boxes=objects.boxes))
        of_images = [truth.image_index == image for image in range(len(data))]
        right = [(truth.boxes[rows], truth.labels[rows]) for rows in of_images]
        by_label = {
            name: mean_average_precision(
                found, [(boxes[labels == one], labels[labels == one]) for boxes, labels in right]
            )
            for one, name in enumerate(source.labels)
            if (truth.labels == one).any()
        }
        hardest = sorted(by_label, key=by_label.__getitem__)[:_NUM_HARDEST]
        return Quality(
            figure=figure_of(data, mean_average_precision(found, right)),
            weak_points=(
                "Lowest average precision: " + ", ".join(f"{name} {by_label[name]:.1f}" for name in hardest) + ".",
            ),
        )


def encoder_of(module: nn.Module) -> nn.Module | None:
    """Returns the part of a detector that embeds labels; None of one with labels of its own."""
    encoder: nn.Module | None = getattr(module, "text_encoder", None)
    return encoder


# Labels that are read together with an image


def _is_joined(module: nn.Module) -> bool:
    return hasattr(module, "decoder")


def _trace_joined(asked: Traceable) -> TracedModel:
    """Traces images to features, and these with a text of labels to boxes."""
    module = cast("Any", asked.module)
    sides = [_TRACED_MAP // 2**level for level in range(module.num_maps)]
    of_image = [
        make_spec(FEATURES, "float32", "batch", "places", module.width),
        make_spec(MAP_SIZES, "int64", "batch", module.num_maps, 2),
    ]
    graph = trace_graph("model", asked.module, StatelessGraph(asked.served), [asked.pixels], outputs=of_image)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    example = (
        torch.zeros(2, sum(side * side for side in sides), module.width),
        torch.tensor(sides)[:, None].expand(2, -1, 2),
        *(ids, torch.ones_like(ids)),
    )
    decoder = trace_graph(
        "decoder",
        asked.module,
        StatelessGraph(module.decoder),
        [*of_image, *(make_spec(name, "int64", "batch", "length") for name in ("input_ids", "attention_mask"))],
        outputs=[
            make_spec(TOKEN_LOGITS, "float32", "batch", module.num_queries, "length"),
            make_spec(BOXES, "float32", "batch", module.num_queries, 4),
        ],
        example=example,
    )
    return TracedModel(graphs=(graph, decoder))


def _read_joined(source: ExportSource, labels: Sequence[str]) -> tuple[Tensors, list[int]]:
    """Returns the text of labels, and the tokens of each."""
    tokens = source.encode([label.lower() for label in labels], frame=False)
    return text_tensors(join_labels(tokens, demanded(demanded(source.detection).prompt))), list(map(len, tokens))


def _open_joined(candidate: Candidate) -> Any:
    """Opens the graph that reads features of an image and labels."""
    session = candidate.runtime.open(candidate.bundle, candidate.variant.graphs["decoder"])
    return text_graph(session, candidate.source.special_tokens)


def _compare_joined(candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
    """Compares tokens' logits and boxes of batches of images of several sizes, with few and many labels together."""
    source, graph = candidate.source, _open_joined(candidate)
    decoder = StatelessGraph(cast("Any", reference.module).decoder)
    random = np.random.default_rng(SEED)
    for batch_size, (height, width) in zip(BATCH_SIZES, _sizes(demanded(source.image_preprocessing)), strict=True):
        drawn = random.integers(0, 256, (batch_size, height, width, 3)).astype(np.uint8)
        items = [
            {**reference.outputs(pixels), **_read_joined(source, JUDGED_LABELS[: 1 + number])[0]}
            for number, pixels in enumerate(pixel_values_of(source, drawn))
        ]
        for item, found in zip(items, run_batch(graph, items), strict=True):
            answer = partial(reference.row_outputs, "decoder", decoder, item)
            add_objects(comparison, found, f"batch {batch_size} of {width} x {height} and labels", answer)
        comparison.num_shapes += 1


def _joined_answers(candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
    """Yields logits of common labels and boxes of each image, in one row."""
    graph, decoder = candidate.open_stateless(), _open_joined(candidate)
    text, lengths = _read_joined(candidate.source, JUDGED_LABELS)
    for number, item in enumerate(inputs.items):
        [features] = run_batch(graph, [item])
        [found] = run_batch(decoder, [{**features, **text}])
        logits = label_logits(found[TOKEN_LOGITS], lengths)
        row = np.concatenate([logits.ravel(), found[BOXES].ravel()]).astype(np.float32)
        yield Rows(row[np.newaxis], np.zeros(1, np.int64), number)


# Labels that are embedded


def open_encoder(candidate: Candidate) -> Any:
    """Opens the graph that embeds labels."""
    session = candidate.runtime.open(candidate.bundle, candidate.variant.graphs["text_encoder"])
    return text_graph(session, candidate.source.special_tokens)


def judged_labels(candidate: Candidate) -> NDArray[np.float32]:
    """Returns the embeddings of common labels, (C, D)."""
    ids = candidate.source.encode(JUDGED_LABELS, candidate.source.limits.max_input_tokens)
    return np.stack([row[EMBEDDING] for row in run_batch(open_encoder(candidate), list(map(text_tensors, ids)))])


def compare_labels(candidate: Candidate, reference: Reference, exact: nn.Module, comparison: Comparison) -> None:
    """Compares batches of labels, long and short together."""
    source, graph = candidate.source, open_encoder(candidate)
    limit = demanded(source.limits.max_input_tokens)
    assert source.tokenizer is not None, "labels have their tokenizer"
    texts = sample_tokens(source, source.tokenizer.get_vocab_size(), limit, frame=True)
    for lengths in batches(limit):
        items = [text_tensors(texts[row % len(texts)][:length]) for row, length in enumerate(lengths)]
        for item, found in zip(items, run_batch(graph, items), strict=True):
            answer = partial(reference.row_outputs, "text_encoder", exact, item)
            comparison.add_outputs(found, f"batch {len(items)} of labels", answer)
        comparison.num_shapes += 1


def _logits_of(found: Tensors, labels: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Returns the logits of an image's boxes, (Q, C), of the model's labels or of embedded ones, (C, D)."""
    if labels is None:
        logits: NDArray[np.float32] = found[LOGITS]
        return logits
    products: NDArray[np.float32] = found[LABEL_QUERIES] @ labels.T + found[LOGIT_OFFSETS][:, np.newaxis]
    return products


def _sizes(image: ImagePreprocessing) -> list[tuple[int, int]]:
    """Returns heights and widths of compared images: those of all, or the largest lying, smaller ones upright."""
    if image.resize != "fit":
        return [image.largest] * len(BATCH_SIZES)
    (shorter, longer), unit = image.largest, image.multiple

    def scaled(side: int, share: float) -> int:
        return max(1, int(share * side / unit)) * unit

    return [(shorter, longer), *((scaled(longer, share), scaled(shorter, share)) for share in _SHARES)]


# Boxes that a model chooses by their scores


def add_objects(
    comparison: Comparison, found: Tensors, where: str, answer: Callable[[], Mapping[str, NDArray[Any]]]
) -> None:
    """Compares the boxes of an image, whatever their order.

    A model chooses boxes by scores that rounding may exchange: another box is then in the place of one of them. As many
    may be exchanged as rounding exchanges of PyTorch's own, times its factor.
    """
    expected = answer()
    if not any(name in found for name in (LOGITS, TOKEN_LOGITS)) or not _are_finite(found):
        comparison.add_outputs(found, where, answer)
        return

    def errors(other: Tensors) -> NDArray[np.float64]:
        """Returns the largest relative error of each box, (Q,)."""
        of_outputs = [
            relative_errors(
                other[name], exact, of_softmax=name == comparison.of_softmax, least_size=comparison.least_size
            )
            for name, exact in expected.items()
        ]
        largest: NDArray[np.float64] = np.max(of_outputs, axis=0, initial=0.0)
        return largest

    def without_exchanged() -> dict[str, NDArray[Any]]:
        """Returns what PyTorch answers, with what is expected in the place of exchanged boxes."""
        other = _in_order_of(expected, answer())
        is_kept = (errors(other) <= LARGEST)[:, np.newaxis]
        return {name: np.where(is_kept, other[name], exact) for name, exact in expected.items()}

    def num_exchanged() -> Iterator[int]:
        for other in rounded_answers(answer):
            yield int((errors(_in_order_of(expected, other)) > LARGEST).sum())

    ordered = _in_order_of(expected, found)
    is_exchanged = errors(ordered) > LARGEST
    count = int(is_exchanged.sum())
    most = max(1, int(_MOST_EXCHANGED * len(is_exchanged)))
    if comparison.bound is not None and 0 < count <= most and any(count <= FACTOR * one for one in num_exchanged()):
        ordered = {name: np.where(is_exchanged[:, np.newaxis], expected[name], ordered[name]) for name in expected}
        comparison.num_rounded += 1
    comparison.add_outputs(ordered, where, without_exchanged)


def _are_finite(found: Tensors) -> bool:
    return all(np.isfinite(values).all() for values in found.values())


def _in_order_of(expected: Tensors, found: Tensors) -> dict[str, NDArray[Any]]:
    """Returns found boxes in the order of the expected ones that they are nearest to."""
    if not _are_finite(found):
        return dict(found)
    order = nearest_rows(*(np.concatenate([one[name] for name in expected], axis=-1) for one in (expected, found)))
    return {name: found[name][order] for name in expected}
