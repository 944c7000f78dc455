"""Which tokens may follow in speech: the codes of each book in turn, and the end after a whole frame."""

from __future__ import annotations

import numpy as np

from headway_server.bundles import AudioCodec
from headway_server.decoding.rules import Logits, Mask, TokenRule, mask_of, num_words


class FrameMasks:
    """The masks of every place in a frame, for all sequences of a model."""

    def __init__(self, codec: AudioCodec, *, vocab_size: int, end_id: int) -> None:
        self.num_books = codec.num_books
        size = num_words(vocab_size)
        books = np.arange(codec.num_codes).reshape(codec.num_books, -1) + codec.first_code  # (K, C)
        self.of_books = [mask_of(book, size) for book in books]
        """By book, the codes of it."""
        self.after_frame = mask_of(np.append(books[0], end_id), size)
        """The codes of the first book, and the end."""


class FrameRule(TokenRule):
    """Codes in the order of frames, at least one frame. The model says when speech ends."""

    def __init__(self, masks: FrameMasks) -> None:
        self._masks = masks
        self._num_codes = 0

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """Allows the codes of the next book."""
        book = self._num_codes % self._masks.num_books
        mask &= self._masks.of_books[book] if book or not self._num_codes else self._masks.after_frame

    def follow(self, token_id: int) -> FrameRule:  # noqa: ARG002 (any of those allowed leads to the next book)
        """Takes the next code and returns itself."""
        self._num_codes += 1
        return self

    def __repr__(self) -> str:
        return f"FrameRule({self._num_codes} codes)"
