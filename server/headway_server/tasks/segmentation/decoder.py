"""Mask decoder: a run has prompts of any images and callers, each with the embedding of its image.

N prompts of a run, L positions of an image, E width of an embedding, Q points of a prompt, M masks of a prompt, S side
of a mask in cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors, measure_padding
from headway_server.errors import BundleError
from headway_server.field_rules import most_elements
from headway_server.runtime import Session

PADDING, OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT = -1, 0, 1, 2, 3
"""Label of a prompt's point: padding, background, foreground, or a corner of the box."""
EMBEDDING: Final = "embedding"
MASKS: Final = "masks"
PREDICTED_IOU: Final = "predicted_iou"
MAX_PROMPTS: Final = most_elements("SegmentImageRequest.prompts")
"""Maximum prompts of a call."""
MAX_POINTS: Final = most_elements("SegmentPrompt.points")
"""Maximum points of a prompt."""
PromptKind: TypeAlias = Literal["point", "box", "several"]
"""Kind of a prompt, which decides which masks answer it: one point, one box, or several parts."""


def as_item(
    embedding: NDArray[np.float32],
    points: NDArray[np.float32],
    labels: NDArray[np.int64],
    earlier_mask: NDArray[np.float32] | None = None,
) -> Tensors:
    """Makes a batch item from a prompt.

    Args:
        embedding: Embedding of its image, (L, E).
        points: (Q, 2), x and y as fractions of the model's crop.
        labels: (Q,), label of each.
        earlier_mask: Logits of a mask to refine, (S, S).
    """
    item: dict[str, NDArray[Any]] = {EMBEDDING: embedding, "points": points, "point_labels": labels}
    return item if earlier_mask is None else item | {"earlier_mask": earlier_mask}


class PromptGraph:
    """Collates the prompts of a run and splits their masks; a `Graph` of the batcher."""

    def __init__(self, session: Session) -> None:
        """Reads the sizes of a graph.

        Raises:
            BundleError: The tensors are not those of a mask decoder.
        """
        graph = session.graph
        specs = {spec.name: spec.shape for spec in (*graph.inputs, *graph.outputs)}
        embedding, masks = specs[EMBEDDING][1:], specs[MASKS][1:]
        sizes = [axis for axis in (*embedding, *masks) if isinstance(axis, int)]
        if len(sizes) != 5 or sizes[3] != sizes[4] or sizes[2] < 2:
            raise BundleError(
                f"{graph.file}: embeddings of {embedding} and masks of {masks}; a mask decoder reads (positions, "
                "width) and gives two masks or more, as wide as high: export the model again"
            )
        self._session = session
        self.embedding_shape = (sizes[0], sizes[1])
        """(L, E)"""
        self.num_masks = sizes[2]
        """M"""
        self.mask_size = sizes[3]
        """S"""

    @property
    def session(self) -> Session:
        """What runs."""
        return self._session

    @property
    def embedding_bytes(self) -> int:
        """Bytes of one image's embedding."""
        return 4 * self.embedding_shape[0] * self.embedding_shape[1]

    def collate(self, items: Sequence[Tensors]) -> dict[str, NDArray[Any]]:
        """Makes the inputs of a run, with points padded to the longest prompt."""
        count, longest, side = len(items), max(len(item["points"]) for item in items), self.mask_size
        inputs: dict[str, NDArray[Any]] = {
            EMBEDDING: np.stack([item[EMBEDDING] for item in items]),
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
        blank = np.zeros(self.embedding_shape, np.float32)
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


def answer_order(predicted_iou: NDArray[np.float32], kind: PromptKind) -> NDArray[np.intp]:
    """Returns the indices of the masks that answer a prompt, the best first: (M,) -> at most three.

    Mask 0 is for unambiguous prompts (Kirillov et al. 2023, section 3). It alone answers several parts, and it comes
    first for a box. A point is ambiguous: the other masks answer it, by falling predicted IoU.
    """
    if kind == "several":
        return np.zeros(1, np.intp)
    order: NDArray[np.intp] = np.argsort(-predicted_iou[1:], kind="stable") + 1
    return order if kind == "point" else np.concatenate((np.zeros(1, np.intp), order[:-1]))
