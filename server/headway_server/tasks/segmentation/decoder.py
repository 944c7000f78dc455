"""Mask decoder: a run has prompts of any images and callers, each with the embedding of its image.

N prompts of a run, Q points of a prompt, M masks of a prompt, S side of a mask in cells. An embedding is one tensor or
several, of fixed shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors, measure_padding
from headway_server.bundles import SEGMENTATION_TENSORS, StableMask
from headway_server.errors import BundleError
from headway_server.field_rules import most_elements
from headway_server.runtime import Session

PADDING, OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT = -1, 0, 1, 2, 3
"""Label of a prompt's point: padding, background, foreground, or a corner of the box."""
MASKS: Final = "masks"
PREDICTED_IOU: Final = "predicted_iou"
MAX_PROMPTS: Final = most_elements("SegmentImageRequest.prompts")
"""Maximum prompts of a call."""
MAX_POINTS: Final = most_elements("SegmentPrompt.points")
"""Maximum points of a prompt."""
PromptKind: TypeAlias = Literal["point", "box", "several"]
"""Kind of a prompt, which decides which masks answer it: one point, one box, or several parts."""


def as_item(
    embedding: Tensors,
    points: NDArray[np.float32],
    labels: NDArray[np.int64],
    earlier_mask: NDArray[np.float32] | None = None,
) -> Tensors:
    """Makes a batch item from a prompt.

    Args:
        embedding: Embedding of its image, by the names of the encoder's outputs.
        points: (Q, 2), x and y as fractions of the model's crop.
        labels: (Q,), label of each.
        earlier_mask: Logits of a mask to refine, (S, S).
    """
    item: dict[str, NDArray[Any]] = {**embedding, "points": points, "point_labels": labels}
    return item if earlier_mask is None else item | {"earlier_mask": earlier_mask}


class PromptGraph:
    """Collates the prompts of a run and splits their masks; a `Graph` of the batcher."""

    def __init__(self, session: Session) -> None:
        """Reads the sizes of a graph.

        Raises:
            BundleError: The tensors are not those of a mask decoder.
        """
        graph = session.graph
        axes = {spec.name: spec.shape[1:] for spec in (*graph.inputs, *graph.outputs)}
        embedding = {spec.name: axes[spec.name] for spec in graph.inputs if spec.name not in SEGMENTATION_TENSORS[0]}
        fixed = {
            name: tuple(axis for axis in shape if isinstance(axis, int))
            for name, shape in (*embedding.items(), (MASKS, axes[MASKS]))
        }
        masks = fixed.pop(MASKS)
        is_fixed = embedding and fixed == embedding and all(map(len, fixed.values()))
        if not is_fixed or len(masks) != 3 or masks[1] != masks[2] or masks[0] < 2:
            raise BundleError(
                f"{graph.file}: embeddings of {embedding} and masks of {axes[MASKS]}; a mask decoder reads tensors of "
                "fixed shapes and gives two masks or more, as wide as high: export the model again"
            )
        self._session = session
        self.embedding_shapes = fixed
        """Shape of each tensor of an image's embedding, by its name."""
        self.num_masks = masks[0]
        """M"""
        self.mask_size = masks[1]
        """S"""

    @property
    def session(self) -> Session:
        """What runs."""
        return self._session

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one image's embedding."""
        return 4 * sum(map(math.prod, self.embedding_shapes.values()))

    def collate(self, items: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
        """Makes the inputs of a run, with points padded to the longest prompt."""
        count, longest, side = len(items), max(len(item["points"]) for item in items), self.mask_size
        inputs: dict[str, NDArray[Any]] = {
            **{name: np.stack([item[name] for item in items]) for name in self.embedding_shapes},
            "points": np.zeros((count, longest, 2), np.float32),
            "point_labels": np.full((count, longest), PADDING, np.int64),
            "earlier_mask": np.zeros((count, side, side), np.float32),
            "has_earlier_mask": np.zeros(count, np.int64),
        }
        for row, item in enumerate(items):
            num_points = len(item["points"])
            inputs["points"][row, :num_points] = item["points"]
            inputs["point_labels"][row, :num_points] = item["point_labels"]
            if "earlier_mask" in item:
                inputs["earlier_mask"][row] = item["earlier_mask"]
                inputs["has_earlier_mask"][row] = 1
        return inputs

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Runs the graph for the named outputs."""
        return self._session.run(inputs, outputs)

    def split(self, outputs: Tensors, items: Sequence[Tensors]) -> list[dict[str, NDArray[Any]]]:
        """Splits the outputs of a run into masks (M, S, S) and predicted IoU (M,) of each prompt."""
        return [{name: tensor[row] for name, tensor in outputs.items()} for row in range(len(items))]

    def warm_up(self) -> int | None:
        """Runs one prompt: a broken bundle is found at load time, and the first call does not pay for the first run.

        Raises:
            BundleError: The graph does not run, or has other outputs.
        """
        file = self._session.graph.file
        blank = {name: np.zeros(shape, np.float32) for name, shape in self.embedding_shapes.items()}
        inputs = self.collate([as_item(blank, np.full((1, 2), 0.5, np.float32), np.array([INSIDE]))])
        try:
            outputs = self._session.run(inputs)
            max_padding = measure_padding(self._session, inputs, 1)
        except Exception as error:  # errors of onnxruntime, and of graphs with other tensors
            raise BundleError(f"{file}: does not run ({error}); export the model again") from error
        shapes = outputs[MASKS].shape, outputs[PREDICTED_IOU].shape
        expected = (1, self.num_masks, self.mask_size, self.mask_size), (1, self.num_masks)
        if shapes != expected:
            raise BundleError(f"{file}: gives {shapes} for one prompt, {expected} is expected; export the model again")
        return max_padding

    def __repr__(self) -> str:
        return f"PromptGraph({self._session!r})"


def answer_order(
    masks: NDArray[np.float32],
    predicted_iou: NDArray[np.float32],
    kind: PromptKind,
    stable_mask: StableMask | None = None,
) -> NDArray[np.intp]:
    """Returns the indices of the masks that answer a prompt, the best first: at most three.

    Mask 0 is for unambiguous prompts (Kirillov et al. 2023, section 3). It alone answers several parts, and it comes
    first for a box, unless it is less stable than `stable_mask` asks for: then the likeliest of the others takes its
    place (Ravi et al. 2024). A point is ambiguous: the other masks answer it, by falling predicted IoU.

    Args:
        masks: Logits, (M, S, S).
        predicted_iou: (M,)
        kind: Kind of the prompt.
        stable_mask: When mask 0 is not taken; None: it always is.
    """
    others: NDArray[np.intp] = np.argsort(-predicted_iou[1:], kind="stable") + 1
    if kind == "point":
        return others
    is_stable = stable_mask is None or _is_stable(masks[0], stable_mask)
    first = np.zeros(1, np.intp) if is_stable else others[:1]
    return first if kind == "several" else np.concatenate((first, others[others != first][: len(others) - 1]))


def _is_stable(logits: NDArray[np.float32], asked: StableMask) -> bool:
    """Compares the stability of a mask, (S, S)."""
    small, large = (int((logits > offset).sum()) for offset in (asked.offset, -asked.offset))
    return not large or small >= asked.least * large
