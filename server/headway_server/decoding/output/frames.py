"""Makes frames of a codec's codes from the tokens of a sequence, which come code by code.

F frames, K codebooks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import AudioCodec


class FrameAssembly:
    """Whole frames, int64 (F, K); an `OutputAssembler`. The codes of a frame that is not whole are left out."""

    def __init__(self, codec: AudioCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Takes the next token, which is a code."""
        self._tokens.append(token_id)
        return False

    def take(self) -> NDArray[np.int64]:
        """Returns the frames that have become whole since the last call."""
        num_whole = len(self._tokens) - len(self._tokens) % self._codec.num_books
        taken = self._tokens[self._num_taken : num_whole]
        self._num_taken = num_whole
        return self.whole(taken)

    def finish(self) -> NDArray[np.int64]:
        """Returns all frames."""
        return self.whole(self._tokens)

    def whole(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Returns the frames of tokens."""
        num_frames = len(token_ids) // self._codec.num_books
        tokens = np.array(token_ids[: num_frames * self._codec.num_books], np.int64)
        codes = (tokens - self._codec.first_code) % self._codec.codebook_size
        return codes.reshape(num_frames, self._codec.num_books)

    def join(self, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Joins parts."""
        return np.concatenate(parts)

    def __repr__(self) -> str:
        return f"FrameAssembly({len(self._tokens)} codes)"
