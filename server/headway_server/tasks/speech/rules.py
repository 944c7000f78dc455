"""Which tokens may follow in a transcript: timestamps in pairs and in order, as Whisper's decoder has them.

Radford et al. 2022 (arXiv 2212.04356), section 4.5 and the code published with it. The first timestamp begins a
segment, the second ends it:

1. Suppressed tokens never follow, and those of `begin_suppressed` not at the beginning.
2. With timestamps: the first token is one, at most `max_initial_timestamp` steps from the beginning of the window.
   After two, text follows; after one that ends a segment, the beginning of the next or the end of the text. They never
   go back, and none but the second of a pair stands still.
3. If all timestamps together are likelier than the likeliest other token, one of them follows.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Elements
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import SpeechTokens

_NONE: Final = np.empty(0, np.int64)


class TranscriptRule:
    """The rule of one transcript; a `TokenRule`."""

    def __init__(self, tokens: SpeechTokens, *, suppressed: Elements[int], eos_id: int, timestamps: bool) -> None:
        """Makes the rule.

        Args:
            tokens: Of the model.
            suppressed: Tokens that the engine never gives, whose probability does not count here either.
            eos_id: Ends a transcript. Tokens of text are below it.
            timestamps: True if segments have times; the model has tokens for them.
        """
        self._begin = np.array(tokens.begin_suppressed, np.int64)
        self._suppressed = np.array(suppressed, np.int64)
        self._eos_id = eos_id
        self._tokens = tokens
        self._timestamps = timestamps

    def forbidden(self, token_ids: Elements[int], logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """See `TokenRule`."""
        if not self._timestamps:
            return _NONE if token_ids else self._begin
        first = self._tokens.first_timestamp
        assert first is not None, "timestamps are asked for of a model that has them"
        may_follow = np.ones(len(logits), np.bool_)  # (V,)
        may_follow[self._suppressed] = False
        if not token_ids:
            may_follow[self._begin] = False
            may_follow[:first] = False
            if (most := self._tokens.max_initial_timestamp) is not None:
                may_follow[first + most + 1 :] = False
        else:
            self._keep_pairs(token_ids, first, may_follow)
        if self._tokens.no_timestamps is not None:
            may_follow[self._tokens.no_timestamps] = False
        if _prefers_timestamps(np.where(may_follow, logits, -np.inf), first):
            may_follow[:first] = False
        return np.flatnonzero(~may_follow)

    def _keep_pairs(self, token_ids: Elements[int], first: int, may_follow: NDArray[np.bool_]) -> None:
        """Forbids what does not keep timestamps in pairs and in order; `may_follow` is (V,)."""
        ends_segment = is_pair = False
        if token_ids[-1] >= first:
            is_pair = len(token_ids) < 2 or token_ids[-2] >= first
            ends_segment = not is_pair
        if is_pair:
            may_follow[first:] = False
        elif ends_segment:
            may_follow[: self._eos_id] = False
        last = next((token for token in reversed(token_ids) if token >= first), None)
        if last is not None:
            may_follow[first : last + (not ends_segment)] = False

    def __repr__(self) -> str:
        return f"TranscriptRule({'with' if self._timestamps else 'without'} timestamps)"


def _prefers_timestamps(logits: NDArray[np.float32], first: int) -> bool:
    """True if all timestamps, which are the tokens from `first` on, are together likelier than any other token."""
    others, timestamps = logits[:first].astype(np.float64), logits[first:].astype(np.float64)
    largest = timestamps.max(initial=-np.inf)
    if largest == -np.inf:
        return False
    return bool(largest + np.log(np.exp(timestamps - largest).sum()) > others.max(initial=-np.inf))
