"""Which chunks of prompts are kept, and where. Pure bookkeeping: the engine copies them.

A chunk is known by all tokens from the beginning of its prompt to its own end, so that two prompts share a chunk only
where they are equal up to there. The tokens enter as a chain of 128-bit BLAKE2b digests: a chunk's is that of its
parent's and its own tokens. Whole chunks alone are kept, as prefill wrote them: a prompt that begins with them is
continued on the bits it would have computed itself.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import islice

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16


class PrefixCache:
    """Places that hold a chunk each; the one that was not used for longest gives way.

    Attributes:
        num_places: Places there are.
        num_hit_tokens: Tokens of prompts that were found, since the start.
        num_looked_up_tokens: Tokens of prompts that were looked up, since the start.
    """

    def __init__(self, *, num_places: int, chunk: int) -> None:
        """Starts empty.

        Args:
            num_places: Chunks that can be kept; none turns the cache off.
            chunk: Tokens of a chunk.
        """
        self.num_places = num_places
        self.num_hit_tokens = 0
        self.num_looked_up_tokens = 0
        self._chunk = chunk
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._free = list(range(num_places))

    def __repr__(self) -> str:
        return (
            f"PrefixCache({len(self._places)} of {self.num_places} chunks, "
            f"{self.num_hit_tokens} of {self.num_looked_up_tokens} tokens hit)"
        )

    def digests(self, input_ids: NDArray[np.int64]) -> list[bytes]:
        """Returns the digest of every whole chunk of a prompt (T,), in order; none where the cache is off."""
        if not self.num_places:
            return []
        digests: list[bytes] = []
        parent = b""
        for end in range(self._chunk, len(input_ids) + 1, self._chunk):
            tokens = input_ids[end - self._chunk : end].astype(np.int64, copy=False).tobytes()
            parent = blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)
        return digests

    def look_up(self, digests: list[bytes], num_tokens: int) -> list[int]:
        """Finds the chunks that a prompt need not compute.

        Args:
            digests: Of the prompt's whole chunks.
            num_tokens: Tokens of the prompt; its last one is always left to compute, since its logits are needed.

        Returns:
            The places of its first chunks, in order, as far as they are kept.
        """
        self.num_looked_up_tokens += num_tokens
        found: list[int] = []
        for digest in islice(digests, (num_tokens - 1) // self._chunk):
            place = self._places.get(digest)
            if place is None:
                break
            found.append(place)
        for digest in reversed(digests[: len(found)]):  # a parent outlives its children, which are useless without it
            self._places.move_to_end(digest)
        self.num_hit_tokens += len(found) * self._chunk
        return found

    def reserve(self, digest: bytes) -> int | None:
        """Gives a chunk a place, where the caller copies it at once; None: it is kept already, or the cache is off."""
        if digest in self._places:
            self._places.move_to_end(digest)
            return None
        if self._free:
            place = self._free.pop()
        elif self._places:
            _, place = self._places.popitem(last=False)
        else:
            return None
        self._places[digest] = place
        return place

    def clear(self) -> None:
        """Forgets everything: what the places hold is not known any more."""
        self._free += self._places.values()
        self._places.clear()
