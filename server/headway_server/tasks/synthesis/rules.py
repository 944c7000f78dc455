"""Token rules of speech: codes of each codebook in turn, and the end after a complete frame."""

from __future__ import annotations

import numpy as np

from headway_server.bundles import AudioCodec
from headway_server.decoding.rules import Logits, Mask, TokenRule, mask_of, num_words


class FrameMasks:
    """Token masks of the positions in a frame, shared by all sequences of a model."""

    def __init__(self, codec: AudioCodec, *, vocab_size: int, end_id: int) -> None:
        self.num_books = codec.num_books
        size = num_words(vocab_size)
        codebooks = np.arange(codec.num_codes).reshape(codec.num_books, -1) + codec.first_code  # (K, C)
        self.of_codebooks = [mask_of(codebook, size) for codebook in codebooks]
        """Codes of each codebook."""
        self.after_frame = mask_of(np.append(codebooks[0], end_id), size)
        """Codes of the first codebook, and the end."""


class FrameRule(TokenRule):
    """Codes in frame order, at least one frame. The model decides the end."""

    def __init__(self, masks: FrameMasks) -> None:
        self._masks = masks
        self._num_codes = 0

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """Allows the codes of the next codebook."""
        codebook = self._num_codes % self._masks.num_books
        mask &= self._masks.of_codebooks[codebook] if codebook or not self._num_codes else self._masks.after_frame

    def follow(self, token_id: int) -> FrameRule:  # noqa: ARG002 (any allowed token leads to the next codebook)
        """Takes the next code and returns itself."""
        self._num_codes += 1
        return self

    def __repr__(self) -> str:
        return f"FrameRule({self._num_codes} codes)"
