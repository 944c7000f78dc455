"""Logits processors: biases and penalties, applied before a token is chosen.

They concern few tokens of a vocabulary. So each sequence has a list, and the lists of a whole batch are
gathered, changed and scattered at once.

Shapes: n rows, V vocabulary, N tokens concerned.
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
    """Tokens whose logits one sequence changes, with the state of its text.

    Attributes:
        penalties: Repetition, presence and frequency penalty.
    """

    __slots__ = (
        "_all_entries",
        "_all_ids",
        "_indices",
        "_is_penalized",
        "_size",
        "penalties",
    )

    def __init__(self, parameters: SamplingParameters, *, prompt_ids: NDArray[np.int64] | None) -> None:
        """Starts before the first token.

        Args:
            parameters: Parameters of the sequence.
            prompt_ids: (T,) its prompt, for the repetition penalty; None if it has none.
        """
        self.penalties = (parameters.repetition_penalty, parameters.presence_penalty, parameters.frequency_penalty)
        self._is_penalized = self.penalties != (1.0, 0.0, 0.0)
        self._all_ids = np.zeros(_FIRST_ROOM, np.int64)
        self._all_entries = np.zeros((_FIRST_ROOM, 3), np.float32)
        self._indices: dict[int, int] = {}  # index of each token in both
        self._size = 0
        if parameters.logit_biases:
            ids, biases = zip(*parameters.logit_biases, strict=True)
            positions = self._add(ids)
            self._all_entries[positions, _BIAS] = biases
        if parameters.repetition_penalty != 1 and prompt_ids is not None:
            positions = self._add(np.unique(prompt_ids).tolist())
            self._all_entries[positions, _IS_SEEN] = 1

    @classmethod
    def of(cls, parameters: SamplingParameters, *, prompt_ids: NDArray[np.int64] | None) -> LogitEdits | None:
        """Returns the edits of a sequence; None if it never changes a logit."""
        changes_nothing = (
            parameters.repetition_penalty == 1
            and parameters.presence_penalty == 0
            and parameters.frequency_penalty == 0
            and not parameters.logit_biases
        )
        return None if changes_nothing else cls(parameters, prompt_ids=prompt_ids)

    def __repr__(self) -> str:
        return f"LogitEdits({self._size} tokens)"

    @property
    def is_active(self) -> bool:
        """True if any logit of the next sampling changes."""
        return self._size > 0

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The tokens (N,) whose logits change."""
        return self._all_ids[: self._size]

    @property
    def entries(self) -> NDArray[np.float32]:
        """(N, 3) for each of them: bias, times in the text, 1 if it is in the prompt or the text."""
        return self._all_entries[: self._size]

    def record(self, token_id: int) -> None:
        """Takes the sequence's next token."""
        if not self._is_penalized:
            return
        index = self._indices.get(token_id)
        if index is None:
            index = self._add((token_id,))[0]
        entry = self._all_entries[index]  # read after `_add`, which may allocate anew
        entry[_COUNT] += 1
        entry[_IS_SEEN] = 1

    def _add(self, token_ids: Sequence[int]) -> list[int]:
        """Adds missing entries of tokens; returns the indices of all."""
        positions = self._indices
        found = [positions.setdefault(token_id, len(positions)) for token_id in token_ids]
        if (room := len(positions)) > len(self._all_ids):
            spare = max(room, 2 * len(self._all_ids)) - len(self._all_ids)
            self._all_ids = np.pad(self._all_ids, (0, spare))
            self._all_entries = np.pad(self._all_entries, ((0, spare), (0, 0)))
        self._all_ids[found] = token_ids
        self._size = room
        return found


def apply_edits(edits: Sequence[LogitEdits], rows: NDArray[np.intp], logits: NDArray[np.float32]) -> None:
    """Changes the logits of some rows as their sequences ask, in float32 and in the order of `sampler.py`.

    Args:
        edits: Edits of each row.
        rows: (n,) their rows in `logits`.
        logits: (R, V) float32, contiguous; changed in place.
    """
    flat = logits.reshape(-1)
    token_ids = [one.token_ids for one in edits]
    sizes = np.array([len(ids) for ids in token_ids])
    if sizes.any():
        positions = np.repeat(rows * logits.shape[1], sizes) + np.concatenate(token_ids)  # (N,)
        entries = np.concatenate([one.entries for one in edits])  # (N, 3)
        penalties = np.array([one.penalties for one in edits], np.float32)  # (n, 3)
        flat[positions] = _changed(flat[positions], entries, np.repeat(penalties, sizes, axis=0))


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
