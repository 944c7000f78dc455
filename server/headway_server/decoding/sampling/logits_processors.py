"""Logits processors: biases, penalties, minimum length and masks, applied before a token is chosen.

Biases and penalties concern few tokens of a vocabulary. So each sequence has a list of its own, and those of a whole
batch are gathered, changed and scattered at once. A mask is packed: bit i % 32 of word i // 32 is set if token i is
allowed.

Shapes: n rows, V vocabulary, N tokens concerned, M words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.parameters import SamplingParameters

_FIRST_ROOM = 64
_BIAS, _COUNT, _IS_SEEN = range(3)  # columns of an entry: bias; times in the text; 1 if it is in the prompt or the text
_REPETITION, _PRESENCE, _FREQUENCY = range(3)  # columns of a sequence's penalties


class LogitEdits:
    """The tokens whose logits one sequence changes, and what of its text matters for that.

    Attributes:
        penalties: Repetition, presence and frequency penalty.
        end_ids: (K,) tokens that end the text.
    """

    __slots__ = (
        "_all_entries",
        "_all_ids",
        "_is_penalized",
        "_min_new_tokens",
        "_num_new_tokens",
        "_places",
        "_size",
        "end_ids",
        "penalties",
    )

    def __init__(
        self, parameters: SamplingParameters, *, prompt_ids: NDArray[np.int64] | None, end_ids: Sequence[int]
    ) -> None:
        """Starts before the first token.

        Args:
            parameters: Of the sequence.
            prompt_ids: (T,) its prompt, for the repetition penalty; None if it has none.
            end_ids: Tokens that may not come before `min_new_tokens` others.
        """
        self.penalties = (parameters.repetition_penalty, parameters.presence_penalty, parameters.frequency_penalty)
        self._is_penalized = self.penalties != (1.0, 0.0, 0.0)
        self._min_new_tokens = parameters.min_new_tokens if end_ids else 0
        self.end_ids = np.array(end_ids, np.int64)
        self._num_new_tokens = 0
        self._all_ids = np.zeros(_FIRST_ROOM, np.int64)
        self._all_entries = np.zeros((_FIRST_ROOM, 3), np.float32)
        self._places: dict[int, int] = {}  # token to its place in both
        self._size = 0
        if parameters.logit_biases:
            ids, biases = zip(*parameters.logit_biases, strict=True)
            places = self._add(ids)
            self._all_entries[places, _BIAS] = biases
        if parameters.repetition_penalty != 1 and prompt_ids is not None:
            places = self._add(np.unique(prompt_ids).tolist())
            self._all_entries[places, _IS_SEEN] = 1

    @classmethod
    def of(
        cls, parameters: SamplingParameters, *, prompt_ids: NDArray[np.int64] | None, end_ids: Sequence[int]
    ) -> LogitEdits | None:
        """Returns the edits of a sequence; None if it never changes a logit."""
        changes_nothing = (
            parameters.repetition_penalty == 1
            and parameters.presence_penalty == 0
            and parameters.frequency_penalty == 0
            and not parameters.logit_biases
            and not (parameters.min_new_tokens and end_ids)
        )
        return None if changes_nothing else cls(parameters, prompt_ids=prompt_ids, end_ids=end_ids)

    def __repr__(self) -> str:
        return f"LogitEdits({self._size} tokens, after {self._num_new_tokens} new ones)"

    @property
    def is_active(self) -> bool:
        """True if they change any logit of the next draw."""
        return self._size > 0 or self.forbids_end

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The tokens (N,) whose logits change."""
        return self._all_ids[: self._size]

    @property
    def entries(self) -> NDArray[np.float32]:
        """(N, 3) for each of them: bias, times in the text, 1 if it is in the prompt or the text."""
        return self._all_entries[: self._size]

    @property
    def forbids_end(self) -> bool:
        """True if the text is too short to end with the next draw."""
        return self._num_new_tokens < self._min_new_tokens

    def record(self, token_id: int) -> None:
        """Takes the sequence's next token."""
        self._num_new_tokens += 1
        if not self._is_penalized:
            return
        place = self._places.get(token_id)
        if place is None:
            place = self._add((token_id,))[0]
        entry = self._all_entries[place]  # read after `_add`, which may allocate anew
        entry[_COUNT] += 1
        entry[_IS_SEEN] = 1

    def _add(self, token_ids: Sequence[int]) -> list[int]:
        """Adds entries for tokens that have none; returns the places of all."""
        places = self._places
        found = [places.setdefault(token_id, len(places)) for token_id in token_ids]
        if (room := len(places)) > len(self._all_ids):
            spare = max(room, 2 * len(self._all_ids)) - len(self._all_ids)
            self._all_ids = np.pad(self._all_ids, (0, spare))
            self._all_entries = np.pad(self._all_entries, ((0, spare), (0, 0)))
        self._all_ids[found] = token_ids
        self._size = room
        return found


