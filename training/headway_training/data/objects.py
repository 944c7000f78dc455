"""Pictures composed of emoji, with a box around each: what a detector is trained and measured on.

I side of a picture in pixels, N objects of a picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import find_objects

from headway_training.data.pictures import Drawings, EmojiTexts, join_drawings, opaque
from headway_training.data.segments import LEAST_AREA, Composer, Scene
from headway_training.errors import DataError

EMOJI: Mapping[str, str] = MappingProxyType(
    {
        "cat": "1F431",
        "dog": "1F436",
        "fox": "1F98A",
        "pig": "1F437",
        "frog": "1F438",
        "penguin": "1F427",
        "turtle": "1F422",
        "fish": "1F420",
        "snail": "1F40C",
        "beetle": "1F41E",
        "sunflower": "1F33B",
        "tree": "1F332",
        "mushroom": "1F344",
        "apple": "1F34E",
        "banana": "1F34C",
        "strawberry": "1F353",
        "watermelon": "1F349",
        "carrot": "1F955",
        "hamburger": "1F354",
        "pizza": "1F355",
        "doughnut": "1F369",
        "car": "1F697",
        "bus": "1F68C",
        "bicycle": "1F6B2",
        "rocket": "1F680",
        "airplane": "2708",
        "sailboat": "26F5",
        "balloon": "1F388",
        "ball": "26BD",
        "star": "2B50",
        "gift": "1F381",
        "guitar": "1F3B8",
    }
)
"""Code points of the emoji that are found, by label."""
SIDES = (0.15, 0.55)
"""Least and greatest side of a drawing, as shares of the picture's."""
LEAST_SEEN = 0.4
"""Share of a drawing that is seen at least of an object; those that are covered further are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boxes:
    """Objects of a picture."""

    boxes: NDArray[np.float32]
    """(N, 4): left, top, right and bottom, as shares of the picture's sides."""
    labels: NDArray[np.int64]
    """(N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedPictures:
    """A part of the pictures: what they are composed of."""

    drawings: Drawings
    """`emoji` is the label of each."""
    backgrounds: Sequence[NDArray[np.uint8]]
    """Photographs, (H, W, 3) each."""

    def __len__(self) -> int:
        return len(self.drawings)

    def composer(self) -> Composer:
        """Composes pictures of them."""
        return Composer(self.drawings, opaque(self.drawings.images), self.backgrounds, sides=SIDES)


def drawings_of_labels(drawings: Mapping[str, Drawings], texts: EmojiTexts) -> tuple[Drawings, tuple[str, ...]]:
    """Returns the drawings of `EMOJI` in all styles, numbered by label, and the labels that have one.

    Raises:
        DataError: There is none.
    """
    everything = join_drawings(list(drawings.values()))
    rows = {code: row for row, code in enumerate(texts.codepoints)}
    known = {label: rows[code] for label, code in EMOJI.items() if code in rows and rows[code] in everything.emoji}
    if not known:
        raise DataError(f"no drawing is of an emoji that is found: {', '.join(EMOJI)}")
    parts = [everything.take(np.flatnonzero(everything.emoji == row)) for row in known.values()]
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    joined = join_drawings(parts)
    return Drawings(images=joined.images, emoji=numbers), tuple(known)


def boxes_of(scene: Scene, labels: NDArray[np.int64]) -> Boxes:
    """Returns the objects of a composed picture: boxes around what is seen of its drawings.

    Args:
        scene: The picture.
        labels: The label of each drawing of its composer.
    """
    whole, size = scene.maps[0], len(scene.image)
    areas = np.bincount(whole.ravel(), minlength=len(scene.drawn) + 1)[1:]
    found = []
    for window, area, (drawing, num_drawn) in zip(find_objects(whole, len(areas)), areas, scene.drawn, strict=True):
        if window is not None and area >= max(LEAST_AREA, LEAST_SEEN * num_drawn):
            rows, columns = window
            found.append(((columns.start, rows.start, columns.stop, rows.stop), labels[drawing]))
    return Boxes(
        boxes=np.array([box for box, _ in found], np.float32).reshape(-1, 4) / np.float32(size),
        labels=np.array([label for _, label in found], np.int64),
    )
