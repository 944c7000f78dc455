"""Training data in memory: one type a task, and the parts it is split into.

N examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_training.data.files import cut_before_spaces, read_blocks, read_text

HOLD_OUT_SEED = 20_260
"""Runs of any seed hold out the same examples, so that they can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Examples with an entry in each of several columns."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, indices: NDArray[np.int64]) -> Self:
        """The examples at `indices`, in that order."""
        taken: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, np.ndarray):
                taken[field.name] = column[indices]
            elif isinstance(column, list):
                taken[field.name] = [column[i] for i in indices]
        return replace(self, **taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledTexts(Rows):
    """Texts with a label each."""

    texts: list[str]
    labels: list[int]
    text_pairs: list[str] | None = None
    """The text that each is paired with, empty if there is none; None: no text has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLabeledTexts(Rows):
    """Texts with any number of labels each."""

    texts: list[str]
    labels: list[tuple[int, ...]]
    """Indices in ascending order; none if no label applies."""
    text_pairs: list[str] | None = None
    """As in `LabeledTexts`."""


class Span(NamedTuple):
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    start: int
    end: int
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLabeledTexts(Rows):
    """Texts in their source's order, with labelled spans."""

    texts: list[str]
    spans: list[tuple[Span, ...]]
    """Of each text: in the order of the text, neither empty nor overlapping."""
    covering: bool
    """True if the spans are all the words of a text, as for parts of speech; False if some of them, as for names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTexts(Rows):
    """Sentences with a translation each."""

    sources: list[str]
    targets: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledImages(Rows):
    """Images of one size with a label each."""

    images: NDArray[np.uint8]
    """(N, height, width, 3)."""
    labels: NDArray[np.int64]
    """(N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlabeledImages(Rows):
    """Images of one size."""

    images: NDArray[np.uint8]
    """(N, height, width, 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(Rows):
    """Conversations of two or more sides, one of them the assistant."""

    turns: list[list[dict[str, Any]]]
    """Of each conversation: its turns, with `role` and `content`."""


class PlainText:
    """A running text: a string, or a file that is read part by part and never held whole.

    Args:
        source: The text, or the file it is in.

    Raises:
        MissingDataError: There is no such file.
        DataError: The file cannot be read, or is not UTF-8.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = source
        self._length = len(source) if isinstance(source, str) else sum(map(len, read_blocks(source)))

    def __repr__(self) -> str:
        return f"PlainText({len(self):,} characters)"

    def __len__(self) -> int:
        """Its length in characters."""
        return self._length

    @property
    def text(self) -> str:
        """The whole text."""
        return self.source if isinstance(self.source, str) else read_text(self.source)

    def parts(self, size: int) -> Iterator[str]:
        """Parts of about `size` characters, cut before white space, in order."""
        blocks = iter([self.source]) if isinstance(self.source, str) else read_blocks(self.source)
        return cut_before_spaces(blocks, size)


Examples = TypeVar(
    "Examples",
    LabeledTexts,
    MultiLabeledTexts,
    SpanLabeledTexts,
    ParallelTexts,
    PlainText,
    LabeledImages,
    Conversations,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(Generic[Examples]):
    """The parts of a data set, and how a model card names it."""

    train: Examples
    """What the weights are fitted to."""
    valid: Examples
    """What the best weights are selected on."""
    test: Examples
    """What is measured once, at the end."""
    train_name: str
    """The training data in words."""
    test_name: str
    """The test data in words."""
    license: str
    """Licence of the data."""
    home: str
    """Where the data comes from."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of their indices."""


def hold_out(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits `count` examples at random: indices of those that stay and of those held out, both ascending."""
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(count)
    held = max(1, round(count * fraction))
    return np.sort(order[held:]), np.sort(order[:held])
