"""What training data is, once it is read: one type a task, and the parts it is split into.

N examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

HOLD_OUT_SEED = 20_260
"""Which examples are held out does not depend on a run's seed, so that runs are compared on the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledTexts:
    """Texts with a class each."""

    texts: list[str]
    labels: list[int]
    text_pairs: list[str] | None = None
    """The text that each is paired with, empty where there is none; None: no text has one."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> LabeledTexts:
        """The examples at `indices`, in that order."""
        return LabeledTexts(
            texts=[self.texts[i] for i in indices],
            labels=[self.labels[i] for i in indices],
            text_pairs=None if self.text_pairs is None else [self.text_pairs[i] for i in indices],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLabeledTexts:
    """Texts with any number of labels each."""

    texts: list[str]
    labels: list[tuple[int, ...]]
    """Indices in ascending order; none where no label applies."""
    text_pairs: list[str] | None = None
    """As in `LabeledTexts`."""

    def __len__(self) -> int:
        return len(self.texts)


class Span(NamedTuple):
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    start: int
    end: int
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLabeledTexts:
    """Texts, in the order of their source, with labelled spans."""

    texts: list[str]
    spans: list[tuple[Span, ...]]
    """Of each text: not empty, in its order and without overlap."""
    covering: bool
    """Whether the spans are all the words there are, as for parts of speech, and not a few among them, as for names."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> SpanLabeledTexts:
        """The examples at `indices`, in that order."""
        texts, spans = [self.texts[i] for i in indices], [self.spans[i] for i in indices]
        return SpanLabeledTexts(texts=texts, spans=spans, covering=self.covering)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTexts:
    """Sentences with a translation each."""

    sources: list[str]
    targets: list[str]

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """One text; its length is in characters."""

    text: str

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledImages:
    """Images of one size with a class each."""

    images: NDArray[np.uint8]
    """(N, height, width, 3)."""
    labels: NDArray[np.int64]
    """(N,)."""

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: NDArray[np.int64]) -> LabeledImages:
        """The examples at `indices`, in that order."""
        return LabeledImages(images=self.images[indices], labels=self.labels[indices])


Examples = TypeVar(
    "Examples", LabeledTexts, MultiLabeledTexts, SpanLabeledTexts, ParallelTexts, PlainText, LabeledImages
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits(Generic[Examples]):
    """The parts of a data set, and what a model card says of it."""

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
    """Names of the classes, in the order of their indices."""


def hold_out(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits `count` examples at random: the indices that stay, and those that are held out, both ascending."""
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(count)
    held = max(1, round(count * fraction))
    return np.sort(order[held:]), np.sort(order[:held])
