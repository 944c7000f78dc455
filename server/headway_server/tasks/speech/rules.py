"""Token rules of a transcript: timestamps in pairs and in order, as in Whisper's decoder.

Radford et al. 2022 (arXiv 2212.04356), section 4.5 and the code published with it. The first timestamp begins a
segment, the second ends it:

1. Suppressed tokens never follow. Tokens of `begin_suppressed` do not follow at the beginning.
2. With timestamps: the first token is a timestamp, at most `max_initial_timestamp` steps from the window's beginning.
   Text follows two timestamps. The end timestamp of a segment is followed by the start of the next or the end of the
   text. Timestamps never decrease, and increase from segment to segment.
3. If all timestamps together are likelier than the likeliest other token, a timestamp follows.

V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import SpeechTokens
from headway_server.decoding.rules import Logits, Mask, TokenRule, forbid, pack, unpack


@dataclass(frozen=True, slots=True)
class TranscriptRule(TokenRule):
    """The rule of one transcript."""

    tokens: SpeechTokens
    """Special tokens of the model."""
    eos_id: int
    """Ends a transcript. Tokens of text are below it."""
    timestamps: bool
    """True if segments have timestamps; the model has tokens for them."""
    last: tuple[int, ...] = ()
    """At most the last two tokens of the transcript."""
    last_timestamp: int | None = None
    """The last timestamp token."""

    def allow(self, mask: Mask, logits: Logits) -> None:
        """See `TokenRule`. Probabilities of forbidden tokens do not count."""
        if not self.timestamps:
            if not self.last:
                forbid(mask, self.tokens.begin_suppressed)
            return
        first = self._first_timestamp
        may_follow = unpack(mask)[: len(logits)]  # (V,)
        if not self.last:
            may_follow[[*self.tokens.begin_suppressed]] = False
            may_follow[:first] = False
            if (most := self.tokens.max_initial_timestamp) is not None:
                may_follow[first + most + 1 :] = False
        else:
            self._keep_pairs(first, may_follow)
        if self.tokens.no_timestamps is not None:
            may_follow[self.tokens.no_timestamps] = False
        if _prefers_timestamps(np.where(may_follow, logits, -np.inf), first):
            may_follow[:first] = False
        mask &= pack(may_follow)

    def follow(self, token_id: int) -> TranscriptRule:
        """See `TokenRule`."""
        is_timestamp = self.timestamps and token_id >= self._first_timestamp
        last_timestamp = token_id if is_timestamp else self.last_timestamp
        return replace(self, last=(*self.last, token_id)[-2:], last_timestamp=last_timestamp)

    @property
    def _first_timestamp(self) -> int:
        first = self.tokens.first_timestamp
        assert first is not None, "the call checks that the model has timestamps"
        return first

    def _keep_pairs(self, first: int, may_follow: NDArray[np.bool_]) -> None:
        """Forbids tokens that break the pairs or the order of timestamps; `may_follow` is (V,)."""
        ends_segment = is_pair = False
        if self.last[-1] >= first:
            is_pair = len(self.last) < 2 or self.last[-2] >= first
            ends_segment = not is_pair
        if is_pair:
            may_follow[first:] = False
        elif ends_segment:
            may_follow[: self.eos_id] = False
        if self.last_timestamp is not None:
            may_follow[first : self.last_timestamp + (not ends_segment)] = False


def _prefers_timestamps(logits: NDArray[np.float32], first: int) -> bool:
    """True if all timestamps, the tokens from `first` on, are together likelier than any other token."""
    others, timestamps = logits[:first].astype(np.float64), logits[first:].astype(np.float64)
    largest = timestamps.max(initial=-np.inf)
    if largest == -np.inf:
        return False
    return bool(largest + np.log(np.exp(timestamps - largest).sum()) > others.max(initial=-np.inf))
