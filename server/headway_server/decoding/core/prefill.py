"""Reading prompts into slots: chunk by chunk, from chunks that are kept, or from another sample (docs/engine.md).

Shapes: T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.core.prefix_cache import PrefixCache
from headway_server.decoding.core.scheduler import Chunk
from headway_server.decoding.interfaces import Decoder
from headway_server.decoding.sampling.sampler import token_log_probabilities
from headway_server.decoding.sequence import Sequence, TokenLogProbability


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