def apply_edits(edits: Sequence[LogitEdits], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
    """Changes the logits of some rows as their sequences ask, in float32 and in the order of `sampler.py`.

    Args:
        edits: Of each of the rows.
        rows: (n,) their rows in `logits`.
        logits: (R, V) float32, contiguous; changed in place.
    """
    flat = logits.reshape(-1)
    token_ids = [one.token_ids for one in edits]
    sizes = np.array([len(ids) for ids in token_ids])
    if sizes.any():
        places = np.repeat(rows * logits.shape[1], sizes) + np.concatenate(token_ids)  # (N,)
        entries = np.concatenate([one.entries for one in edits])  # (N, 3)
        penalties = np.array([one.penalties for one in edits], np.float32)  # (n, 3)
        flat[places] = _changed(flat[places], entries, np.repeat(penalties, sizes, axis=0))
    for row, one in zip(rows.tolist(), edits, strict=True):
        if one.forbids_end:
            logits[row, one.end_ids] = -np.inf


def _changed(
    logits: NDArray[np.float32], entries: NDArray[np.float32], penalties: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Returns the changed logits (N,) of tokens with `entries` (N, 3), under `penalties` (N, 3)."""
    with np.errstate(over="ignore", invalid="ignore"):  # a row that is not finite afterwards is reported
        logits = logits + entries[:, _BIAS]
        repetition = np.where(entries[:, _IS_SEEN] > 0, penalties[:, _REPETITION], np.float32(1))
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        count = entries[:, _COUNT]
        logits -= penalties[:, _FREQUENCY] * count
        logits -= penalties[:, _PRESENCE] * (count > 0)
    return logits


_WORD_BITS = 32
_BYTE_BITS = 8
_BLOCK_TOKENS = 2**17
"""Logits that are masked at a time, so that what is added to them stays in a core's cache."""


def _penalty_table() -> NDArray[np.float32]:
    """Returns what each value of a mask's byte adds to its 8 logits, 0 or minus infinity, (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(-np.inf))


def pack_mask(token_ids: NDArray[np.int64], num_words: int) -> NDArray[np.int32]:
    """Returns the words (M,) of a mask in which the bits of some tokens are set."""
    bits = np.zeros(num_words * _WORD_BITS, np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


class TokenMasks:
    """The masks of all slots. A mask is for one draw."""

    def __init__(self, *, num_slots: int, vocab_size: int) -> None:
        """Allocates the masks when the first is needed.

        Args:
            num_slots: Slots there are.
            vocab_size: V.
        """
        self._num_words = -(-vocab_size // _WORD_BITS)
        self._words: NDArray[np.int32] | None = None  # (num_slots, M)
        self._table: NDArray[np.float32] = np.zeros((0, _BYTE_BITS), np.float32)
        self.is_set = np.zeros(num_slots, np.bool_)
        """True for slots that may choose only what their masks allow."""

    def __repr__(self) -> str:
        return f"TokenMasks({np.count_nonzero(self.is_set)} of {len(self.is_set)} slots)"

    def row(self, slot: int) -> NDArray[np.int32]:
        """Returns the words (M,) of a slot's mask, to be filled in place."""
        if self._words is None:
            self._words = np.zeros((len(self.is_set), self._num_words), np.int32)
            self._table = _penalty_table()
        row: NDArray[np.int32] = self._words[slot]
        return row

    def set(self, slot: int, mask: NDArray[np.int32]) -> None:
        """Sets a slot's mask (M,), which may be its own words already."""
        row = self.row(slot)
        assert mask.shape == row.shape, "a mask has a bit for every token"
        row[:] = mask
        self.is_set[slot] = True

    def clear(self, slots: int | NDArray[np.intp]) -> None:
        """Allows slots every token."""
        self.is_set[slots] = False

    def move(self, source: int, target: int) -> None:
        """Moves a slot's mask to another slot."""
        self.is_set[target] = self.is_set[source]
        if self.is_set[source]:
            self.row(target)[:] = self.row(source)
        self.is_set[source] = False

    def apply(self, slots: NDArray[np.intp], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
        """Sets the logits of tokens that are not allowed to minus infinity.

        Args:
            slots: (n,) slots, all of them with a mask.
            rows: (n,) their rows in `logits`.
            logits: (R, V) float32; changed in place.
        """
        assert self._words is not None, "a mask is set"
        width = logits.shape[1]
        step = max(_BLOCK_TOKENS // width, 1)
        for start in range(0, len(slots), step):
            words = self._words[slots[start : start + step]].astype("<i4", copy=False)
            # By bytes: choosing between logit and minus infinity one by one is many times slower.
            addends = np.empty((*words.view(np.uint8).shape, _BYTE_BITS), np.float32)
            self._table.take(words.view(np.uint8), axis=0, out=addends, mode="clip")
            with np.errstate(invalid="ignore"):  # a row with an infinite logit is reported
                logits[rows[start : start + step]] += addends.reshape(len(words), -1)[:, :width]
