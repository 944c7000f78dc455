"""Reads prompts into slots, chunk by chunk; keeps and reuses chunks (the prefix cache).

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.core.scheduler import Chunk
from headway_server.decoding.interfaces import Decoder
from headway_server.decoding.sampling.softmax import token_log_probabilities
from headway_server.decoding.sequence import Sequence, TokenLogProbability

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


class PrefillStep:
    """Reads prompts. For the engine's thread alone.

    Attributes:
        prefix_cache: Chunks of prompts that are kept.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Uses a decoder whose slots the caller assigns; chunks are kept in its slots past those that run."""
        self._decoder = decoder
        self._chunks_per_slot = decoder.max_length // decoder.prefill_chunk
        self.prefix_cache = PrefixCache(
            num_places=decoder.num_prefix_slots * self._chunks_per_slot, chunk=decoder.prefill_chunk
        )

    def __repr__(self) -> str:
        return f"PrefillStep({self._decoder!r}, {self.prefix_cache!r})"

    def read(self, chunk: Chunk) -> NDArray[np.float32]:
        """Reads a chunk of a prompt into its slot.

        Returns:
            (V,) logits after it; they may hold only until the decoder's next call.
        """
        sequence = chunk.sequence
        token_ids = sequence.input_ids[chunk.start : chunk.stop]
        if not sequence.parameters.wants_prompt_log_probabilities:
            return self._decoder.prefill(sequence.slot, token_ids, chunk.start)
        logits = self._decoder.score(sequence.slot, token_ids, chunk.start)  # (T, V)
        if chunk.start == 0:
            sequence.prompt_tokens.append(TokenLogProbability(int(token_ids[0]), None))
        following = sequence.input_ids[chunk.start + 1 : chunk.stop + 1]  # (T,) or (T - 1,) at the end of the prompt
        log_probabilities, top_tokens = token_log_probabilities(
            logits[: len(following)], following, sequence.parameters.num_top_tokens or 0
        )
        for row in zip(following.tolist(), log_probabilities.tolist(), map(tuple, top_tokens), strict=True):
            sequence.prompt_tokens.append(TokenLogProbability(*row))
        last: NDArray[np.float32] = logits[-1]
        return last

    def share(self, reader: Sequence, sequence: Sequence) -> None:
        """Copies a prompt from the slot of another sample that has read it."""
        sequence.num_prefilled = sequence.num_cached_tokens = len(sequence.input_ids)
        sequence.prompt_tokens = reader.prompt_tokens
        self._decoder.copy(source=(reader.slot, 0), target=(sequence.slot, 0), length=sequence.num_prefilled)

    def reuse_chunks(self, sequence: Sequence) -> None:
        """Copies the chunks of a prompt that are kept into its slot."""
        if sequence.parameters.wants_prompt_log_probabilities:
            return  # its logits are wanted, and these are not kept
        sequence.prompt_digests = self.prefix_cache.digests(sequence.input_ids)
        chunk = self._decoder.prefill_chunk
        for place in self.prefix_cache.look_up(sequence.prompt_digests, len(sequence.input_ids)):
            target = (sequence.slot, sequence.num_prefilled)
            self._decoder.copy(source=self._kept_at(place), target=target, length=chunk)
            sequence.num_prefilled += chunk
        sequence.num_cached_tokens = sequence.num_prefilled

    def keep_chunk(self, chunk: Chunk) -> None:
        """Copies a whole chunk that was just read to where later prompts find it."""
        number, rest = divmod(chunk.stop, self._decoder.prefill_chunk)
        if rest or number > len(chunk.sequence.prompt_digests):
            return
        place = self.prefix_cache.reserve(chunk.sequence.prompt_digests[number - 1])
        if place is not None:
            source = (chunk.sequence.slot, chunk.start)
            self._decoder.copy(source=source, target=self._kept_at(place), length=chunk.stop - chunk.start)

    def _kept_at(self, place: int) -> tuple[int, int]:
        """Returns slot and position of a place of the prefix cache."""
        row, column = divmod(place, self._chunks_per_slot)
        return self._decoder.num_slots + row, column * self._decoder.prefill_chunk
