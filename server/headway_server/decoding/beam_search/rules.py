"""What one translation may say and must say: n-grams not to repeat, phrases to avoid and to use.

Each hypothesis in the making carries a state, which is never changed: its next token makes another one of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeAlias

from headway_server.decoding.parameters import SearchParameters

ROOT = 0
"""Where an empty text is."""


class PhraseAutomaton:
    """The tree, with a way back from every node to the longest shorter beginning that its text ends with too."""

    def __init__(self, phrases: Sequence[tuple[int, ...]]) -> None:
        """Builds the tree of phrases of at least one token each."""
        self._children: list[dict[int, int]] = [{}]
        self._depth = [0]
        self._back = [ROOT]
        self._ending = [0]  # phrases that a text at the node ends with
        self._unfinished = [0]  # phrases that begin with the node's text and are longer
        self._num_phrases = len(phrases)
        for number, phrase in enumerate(phrases):
            self._insert(1 << number, phrase)
        self._link()

    def __repr__(self) -> str:
        return f"PhraseAutomaton({self._num_phrases} phrases, {len(self._children)} nodes)"

    def _insert(self, bit: int, phrase: tuple[int, ...]) -> None:
        assert phrase, "a phrase has at least one token"
        node = ROOT
        for token_id in phrase:
            self._unfinished[node] |= bit
            if token_id not in self._children[node]:
                self._children[node][token_id] = self._new_node(self._depth[node] + 1)
            node = self._children[node][token_id]
        self._ending[node] |= bit

    def _new_node(self, depth: int) -> int:
        self._children.append({})
        self._depth.append(depth)
        self._back.append(ROOT)
        self._ending.append(0)
        self._unfinished.append(0)
        return len(self._children) - 1

    def _link(self) -> None:
        """Finds the ways back, from the root outwards."""
        queue = list(self._children[ROOT].values())
        for node in queue:  # grows while it is read
            for token_id, child in self._children[node].items():
                self._back[child] = self.follow(self._back[node], token_id)
                self._ending[child] |= self._ending[self._back[child]]
                queue.append(child)

    def follow(self, node: int, token_id: int) -> int:
        """Returns where a text at `node` is with its next token."""
        while (child := self._children[node].get(token_id)) is None:
            if node == ROOT:
                return ROOT
            node = self._back[node]
        return child

    def ending(self, node: int) -> int:
        """Returns the phrases that a text at `node` ends with."""
        return self._ending[node]

    def completing(self, node: int) -> set[int]:
        """Returns the tokens that complete a phrase of a text at `node`."""
        tokens: set[int] = set()
        while True:
            tokens.update(token_id for token_id, child in self._children[node].items() if self._ending[child])
            if node == ROOT:
                return tokens
            node = self._back[node]

    def continuing(self, node: int, phrases: int) -> set[int]:
        """Returns the tokens with which a text at `node` begins, continues or completes one of `phrases`."""
        tokens: set[int] = set()
        while True:
            for token_id, child in self._children[node].items():
                if (self._unfinished[child] | self._ending[child]) & phrases:
                    tokens.add(token_id)
            if node == ROOT:
                return tokens
            node = self._back[node]

    def num_begun(self, node: int, phrases: int) -> int:
        """Returns how many tokens of one of `phrases`, the one furthest on, a text at `node` ends with."""
        while node != ROOT and not self._unfinished[node] & phrases:
            node = self._back[node]
        return self._depth[node]


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
