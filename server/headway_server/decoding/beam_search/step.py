"""A step of the sentences that are searched with beams: decode, rank, advance, copy, hand out (docs/engine.md).

Shapes: B sentences of K beams, R = B K rows, V vocabulary, T tokens of a hypothesis, S source tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Elements

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.beam_search.beams import BeamSearch, Continuation, Found
from headway_server.decoding.beam_search.block import BeamBlock, SlotCopy
from headway_server.decoding.beam_search.continuations import (
    num_candidates,
    rank_plain,
    rank_restricted,
)
from headway_server.decoding.beam_search.hypothesis import Hypothesis
from headway_server.decoding.core.outbox import Outbox
from headway_server.decoding.interfaces import Decoder
from headway_server.decoding.sampling.ranked_rows import RowRanker
from headway_server.decoding.sequence import Sequence, SequenceResult


class SearchStep:
    """Takes steps of searches. For the engine's thread alone."""

    def __init__(self, decoder: Decoder, outbox: Outbox) -> None:
        """Uses a decoder whose slots the caller assigns; results go to `outbox`."""
        self._decoder = decoder
        self._outbox = outbox
        self._ranker = RowRanker(num_rows=decoder.num_slots, vocab_size=decoder.vocab_size)

    def __repr__(self) -> str:
        return f"SearchStep({self._decoder!r})"

    def begin(self, sequence: Sequence) -> None:
        """Begins the search of a sequence that has its slots."""
        assert sequence.search is not None, "it asks for one"
        search = BeamSearch(sequence.search, max_new_tokens=sequence.parameters.max_new_tokens, eos_id=sequence.eos_id)
        sequence.block = BeamBlock(search, sequence.num_beams)

    def run(self, sequences: Elements[Sequence], first_slot: int) -> tuple[list[Sequence], list[Sequence]]:
        """Takes every search of a group one token further, and hands out what has ended.

        Args:
            sequences: All of a group, in the order of their slots, each of K beams.
            first_slot: Where the group begins.

        Returns:
            Those whose search has ended and whose results were handed out; and those with logits that mean nothing.
        """
        blocks = [_block(sequence) for sequence in sequences]
        logits = self._decoder.decode(*_inputs(sequences, blocks), first_slot)  # (R, V)
        ended: list[Sequence] = []
        invalid: list[Sequence] = []
        copies: list[SlotCopy] = []
        ranked = self._rank(blocks, logits)
        for sequence, block, continuations in zip(sequences, blocks, ranked, strict=True):
            if continuations is None:
                invalid.append(sequence)
                continue
            num_written = block.search.num_tokens + 1
            block.search.advance(continuations)
            sequence.num_new_tokens = block.search.num_tokens
            if block.search.is_finished:
                ended.append(sequence)
            else:
                copies += block.reorder(sequence.slot, num_written)
        if copies:
            self._decoder.reorder(copies)
        return ended, invalid

    def _rank(self, blocks: Elements[BeamBlock], logits: NDArray[np.float32]) -> list[list[Continuation] | None]:
        """Ranks what may follow, for each sentence; None where a beam's logits mean nothing."""
        num_beams = len(blocks[0].slots)
        searches = [block.search for block in blocks]
        rows = np.array([block.slots for block in blocks])  # (B, K)
        rows += (np.arange(len(blocks)) * num_beams)[:, np.newaxis]
        log_probabilities = np.array([block.log_probabilities() for block in blocks])  # (B, K)
        restricted = [number for number, search in enumerate(searches) if not search.is_plain]
        banned = {
            int(row): token_ids
            for number in restricted
            if searches[number].forced_token is None
            for beam, row in zip(searches[number].beams, rows[number], strict=False)
            if (token_ids := searches[number].banned(beam))
        }
        wanted = max((num_candidates(searches[number], num_beams) for number in restricted), default=0)
        count = min(max(wanted, 2 * num_beams), logits.shape[1])
        ranked = self._ranker.rank(logits, count, banned)
        lists: list[list[Continuation] | None] = [*rank_plain(ranked, rows, log_probabilities)]
        for number in restricted:
            if searches[number].is_restricted:
                lists[number] = rank_restricted(ranked, searches[number], rows[number].tolist())
        is_finite = np.isfinite(ranked.normalizers)
        if not is_finite.all():
            is_beam = log_probabilities != -np.inf
            for number in np.flatnonzero((~is_finite[rows] & is_beam).any(axis=1)).tolist():
                lists[number] = None
        return lists

    def hand_out(self, sequence: Sequence) -> None:
        """Hands out the result of a search that has ended, while the sequence still has its slots."""
        found = _block(sequence).search.hypotheses()
        hypotheses = tuple(self._hypothesis(sequence, one) for one in found)
        best = hypotheses[0]
        result = SequenceResult(
            text=best.text,
            finish_reason=best.finish_reason,
            num_new_tokens=best.num_new_tokens,
            log_probability=best.log_probability,
            arrived_at=sequence.arrived_at,
            started_at=sequence.started_at,
            finished_at=time.monotonic(),
            hypotheses=hypotheses,
        )
        self._outbox.add_end(sequence.reply, result)

    def _hypothesis(self, sequence: Sequence, found: Found) -> Hypothesis:
        return Hypothesis(
            token_ids=found.token_ids,
            text=sequence.text.whole(found.token_ids),
            log_probability=found.log_probability,
            score=found.score,
            num_new_tokens=found.num_new_tokens,
            finish_reason=found.finish_reason,
            alignment=align(self._decoder, sequence, found.token_ids) if sequence.wants_alignment else None,
        )


def align(decoder: Decoder, sequence: Sequence, token_ids: Elements[int]) -> NDArray[np.float32]:
    """Returns the attention (T, S) of each token of a translation over its source.

    Its sequence must still have its slots, and does not run any more: the first of them is overwritten.
    """
    if not token_ids:
        return np.zeros((0, len(sequence.input_ids)), np.float32)
    inputs = np.array([sequence.first_id, *token_ids[:-1]], np.int64)
    return decoder.align(sequence.slot, sequence.cross, inputs)


def _block(sequence: Sequence) -> BeamBlock:
    block: BeamBlock | None = sequence.block
    assert block is not None, "its search has begun"
    return block


def _inputs(sequences: Elements[Sequence], blocks: Elements[BeamBlock]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns what each slot reads next, and at which position, (R,) each."""
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence, block in zip(sequences, blocks, strict=True):
        assert sequence.first_id is not None, "a translation begins with a token of its own"
        token_ids += block.next_inputs(sequence.first_id)
        positions += [block.search.num_tokens] * len(block.slots)
    return np.array(token_ids), np.array(positions)
