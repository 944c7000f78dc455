"""What one translation may say and must say: n-grams not to repeat, phrases to avoid and to use.

Each hypothesis in the making carries a state, which is never changed: its next token makes another one of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeAlias

from headway_server.decoding.beam_search.hypothesis import SearchParameters
from headway_server.decoding.beam_search.phrase_automaton import ROOT, PhraseAutomaton

_NGrams: TypeAlias = dict[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RuleState:
    """How far a text is, by the rules."""

    last: tuple[int, ...] = ()
    """Its last n - 1 tokens."""
    ngrams: _NGrams | None = None
    """Of every n - 1 tokens in it, what has followed them."""
    forbidden_node: int = ROOT
    required_node: int = ROOT
    met: int = 0
    """Required phrases that have appeared, a bit for each."""


class SearchRules:
    """The rules of one search.

    Attributes:
        num_required: Phrases that must appear.
        num_banks: Values that `bank` may have: the required phrases' tokens, and one.
    """

    def __init__(
        self,
        *,
        no_repeat_ngram_size: int,
        forbidden_phrases: tuple[tuple[int, ...], ...],
        required_phrases: tuple[tuple[int, ...], ...],
    ) -> None:
        """Prepares the rules; a size of 0 and no phrases are none."""
        self._ngram_size = no_repeat_ngram_size
        self._forbidden = _automaton(forbidden_phrases) if forbidden_phrases else None
        self._required = _automaton(required_phrases) if required_phrases else None
        self._lengths = [len(phrase) for phrase in required_phrases]
        self._all = (1 << len(required_phrases)) - 1
        self.num_required = len(required_phrases)
        self.num_banks = sum(self._lengths) + 1

    @classmethod
    def of(cls, parameters: SearchParameters) -> Self | None:
        """Returns the rules that a search is asked to keep, or None where there are none."""
        size = parameters.no_repeat_ngram_size
        if not (size or parameters.forbidden_phrases or parameters.required_phrases):
            return None
        return cls(
            no_repeat_ngram_size=size,
            forbidden_phrases=parameters.forbidden_phrases,
            required_phrases=parameters.required_phrases,
        )

    def __repr__(self) -> str:
        return f"SearchRules({self._ngram_size}-grams, forbidden {self._forbidden!r}, required {self._required!r})"

    def start(self) -> RuleState:
        """Returns the state of an empty text."""
        return RuleState(ngrams={} if self._ngram_size else None)

    def follow(self, state: RuleState, token_id: int) -> RuleState:
        """Returns the state with the next token."""
        last, ngrams = state.last, state.ngrams
        if ngrams is not None:
            if len(last) == self._ngram_size - 1:
                ngrams = {**ngrams, last: (*ngrams.get(last, ()), token_id)}
            last = (*last, token_id)[-(self._ngram_size - 1) :] if self._ngram_size > 1 else ()
        forbidden_node, required_node, met = ROOT, ROOT, state.met
        if self._forbidden is not None:
            forbidden_node = self._forbidden.follow(state.forbidden_node, token_id)
        if self._required is not None:
            required_node = self._required.follow(state.required_node, token_id)
            met |= self._required.ending(required_node)
        return RuleState(last, ngrams, forbidden_node, required_node, met)

    def may_end(self, state: RuleState) -> bool:
        """Whether every required phrase has appeared."""
        return state.met == self._all

    def banned(self, state: RuleState) -> set[int]:
        """Returns the tokens that would repeat an n-gram or complete a forbidden phrase."""
        tokens: set[int] = set()
        if state.ngrams is not None and len(state.last) == self._ngram_size - 1:
            tokens.update(state.ngrams.get(state.last, ()))
        if self._forbidden is not None:
            tokens |= self._forbidden.completing(state.forbidden_node)
        return tokens

    def wanted(self, state: RuleState) -> set[int]:
        """Returns the tokens that begin, continue or complete a required phrase that has not appeared."""
        if self._required is None or self.may_end(state):
            return set()
        return self._required.continuing(state.required_node, self._all & ~state.met)

    def bank(self, state: RuleState) -> int:
        """Returns how many tokens of required phrases are there: of those that have appeared, and of the one begun."""
        if self._required is None:
            return 0
        met = sum(length for number, length in enumerate(self._lengths) if state.met >> number & 1)
        return met + self._required.num_begun(state.required_node, self._all & ~state.met)

    def num_met(self, state: RuleState) -> int:
        """Returns how many required phrases have appeared."""
        return state.met.bit_count()


@lru_cache(maxsize=4)
def _automaton(phrases: tuple[tuple[int, ...], ...]) -> PhraseAutomaton:
    """Returns an automaton, which nothing changes: the sentences of a call, often with one glossary, share theirs."""
    return PhraseAutomaton(phrases)
