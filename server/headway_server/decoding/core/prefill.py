"""Reads prompts into slots, chunk by chunk, and caches the chunks for later prompts that begin alike.

A chunk is identified by all tokens from the beginning of its prompt to its own end. Two prompts share a chunk only if
they are equal up to there. The tokens enter a chain of 128-bit BLAKE2b digests: a chunk's is that of its parent's
digest and its own tokens. The chain begins with the salt of the sequence, so that prompts of different salts share
nothing: what one caller has asked shows in no answer to another, nor in its time. Only whole chunks are cached, as
prefill wrote them, so a prompt that begins with them goes on from the very bits that it would have computed itself.

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
    """Index of the cached chunks; `PrefillStep` copies them.

    There is room for some chunks. The least recently used one is replaced.

    Attributes:
        capacity: Chunks that there is room for.
        num_hit_tokens: Tokens of prompts that were found, since the start.
        num_looked_up_tokens: Tokens of prompts that were looked up, since the start.
    """

    def __init__(self, *, capacity: int, chunk: int) -> None:
        """Starts empty.

        Args:
            capacity: Chunks that there is room for; 0 turns the cache off.
            chunk: Tokens of a chunk.
        """
        self.capacity = capacity
        self.num_hit_tokens = 0
        self.num_looked_up_tokens = 0
        self._chunk = chunk
        self._indices: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._free = list(range(capacity))

    def __repr__(self) -> str:
        return (
            f"PrefixCache({len(self._indices)} of {self.capacity} chunks, "
            f"{self.num_hit_tokens} of {self.num_looked_up_tokens} tokens hit)"
        )

    def digests(self, prompt_ids: NDArray[np.int64], salt: str = "") -> list[bytes]:
        """Returns the digest of every whole chunk of a prompt (T,), in order; none if the cache is off.

        Prompts of different salts have no digest in common.
        """
        if not self.capacity:
            return []
        digests: list[bytes] = []
        parent = blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest() if salt else b""
        for end in range(self._chunk, len(prompt_ids) + 1, self._chunk):
            tokens = prompt_ids[end - self._chunk : end].astype(np.int64, copy=False).tobytes()
            parent = blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)
        return digests

    def look_up(self, digests: list[bytes], num_tokens: int) -> list[int]:
        """Finds the chunks that a prompt need not compute.

        Args:
            digests: Digests of the prompt's whole chunks.
            num_tokens: Tokens of the prompt. Its last one is always left to compute, since its logits are needed.

        Returns:
            Cache indices of its first chunks, in order, up to the first uncached one.
        """
        self.num_looked_up_tokens += num_tokens
        found: list[int] = []
        for digest in islice(digests, (num_tokens - 1) // self._chunk):
            index = self._indices.get(digest)
            if index is None:
                break
            found.append(index)
        for digest in reversed(digests[: len(found)]):  # children are useless without their parent, so they go first
            self._indices.move_to_end(digest)
        self.num_hit_tokens += len(found) * self._chunk
        return found

    def reserve(self, digest: bytes) -> int | None:
        """Reserves a cache index, filled by the caller at once; None if the chunk is cached, or the cache is off."""
        if digest in self._indices:
            self._indices.move_to_end(digest)
            return None
        if self._free:
            index = self._free.pop()
        elif self._indices:
            _, index = self._indices.popitem(last=False)
        else:
            return None
        self._indices[digest] = index
        return index

    def clear(self) -> None:
        """Removes every chunk, when the content of the cache is unknown."""
        self._free += self._indices.values()
        self._indices.clear()


class PrefillStep:
    """Prefills prompts. For the engine's thread alone.

    Attributes:
        prefix_cache: Which chunks are cached.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Takes a decoder whose slots the caller assigns; chunks are cached in its slots after the running ones."""
        self._decoder = decoder
        self._chunks_per_slot = decoder.max_length // decoder.prefill_chunk
        self.prefix_cache = PrefixCache(
            capacity=decoder.num_prefix_slots * self._chunks_per_slot, chunk=decoder.prefill_chunk
        )

    def __repr__(self) -> str:
        return f"PrefillStep({self._decoder!r}, {self.prefix_cache!r})"

    def read(self, chunk: Chunk) -> NDArray[np.float32]:
        """Reads a chunk of a prompt into its slot.

        Returns:
            (V,) logits after it, valid until the decoder's next call.
        """
        sequence = chunk.sequence
        token_ids = sequence.prompt_ids[chunk.start : chunk.stop]
        if not sequence.parameters.wants_prompt_log_probabilities:
            return self._decoder.prefill(sequence.slot, token_ids, chunk.start)
        logits = self._decoder.score(sequence.slot, token_ids, chunk.start)  # (T, V)
        if chunk.start == 0:
            sequence.prompt_tokens.append(TokenLogProbability(int(token_ids[0]), None))
        following = sequence.prompt_ids[chunk.start + 1 : chunk.stop + 1]  # (T,) or (T - 1,) at the end of the prompt
        log_probabilities, top_tokens = token_log_probabilities(
            logits[: len(following)], following, sequence.parameters.num_top_tokens or 0
        )
        for row in zip(following.tolist(), log_probabilities.tolist(), map(tuple, top_tokens), strict=True):
            sequence.prompt_tokens.append(TokenLogProbability(*row))
        last: NDArray[np.float32] = logits[-1]
        return last

    def read_start(self, sequence: Sequence) -> int:
        """Prefills the start tokens of a sequence with an encoded source, all but the last; returns their number.

        The last one is the first decode step's input. A search reads the start into its first slot: the other beams
        branch off from there.
        """
        token_ids = sequence.prompt_ids[:-1]
        for start in range(0, len(token_ids), self._decoder.prefill_chunk):
            chunk = token_ids[start : start + self._decoder.prefill_chunk]
            self._decoder.prefill(sequence.slot, chunk, start, sequence.cross)
        sequence.num_prefilled = len(token_ids)
        return len(token_ids)

    def share(self, reader: Sequence, sequence: Sequence) -> None:
        """Copies a prompt from the slot of another sample that has read it."""
        sequence.num_prefilled = sequence.num_cached_tokens = len(sequence.prompt_ids)
        sequence.prompt_tokens = reader.prompt_tokens
        self._decoder.copy(source=(reader.slot, 0), target=(sequence.slot, 0), length=sequence.num_prefilled)

    def reuse_chunks(self, sequence: Sequence) -> None:
        """Copies the cached chunks of a prompt into its slot."""
        if sequence.parameters.wants_prompt_log_probabilities:
            return  # these need the logits, which are not cached
        sequence.prompt_digests = self.prefix_cache.digests(sequence.prompt_ids, sequence.cache_salt)
        chunk = self._decoder.prefill_chunk
        for index in self.prefix_cache.look_up(sequence.prompt_digests, len(sequence.prompt_ids)):
            target = (sequence.slot, sequence.num_prefilled)
            self._decoder.copy(source=self._position_of(index), target=target, length=chunk)
            sequence.num_prefilled += chunk
        sequence.num_cached_tokens = sequence.num_prefilled

    def keep_chunk(self, chunk: Chunk) -> None:
        """Caches a chunk that was just read, if it is a whole one."""
        number, rest = divmod(chunk.stop, self._decoder.prefill_chunk)
        if rest or number > len(chunk.sequence.prompt_digests):
            return
        index = self.prefix_cache.reserve(chunk.sequence.prompt_digests[number - 1])
        if index is not None:
            source = (chunk.sequence.slot, chunk.start)
            self._decoder.copy(source=source, target=self._position_of(index), length=chunk.stop - chunk.start)

    def _position_of(self, index: int) -> tuple[int, int]:
        """Returns slot and position of an index of the prefix cache."""
        row, column = divmod(index, self._chunks_per_slot)
        return self._decoder.num_slots + row, column * self._decoder.prefill_chunk
