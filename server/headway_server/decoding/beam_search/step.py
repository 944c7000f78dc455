"""A step of all sequences that are searched with beams: decode, rank, advance, copy (docs/beams.md).

Shapes: B sequences of K beams, R = B K rows, C candidates of a row, T tokens of a hypothesis, S source positions,
V vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Elements
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.beam_search.search import BeamBlock, BeamSearch, Continuation, Found
from headway_server.decoding.interfaces import Decoder, SlotCopy
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.softmax import RankedRows, RowRanker
from headway_server.decoding.sequence import Hypothesis, Sequence, SequenceResult


class SearchStep:
    """Makes steps of searches. For the engine's thread alone."""

    def __init__(self, decoder: Decoder, masks: TokenMasks) -> None:
        """Uses a decoder whose slots the caller assigns, and their masks."""
        self._decoder = decoder
        self._masks = masks
        self._ranker = RowRanker(masks)

    def __repr__(self) -> str:
        return f"SearchStep({self._decoder!r})"

    def begin(self, sequence: Sequence) -> None:
        """Begins the search of a sequence that has its slots."""
        assert sequence.search is not None, "the caller checks it"
        search = BeamSearch(
            sequence.search,
            max_new_tokens=sequence.parameters.max_new_tokens,
            eos_id=sequence.eos_id,
            rule=sequence.rule,
        )
        sequence.search_state = BeamBlock(search, sequence.num_beams)
        self._masks.clear(np.arange(sequence.slot, sequence.slot + sequence.num_beams))

    def run(self, sequences: Elements[Sequence], first_slot: int) -> tuple[list[Sequence], list[Sequence]]:
        """Takes every search of a group one token further.

        Args:
            sequences: All of a group, in the order of their slots, each of K beams.
            first_slot: Where the group begins.

        Returns:
            The sequences whose search has ended, which still have their slots; and those whose logits are not finite.
        """
        blocks = [_block(sequence) for sequence in sequences]
        num_beams = len(blocks[0].slots)
        # All continuations of a beam are in one bank, except for the tokens that bring it nearer to a phrase. So the
        # best 2 K of that bank are among the best 2 K plus as many more as there are such tokens.
        num_wanted = max(block.search.num_wanted for block in blocks)
        count = min(2 * num_beams + num_wanted, self._decoder.vocab_size)
        logits = self._decoder.decode(*_inputs(sequences, blocks), first_slot, num_likeliest=count)  # (R, V)
        ended: list[Sequence] = []
        invalid: list[Sequence] = []
        copies: list[SlotCopy] = []
        ranked = self._rank(blocks, first_slot, logits, count)
        for sequence, block, continuations in zip(sequences, blocks, ranked, strict=True):
            if continuations is None:
                invalid.append(sequence)
                continue
            num_written = len(sequence.prompt_ids) + block.search.num_tokens
            block.search.advance(continuations)
            sequence.num_new_tokens = block.search.num_tokens
            if block.search.is_finished:
                ended.append(sequence)
            else:
                copies += block.reorder(sequence.slot, num_written)
        if copies:
            self._decoder.reorder(copies)
        return ended, invalid

    def _rank(
        self, blocks: Elements[BeamBlock], first_slot: int, logits: NDArray[np.float32], count: int
    ) -> list[list[Continuation] | None]:
        """Ranks each sequence's continuations, `count` tokens a row; None if a beam's logits are not finite."""
        num_beams = len(blocks[0].slots)
        slots = np.arange(first_slot, first_slot + len(logits))
        rows = np.array([block.slots for block in blocks])  # (B, K)
        rows += (np.arange(len(blocks)) * num_beams)[:, np.newaxis]
        log_probabilities = np.array([block.log_probabilities() for block in blocks])  # (B, K)
        for block, of_beams in zip(blocks, rows.tolist(), strict=True):
            for beam, row in zip(block.search.beams, of_beams, strict=False):
                if beam.rule is not None or beam.required is not None:
                    beam.allow(self._masks.begin(first_slot + row), logits[row])
        ranked = self._ranker.rank(logits, count, slots, self._decoder.ranking)
        lists: list[list[Continuation] | None] = [*rank_plain(ranked, rows, log_probabilities)]
        for number, block in enumerate(blocks):
            if block.search.num_banks > 1:
                lists[number] = self._rank_banks(ranked, block.search, rows[number].tolist(), first_slot)
        self._masks.clear(slots)
        is_finite = np.isfinite(ranked.normalizers)
        if not is_finite.all():
            is_beam = log_probabilities != -np.inf
            for number in np.flatnonzero((~is_finite[rows] & is_beam).any(axis=1)).tolist():
                lists[number] = None
        return lists

    def _rank_banks(
        self, ranked: RankedRows, search: BeamSearch, rows: Elements[int], first_slot: int
    ) -> list[Continuation]:
        """Ranks the allowed continuations of a sequence with required phrases.

        Args:
            ranked: The candidates of each row.
            search: The search.
            rows: The row of each beam.
            first_slot: The slot of row 0.
        """
        continuations: list[Continuation] = []
        for number, (beam, row) in enumerate(zip(search.beams, rows, strict=False)):
            found = zip(ranked.token_ids[row].tolist(), ranked.log_probabilities[row].tolist(), strict=True)
            candidates = {token_id: value for token_id, value in found if value != -np.inf}
            if beam.required is not None and (wanted := list(beam.required.wanted())):
                may_follow = self._masks.allows(np.array([first_slot + row]), np.array([wanted]))[0]
                for token_id in itertools.compress(wanted, may_follow):
                    candidates[token_id] = ranked.log_probability(row, token_id)
            continuations += [
                Continuation(beam.log_probability + log_probability, number, token_id)
                for token_id, log_probability in candidates.items()
                if log_probability != -np.inf
            ]
        return sorted(continuations, key=lambda it: (-it.log_probability, it.beam, it.token_id))

    def result(self, sequence: Sequence) -> SequenceResult:
        """Returns the result of a search that has ended, of a sequence that still has its slots."""
        search = _block(sequence).search
        found: list[tuple[Any, Found]] = []  # of several that read alike, the best
        for one in search.found:
            output = sequence.output.whole(one.token_ids)
            if all(output != other for other, _ in found):
                found.append((output, one))
            if len(found) == search.num_hypotheses:
                break
        hypotheses = tuple(self._hypothesis(sequence, output, one) for output, one in found)
        best = hypotheses[0]
        return SequenceResult(
            output=best.output,
            finish_reason=best.finish_reason,
            num_new_tokens=best.num_new_tokens,
            log_probability=best.log_probability,
            arrived_at=sequence.arrived_at,
            started_at=sequence.started_at,
            finished_at=time.monotonic(),
            hypotheses=hypotheses,
        )

    def _hypothesis(self, sequence: Sequence, output: Any, found: Found) -> Hypothesis:
        return Hypothesis(
            token_ids=found.token_ids,
            output=output,
            log_probability=found.log_probability,
            score=found.score,
            num_new_tokens=found.num_new_tokens,
            finish_reason=found.finish_reason,
            alignment=align(self._decoder, sequence, found.token_ids) if sequence.wants_alignment else None,
        )


