"""What a sequence's parameters do to single logits: biases, penalties, and no end before its time.

Few tokens of a vocabulary are concerned, so they are held as a list a sequence, and those of a whole batch are
gathered, changed and scattered at once.

Shapes: n rows, V vocabulary, N tokens concerned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sequence import SamplingParameters

_FIRST_ROOM = 64
_BIAS, _COUNT, _IS_SEEN = range(3)  # columns of an entry: what is added; times in the text; in the prompt or the text
_REPETITION, _PRESENCE, _FREQUENCY = range(3)  # columns of a sequence's penalties


class LogitEdits:
    """The tokens whose logits one sequence changes, and its text as far as that matters.

    Attributes:
        penalties: For repetition, presence and frequency.
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
        """Begins with what is known before the first token.

        Args:
            parameters: Of the sequence.
            prompt_ids: (T,) its prompt, for the repetition penalty; None where it has none.
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
        """Returns what a sequence changes, None if it never changes anything."""
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
        """Whether they change anything of the next draw."""
        return self._size > 0 or self.forbids_end

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The tokens (N,) whose logits change."""
        return self._all_ids[: self._size]

    @property
    def entries(self) -> NDArray[np.float32]:
        """What is known of each of them, (N, 3): bias, times in the text, whether in the prompt or the text."""
        return self._all_entries[: self._size]

    @property
    def forbids_end(self) -> bool:
        """Whether the text is too short to end with the next draw."""
        return self._num_new_tokens < self._min_new_tokens

    def record(self, token_id: int) -> None:
        """Takes the sequence's next token."""
        self._num_new_tokens += 1
        if not self._is_penalized:
            return
        place = self._places.get(token_id)
        if place is None:
            place = self._add((token_id,))[0]
        entry = self._all_entries[place]  # looked up after `_add`, which may make room anew
        entry[_COUNT] += 1
        entry[_IS_SEEN] = 1

    def _add(self, token_ids: Sequence[int]) -> list[int]:
        """Makes entries of tokens that may have none yet; returns their places."""
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
    """Changes the logits of some rows as their sequences ask for, in float32 and in the order of `sampler.py`.

    Args:
        edits: Of each of the rows.
        rows: (n,) which rows of `logits` they are of.
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
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite afterwards is reported with its row
        logits = logits + entries[:, _BIAS]
        repetition = np.where(entries[:, _IS_SEEN] > 0, penalties[:, _REPETITION], np.float32(1))
        logits = np.where(logits > 0, logits / repetition, logits * repetition)
        count = entries[:, _COUNT]
        logits -= penalties[:, _FREQUENCY] * count
        logits -= penalties[:, _PRESENCE] * (count > 0)
    return logits
