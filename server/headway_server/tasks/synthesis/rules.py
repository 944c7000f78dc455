"""Which tokens may follow in speech: the codes of each book in turn, and the end after a whole frame."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import AudioCodec
from headway_server.decoding.sampling.logits_processors import pack_mask


class FrameMasks:
    """The masks of every place in a frame, for all sequences of a model."""

    def __init__(self, codec: AudioCodec, *, vocab_size: int, end_id: int) -> None:
        self.num_books = codec.num_books
        num_words = -(-vocab_size // 32)
        books = np.arange(codec.num_codes).reshape(codec.num_books, -1) + codec.first_code  # (K, C)
        self.of_books = [pack_mask(book, num_words) for book in books]
        """By book, the codes of it."""
        self.after_frame = pack_mask(np.append(books[0], end_id), num_words)
        """The codes of the first book, and the end."""


class FrameConstraint:
    """Codes in the order of frames, at least one frame; a `Constraint`."""

    failure: str | None = None
    allows_everything = False

    def __init__(self, masks: FrameMasks) -> None:
        self._masks = masks
        self._num_codes = 0

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Marks the codes of the next book."""
        book = self._num_codes % self._masks.num_books
        mask[:] = self._masks.of_books[book] if book or not self._num_codes else self._masks.after_frame

    def accept(self, token_id: int) -> None:  # noqa: ARG002 (any of those marked leads to the next book)
        """Takes the next code."""
        self._num_codes += 1

    @property
    def is_complete(self) -> bool:
        """False: the model says when speech ends."""
        return False

    def __repr__(self) -> str:
        return f"FrameConstraint({self._num_codes} codes)"
