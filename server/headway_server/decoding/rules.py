"""Which tokens may follow an output. Sampling asks it of every sequence, and beam search of every beam.

A mask is packed: bit i % 32 of word i // 32 is set if token i may follow. It comes without the model's suppressed
tokens (`sampling/masks.py`), and each rule clears the bits of forbidden tokens.

Shapes: V vocabulary, M = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[np.int32]
"""(M,) int32."""
Logits: TypeAlias = NDArray[np.float32]
"""(V,) float32."""

WORD_BITS: Final = 32
_BITS: Final[Mask] = (np.uint32(1) << np.arange(WORD_BITS, dtype=np.uint32)).view(np.int32)
_OTHER_BITS: Final[Mask] = ~_BITS


def num_words(vocab_size: int) -> int:
    """Returns M."""
    return -(-vocab_size // WORD_BITS)


def pack(flags: NDArray[np.bool_]) -> Mask:
    """Returns the mask of flags (V,); bits past the vocabulary are clear."""
    padded = np.zeros(num_words(len(flags)) * WORD_BITS, np.bool_)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpack(words: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Returns the flags (..., 32 * M) of words (..., M)."""
    return np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), axis=-1, bitorder="little").view(np.bool_)


def mask_of(token_ids: Iterable[int], num_words: int) -> Mask:
    """Returns the mask (M,) of some tokens."""
    ids = np.fromiter(token_ids, np.int64)
    mask = np.zeros(num_words, np.int32)
    np.bitwise_or.at(mask, ids // WORD_BITS, _BITS[ids % WORD_BITS])
    return mask


def has_bit(mask: Mask, token_id: int) -> bool:
    """Returns True if a token is in a mask (M,)."""
    return bool(int(mask[token_id // WORD_BITS]) >> token_id % WORD_BITS & 1)


def forbid(mask: Mask, token_ids: Iterable[int]) -> None:
    """Clears the bits of some tokens."""
    ids = np.fromiter(token_ids, np.int64)
    np.bitwise_and.at(mask, ids // WORD_BITS, _OTHER_BITS[ids % WORD_BITS])


class TokenRule:
    """Which tokens may follow the output of one sequence. One thread at a time calls it."""

    __slots__ = ()

    @property
    def failure(self) -> str | None:
        """Why nothing may follow although the output is not complete, for the caller; None as long as something may."""
        return None

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end may follow."""
        return False

    def allow(self, mask: Mask, logits: Logits) -> None:
        """Clears the bits (M,) of tokens that may not follow; the logits (V,) of the next token stay as they are."""
        raise NotImplementedError

    def follow(self, token_id: int) -> TokenRule:
        """Returns the rule after the next token, which does not end the output.

        In a beam search several tokens may follow one output. A rule for beams is therefore immutable and returns a new
        rule; a rule for sampling only may change and return itself.

        Raises:
            ValueError: The token is forbidden; `failure` has the reason.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AllOf(TokenRule):
    """Intersection of rules. A rule sees the masks of the rules before it."""

    rules: tuple[TokenRule, ...]

    @property
    def failure(self) -> str | None:
        """The first failure of its rules."""
        return next((rule.failure for rule in self.rules if rule.failure is not None), None)

    @property
    def is_complete(self) -> bool:
        """True if an output is complete by one of its rules."""
        return any(rule.is_complete for rule in self.rules)

    def allow(self, mask: Mask, logits: Logits) -> None:
        """See `TokenRule`."""
        for rule in self.rules:
            rule.allow(mask, logits)

    def follow(self, token_id: int) -> AllOf:
        """See `TokenRule`."""
        return AllOf(tuple([rule.follow(token_id) for rule in self.rules]))


def all_of(*rules: TokenRule | None) -> TokenRule | None:
    """Combines rules; None entries are skipped. None if all are None."""
    found = tuple(rule for rule in rules if rule is not None)
    return AllOf(found) if len(found) > 1 else next(iter(found), None)


@dataclass(frozen=True, slots=True)
class Prefix(TokenRule):
    """The output begins with given tokens, whatever other rules say of them."""

    token_ids: tuple[int, ...]
    """Tokens still to be written."""
    then: TokenRule | None = None
    """Rule of the text after the prefix. It follows the prefix's tokens too."""

    def allow(self, mask: Mask, logits: Logits) -> None:
        """See `TokenRule`."""
        if self.token_ids:
            mask &= mask_of(self.token_ids[:1], len(mask))
        elif self.then is not None:
            self.then.allow(mask, logits)

    def follow(self, token_id: int) -> Prefix:
        """See `TokenRule`."""
        return Prefix(self.token_ids[1:], None if self.then is None else self.then.follow(token_id))


@dataclass(frozen=True, slots=True)
class MinimumLength(TokenRule):
    """The output does not end before it has a number of tokens."""

    end_ids: tuple[int, ...]
    """Tokens that end it."""
    num_left: int
    """Tokens that it lacks."""

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        if self.num_left > 0:
            forbid(mask, self.end_ids)

    def follow(self, token_id: int) -> MinimumLength:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        return replace(self, num_left=self.num_left - 1)


@dataclass(frozen=True, slots=True)
class DistinctNGrams(TokenRule):
    """No n tokens in a row appear twice."""

    size: int
    """n, at least 1."""
    last: tuple[int, ...] = ()
    """At most the last n - 1 tokens of the output."""
    followers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """For every n - 1 tokens in the output, the tokens that have followed them."""

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        if repeated := self.followers.get(self.last):
            forbid(mask, repeated)

    def follow(self, token_id: int) -> DistinctNGrams:
        """See `TokenRule`."""
        last, followers = self.last, self.followers
        if len(last) == self.size - 1:
            followers = {**followers, last: (*followers.get(last, ()), token_id)}
        last = (*last, token_id)[-(self.size - 1) :] if self.size > 1 else ()
        return DistinctNGrams(self.size, last, followers)


def begin_with(prefix_ids: tuple[int, ...], then: TokenRule | None) -> TokenRule | None:
    """Returns the rule of an output with a prefix, possibly empty, and a rule for the rest."""
    return Prefix(prefix_ids, then) if prefix_ids else then


def distinct_ngrams(size: int) -> TokenRule | None:
    """Returns the rule for n-grams of a size; None for 0, which lets them repeat."""
    return DistinctNGrams(size) if size else None