def rank_plain(
    ranked: RankedRows, rows: NDArray[np.int64], log_probabilities: NDArray[np.float64]
) -> list[list[Continuation]]:
    """Ranks the continuations of sequences that have one bank.

    Args:
        ranked: The candidates of each row.
        rows: (B, K) int64 row of each beam; any row without a beam.
        log_probabilities: (B, K) float64 of each beam so far; minus infinity without a beam.

    Returns:
        The best 2 K of each sequence, as `BeamSearch.advance` takes them.
    """
    num_sequences, num_beams = rows.shape
    width = min(2 * num_beams, ranked.token_ids.shape[1])
    sums = log_probabilities[:, :, np.newaxis] + ranked.log_probabilities[rows, :width]  # (B, K, C)
    flat = sums.reshape(num_sequences, num_beams * width)
    order = np.argsort(-flat, axis=1, kind="stable")[:, : 2 * num_beams]  # stable: the lower beam first among equals
    sums = np.take_along_axis(flat, order, axis=1)
    token_ids = np.take_along_axis(ranked.token_ids[rows, :width].reshape(flat.shape), order, axis=1)
    beams = order // width
    lists = zip(sums.tolist(), beams.tolist(), token_ids.tolist(), strict=True)
    return [
        [Continuation(*row) for row in zip(*columns, strict=True) if row[0] != -np.inf]  # (2 K,) of each
        for columns in lists
    ]


def align(decoder: Decoder, sequence: Sequence, token_ids: Elements[int]) -> NDArray[np.float32]:
    """Returns the attention (T, S) of each new token of a sequence over its source.

    The sequence has ended and still has its slots: the first of them is overwritten.
    """
    if not token_ids:
        return np.zeros((0, sequence.cross.num_positions), np.float32)
    inputs = np.concatenate([sequence.prompt_ids, np.array(token_ids[:-1], np.int64)])
    return decoder.align(sequence.slot, sequence.cross, inputs, len(sequence.prompt_ids))


def _block(sequence: Sequence) -> BeamBlock:
    block: BeamBlock | None = sequence.search_state
    assert block is not None, "its search has begun"
    return block


def _inputs(sequences: Elements[Sequence], blocks: Elements[BeamBlock]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns each slot's next input token and its position, (R,) each."""
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence, block in zip(sequences, blocks, strict=True):
        token_ids += block.next_inputs(int(sequence.prompt_ids[-1]))
        positions += [len(sequence.prompt_ids) - 1 + block.search.num_tokens] * len(block.slots)
    return np.array(token_ids), np.array(positions)
