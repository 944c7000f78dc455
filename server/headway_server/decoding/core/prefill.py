"""Reads prompts into slots, chunk by chunk, and caches the chunks for later prompts that begin alike.

A chunk is identified by all tokens from the beginning of its prompt to its own end. Two prompts share a chunk only if
they are equal up to there. The tokens enter a chain of 128-bit BLAKE2b digests: a chunk's is that of its parent's
digest and its own tokens, with the keys of its images' embeddings. If its end divides tokens that attend to each other,
the rest of these enters too, and no prompt goes on from there. The chain begins with the salt of the sequence, so
that prompts of different salts share nothing: what one caller has asked shows in no answer to another, nor in its time.
Only whole chunks are cached, as prefill wrote them, so a prompt that begins with them goes on from the very bits that
it would have computed itself. State without positions is copied as it is after a chunk, and for the samples of a prompt
as it is after the prompt.

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.core.scheduler import Chunk
from headway_server.decoding.interfaces import Block, Decoder, PromptMedia
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

    def __init__(self, *, capacity: int, chunk: int, needs_all: bool = True) -> None:
        """Starts empty.

        Args:
            capacity: Chunks that there is room for; 0 turns the cache off.
            chunk: Tokens of a chunk.
            needs_all: False if the last of a prompt's chunks stands for those before it, as a state does.
        """
        self.capacity = capacity
        self.num_hit_tokens = 0
        self.num_looked_up_tokens = 0
        self._chunk = chunk
        self._needs_all = needs_all
        self._indices: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._free = list(range(capacity))

    def __repr__(self) -> str:
        return (
            f"PrefixCache({len(self._indices)} of {self.capacity} chunks, "
            f"{self.num_hit_tokens} of {self.num_looked_up_tokens} tokens hit)"
        )

    def digests(self, prompt_ids: NDArray[np.int64], salt: str = "", media: PromptMedia | None = None) -> list[bytes]:
        """Returns the digest of every whole chunk of a prompt (T,), in order; none if the cache is off.

        Prompts of different salts have no digest in common.
        """
        if not self.capacity:
            return []
        digests: list[bytes] = []
        parent = _digest(salt.encode()) if salt else b""
        for end in range(self._chunk, len(prompt_ids) + 1, self._chunk):
            start = end - self._chunk
            parent = _digest(parent + _bytes_of(prompt_ids[start:end]) + _keys_of(media, start, end))
            block = _block_around(media, end)
            if block is None:
                digests.append(parent)
            else:
                rest = _bytes_of(prompt_ids[end : block.stop]) + _keys_of(media, end, block.stop)
                digests.append(_digest(parent + rest))
        while digests and _block_around(media, len(digests) * self._chunk) is not None:
            digests.pop()
        return digests

    def look_up(self, digests: list[bytes], num_tokens: int, media: PromptMedia | None = None) -> tuple[list[int], int]:
        """Finds the chunks that a prompt need not compute.

        Args:
            digests: Digests of the prompt's whole chunks.
            num_tokens: Tokens of the prompt. Its last one is always left to compute, since its logits are needed.
            media: The prompt's images.

        Returns:
            Cache indices of its first chunks, in order, up to the first uncached one, or of the last of those that are
            cached alone; and the number of tokens up to there.
        """
        self.num_looked_up_tokens += num_tokens
        asked = digests[: (num_tokens - 1) // self._chunk]
        cached = [digest in self._indices for digest in asked]
        count = [*cached, False].index(False) if self._needs_all else len(asked) - [*cached[::-1], True].index(True)
        while _block_around(media, count * self._chunk) is not None:
            count -= 1
        used = asked[:count] if self._needs_all else asked[:count][-1:]
        found = [self._indices[digest] for digest in used]
        for digest in reversed(used):  # children are useless without their parent, so they go first
            self._indices.move_to_end(digest)
        self.num_hit_tokens += count * self._chunk
        return found, count * self._chunk

    def find(self, digest: bytes) -> int | None:
        """Returns the cache index of a digest; None if it is not cached."""
        return self._indices.get(digest)

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


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _bytes_of(token_ids: NDArray[np.int64]) -> bytes:
    return token_ids.astype(np.int64, copy=False).tobytes()


def _block_around(media: PromptMedia | None, place: int) -> Block | None:
    return None if media is None else media.block_around(place)


def _keys_of(media: PromptMedia | None, start: int, stop: int) -> bytes:
    """Returns the keys of the embeddings of tokens `start` to before `stop`."""
    part = None if media is None else media.between(start, stop)
    return b"" if part is None else b"".join(part.keys)


def _digest_of_prompt(sequence: Sequence) -> bytes:
    """Returns the digest of the states after a whole prompt, which is that of no chunk."""
    prompt = _bytes_of(sequence.prompt_ids) + _keys_of(sequence.media, 0, len(sequence.prompt_ids))
    return _digest(b"states" + _digest(sequence.cache_salt.encode()) + prompt)


class PrefillStep:
    """Prefills prompts. For the engine's thread alone.

    Attributes:
        prefix_cache: Which chunks are cached.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Takes a decoder whose slots the caller assigns."""
        self._decoder = decoder
        self.prefix_cache = PrefixCache(
            capacity=decoder.num_cached_chunks, chunk=decoder.prefill_chunk, needs_all=decoder.has_positions
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
        media = None if sequence.media is None else sequence.media.between(chunk.start, chunk.stop)
        if not sequence.parameters.wants_prompt_log_probabilities:
            return self._decoder.prefill(sequence.slot, token_ids, chunk.start, media=media)
        logits = self._decoder.score(sequence.slot, token_ids, chunk.start, media=media)  # (T, V)
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

    def keep_prompt(self, sequence: Sequence) -> None:
        """Keeps the states after a prompt that other samples will share."""
        if not self._decoder.keeps_positions:
            index = self.prefix_cache.reserve(_digest_of_prompt(sequence))
            if index is not None:
                self._decoder.keep_states(sequence.slot, index)

    def share(self, reader: Sequence, sequence: Sequence) -> bool:
        """Copies a prompt from the slot of another sample that has read it; False if its state is no more there."""
        if not self._decoder.can_return(len(sequence.prompt_ids), reader.num_written):
            return False
        index = None
        if not self._decoder.keeps_positions:
            index = self.prefix_cache.find(_digest_of_prompt(sequence))
            if index is None:
                return False
        sequence.num_prefilled = sequence.num_cached_tokens = len(sequence.prompt_ids)
        sequence.prompt_tokens = reader.prompt_tokens
        self._decoder.copy(reader.slot, sequence.slot, sequence.num_prefilled)
        if index is not None:  # the reader's own have gone on
            self._decoder.reuse_states(index, sequence.slot)
        return True

    def reuse_chunks(self, sequence: Sequence) -> None:
        """Copies the cached chunks of a prompt into its slot."""
        if sequence.parameters.wants_prompt_log_probabilities:
            return  # these need the logits, which are not cached
        sequence.prompt_digests = self.prefix_cache.digests(sequence.prompt_ids, sequence.cache_salt, sequence.media)
        indices, num_tokens = self.prefix_cache.look_up(
            sequence.prompt_digests, len(sequence.prompt_ids), sequence.media
        )
        if indices:
            self._decoder.reuse_chunks(indices, sequence.slot)
        sequence.num_prefilled = sequence.num_cached_tokens = num_tokens

    def keep_chunk(self, chunk: Chunk) -> None:
        """Caches the whole chunks that end with a step, or within it."""
        size, digests = self._decoder.prefill_chunk, chunk.sequence.prompt_digests
        for number in range(chunk.start // size, min(chunk.stop // size, len(digests))):
            index = self.prefix_cache.reserve(digests[number])
            if index is not None:
                self._decoder.keep_chunk(chunk.sequence.slot, number * size, index, chunk.stop)
