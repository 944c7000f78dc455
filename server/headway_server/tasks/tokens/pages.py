"""Pages: words and their boxes, as OCR finds them, for models of documents.

W words of a page, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import WordBoxes
from headway_server.errors import InvalidInputError
from headway_server.serving.limits import num_bytes
from headway_server.tasks.text.model import BYTES_OF_OFFSETS, BYTES_OF_TOKEN, TextInputs

THOUSANDTHS: Final = 1000
"""Width and height of a page in thousandths."""
MAX_WORDS: Final = 7000
"""Maximum words of a call, which is within the fields that a request may have (`services/wire.py`)."""
_SIDES: Final = ("x_min", "y_min", "x_max", "y_max")
_BYTES_OF_BOX: Final = 4 * 8
_BYTES_OF_WORD: Final = 64 + _BYTES_OF_BOX
"""Bytes of a word beside its text: the object, and its box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Words of a page in reading order, with their boxes."""

    words: Sequence[str]
    """W words; those without characters have no tokens."""
    boxes: Sequence[float] | NDArray[np.float64]
    """(4 W,): x_min, y_min, x_max and y_max of each word, from the upper left corner."""
    width: float = 0.0
    """Width of the page in the unit of the boxes; 0: boxes are in thousandths, like `height`."""
    height: float = 0.0

    @property
    def text(self) -> str:
        """The words, with a space between two."""
        return " ".join(self.words)

    def sides(self, field: str) -> NDArray[np.float64]:
        """Returns the boxes, (W, 4).

        Args:
            field: Name of the page in the request.

        Raises:
            InvalidInputError: There are not four numbers for each word, a box is outside of the page, or its sides are
                interchanged; or width and height are wrong.
        """
        if len(self.boxes) != 4 * len(self.words):
            raise InvalidInputError(
                f"{field}.boxes",
                f"has {len(self.boxes)} numbers for {len(self.words)} words; give four for each: {', '.join(_SIDES)}",
            )
        sizes = {"width": self.width, "height": self.height}
        for name, size in sizes.items():
            if not 0 <= size < np.inf or (not size and any(sizes.values())):
                raise InvalidInputError(
                    f"{field}.{name}",
                    f"is {size:g}; give width and height above 0, or neither for boxes in thousandths of the page",
                )
        boxes = np.array(self.boxes[:], np.float64).reshape(-1, 4)
        limits = self._size
        beyond = ~((boxes >= 0) & (boxes <= limits))  # a NaN is neither
        if beyond.any():
            word, side = np.argwhere(beyond)[0].tolist()
            of = ("width", "height")[side % 2]
            limit = f"{limits[side]:g}, the page's {of}" if self.width else "1000, as it is in thousandths of the page"
            advice = "" if self.width else "; give width and height of the page for another unit"
            raise self._wrong(field, boxes, word, side, f"must be from 0 to {limit}{advice}")
        if not self.width and (parts := boxes != np.floor(boxes)).any():
            word, side = np.argwhere(parts)[0].tolist()
            advice = "thousandths of the page are whole numbers; give width and height of the page for another unit"
            raise self._wrong(field, boxes, word, side, advice)
        turned = boxes[:, 2:] < boxes[:, :2]
        if turned.any():
            word, axis = np.argwhere(turned)[0].tolist()
            advice = f"must be at least {_SIDES[axis]}, {boxes[word, axis]:g}; a box is {', '.join(_SIDES)}"
            raise self._wrong(field, boxes, word, axis + 2, advice)
        return boxes

    def scaled(self, sides: NDArray[np.float64], unit: WordBoxes) -> NDArray[np.int64] | NDArray[np.float32]:
        """Returns boxes as a model reads them: (W, 4), `sides` of this page, to (W, 4).

        Thousandths are `int(1000 * (x / width))`, as documented by LayoutLM of `transformers`.
        """
        fractions = sides / self._size
        if unit.unit == "fractions":
            return fractions.astype(np.float32)
        return np.floor(THOUSANDTHS * fractions if self.width else sides).astype(np.int64)

    @property
    def _size(self) -> NDArray[np.float64]:
        """Limits of a box, (4,)."""
        width, height = (self.width, self.height) if self.width else (THOUSANDTHS, THOUSANDTHS)
        return np.array([width, height, width, height], np.float64)

    @staticmethod
    def _wrong(field: str, boxes: NDArray[np.float64], word: int, side: int, advice: str) -> InvalidInputError:
        return InvalidInputError(
            f"{field}.boxes[{4 * word + side}]", f"is {boxes[word, side]:g}, {_SIDES[side]} of word {word}; {advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageInputs(TextInputs):
    """Pages of a call; the texts are their words, with a space between two."""

    pages: Sequence[Page]

    @classmethod
    def of(cls, pages: Sequence[Page], *, truncate: bool = False, fields: Sequence[str] = ()) -> Self:
        """Returns the inputs of pages.

        Args:
            pages: At most `MAX_TEXTS`.
            truncate: As in `TextInputs`.
            fields: Name of each in the request; empty: `pages[0]` and so on.
        """
        names = fields or [f"pages[{index}]" for index in range(len(pages))]
        return cls(texts=[page.text for page in pages], pages=pages, fields=names, truncate=truncate)

    @property
    def num_bytes(self) -> int:
        """Bytes of all words and boxes."""
        return sum(map(num_bytes, self.texts)) + _BYTES_OF_WORD * sum(len(page.words) for page in self.pages)

    def num_token_bytes(self, max_tokens: int, *, with_offsets: bool) -> int:
        """Returns the maximum bytes of the tokens and their boxes; see `most_tokens`."""
        return (BYTES_OF_TOKEN + _BYTES_OF_BOX + with_offsets * BYTES_OF_OFFSETS) * self.most_tokens(max_tokens)


def token_boxes(
    boxes: NDArray[np.int64] | NDArray[np.float32], word_ids: Sequence[int | None], unit: WordBoxes
) -> NDArray[np.int64] | NDArray[np.float32]:
    """Returns the box of each token: boxes of words, (W, 4), and the word of each token, (T,), to (T, 4).

    Special tokens have those of the manifest.
    """
    words = np.array([-1 if word is None else word for word in word_ids], np.int64)
    scale = 1 if unit.unit == "thousandths" else THOUSANDTHS
    found = np.empty((len(words), 4), boxes.dtype)
    found[:] = np.array(unit.after) / scale
    is_word = words >= 0
    found[: is_word.argmax()] = np.array(unit.before) / scale
    found[is_word] = boxes[words[is_word]]
    return found
