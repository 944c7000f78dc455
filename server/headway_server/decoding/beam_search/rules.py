"""Rules for an output: n-grams that may not repeat, phrases that must not or must appear, a prefix.

Phrases are followed by an Aho-Corasick automaton (Aho and Corasick 1975): they form a trie, and an output is at the
node of the longest beginning of a phrase that the output ends with. So where it is follows from where it was and its
next token alone, and phrases may overlap. A set of phrases is an integer with a bit for each.

Each beam has a state, which is never changed: its next token makes another state of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.parameters import SearchParameters

ROOT = 0
"""Node of an empty output."""


class PhraseAutomaton:
    """The trie, with a link from every node to the longest shorter beginning that its text ends with too."""

    def __init__(self, phrases: Sequence[tuple[int, ...]]) -> None:
        """Builds the trie of phrases of at least one token each."""
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
        """Finds the links, from the root outwards."""
        queue = list(self._children[ROOT].values())
        for node in queue:  # grows while it is read
            for token_id, child in self._children[node].items():
                self._back[child] = self.follow(self._back[node], token_id)
                self._ending[child] |= self._ending[self._back[child]]
                queue.append(child)

    def follow(self, node: int, token_id: int) -> int:
        """Returns the node of an output at `node` after its next token."""
        while (child := self._children[node].get(token_id)) is None:
            if node == ROOT:
                return ROOT
            node = self._back[node]
        return child

    def ending(self, node: int) -> int:
        """Returns the phrases that an output at `node` ends with."""
        return self._ending[node]

    def completing(self, node: int) -> set[int]:
        """Returns the tokens that complete a phrase after `node`."""
        tokens: set[int] = set()
        while True:
            tokens.update(token_id for token_id, child in self._children[node].items() if self._ending[child])
            if node == ROOT:
                return tokens
            node = self._back[node]

    def continuing(self, node: int, phrases: int) -> set[int]:
        """Returns the tokens that begin, continue or complete one of `phrases` after `node`."""
        tokens: set[int] = set()
        while True:
            for token_id, child in self._children[node].items():
                if (self._unfinished[child] | self._ending[child]) & phrases:
                    tokens.add(token_id)
            if node == ROOT:
                return tokens
            node = self._back[node]

    def num_begun(self, node: int, phrases: int) -> int:
        """Returns how many tokens of one of `phrases` an output at `node` ends with, of the one that is furthest on."""
        while node != ROOT and not self._unfinished[node] & phrases:
            node = self._back[node]
        return self._depth[node]


_NGrams: TypeAlias = dict[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RuleState:
    """What the rules need to know of an output."""

    last: tuple[int, ...] = ()
    """Its last n - 1 tokens."""
    ngrams: _NGrams | None = None
    """For every n - 1 tokens in it, the tokens that have followed them."""
    forbidden_node: int = ROOT
    required_node: int = ROOT
    met: int = 0
    """Required phrases that have appeared."""


class SearchRules:
    """The rules of one search.

    Attributes:
        num_banks: Values that `bank` may have: one more than the required phrases have tokens.
    """

    def __init__(
        self,
        *,
        no_repeat_ngram_size: int,
        forbidden_phrases: tuple[tuple[int, ...], ...],
        required_phrases: tuple[tuple[int, ...], ...],
    ) -> None:
        """Prepares the rules; a size of 0 lets n-grams repeat, and there may be no phrases."""
        self._ngram_size = no_repeat_ngram_size
        self._forbidden = _automaton(forbidden_phrases) if forbidden_phrases else None
        self._required = _automaton(required_phrases) if required_phrases else None
        self._lengths = [len(phrase) for phrase in required_phrases]
        self._all = (1 << len(required_phrases)) - 1
        self.num_banks = sum(self._lengths) + 1

    @classmethod
    def of(cls, parameters: SearchParameters) -> Self | None:
        """Returns the rules that a search asks for; None if it asks for none."""
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
        """Returns the state of an empty output."""
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
        """True if every required phrase has appeared."""
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
        """Returns how many tokens of required phrases there are, those of the phrase that is begun included."""
        if self._required is None:
            return 0
        met = sum(length for number, length in enumerate(self._lengths) if state.met >> number & 1)
        return met + self._required.num_begun(state.required_node, self._all & ~state.met)

    def num_met(self, state: RuleState) -> int:
        """Returns how many required phrases have appeared."""
        return state.met.bit_count()


_automata: Final[WeakValueDictionary[tuple[tuple[int, ...], ...], PhraseAutomaton]] = WeakValueDictionary()
"""Those of running searches, by their phrases."""


def _automaton(phrases: tuple[tuple[int, ...], ...]) -> PhraseAutomaton:
    """Returns an automaton, which nothing changes: the sentences of a call often share a glossary, and so this."""
    automaton = _automata.get(phrases)
    if automaton is None:
        automaton = _automata[phrases] = PhraseAutomaton(phrases)
    return automaton


class RuleConstraint:
    """The rules for an output without a search, as a `Constraint`: begins it with a prefix, and keeps n-grams apart.

    The engine's thread alone calls it.
    """

    failure: str | None = None
    allows_everything = False
    is_complete = False

    def __init__(self, prefix_ids: Sequence[int], no_repeat_ngram_size: int) -> None:
        """Starts at the beginning of an output.

        Args:
            prefix_ids: Tokens that it begins with, whatever they repeat.
            no_repeat_ngram_size: n; 0 lets n-grams repeat.
        """
        self._prefix_ids = tuple(prefix_ids)
        self._rules = SearchRules(no_repeat_ngram_size=no_repeat_ngram_size, forbidden_phrases=(), required_phrases=())
        self._state = self._rules.start()
        self._num_tokens = 0

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Marks the tokens that may follow in the words (M,) of `mask`."""
        if self._num_tokens < len(self._prefix_ids):
            mask[:] = 0
            _flip(mask, self._prefix_ids[self._num_tokens])
            return
        mask[:] = _ALL
        for token_id in self._rules.banned(self._state):
            _flip(mask, token_id)

    def accept(self, token_id: int) -> None:
        """Takes the next token."""
        self._state = self._rules.follow(self._state, token_id)
        self._num_tokens += 1

    def __repr__(self) -> str:
        return f"RuleConstraint({len(self._prefix_ids)} prefix tokens, {self._num_tokens} tokens so far)"


_ALL = np.int32(-1)
"""A word of a mask that allows all of its 32 tokens."""


def _flip(mask: NDArray[np.int32], token_id: int) -> None:
    """Allows a token that is forbidden, or forbids one that is allowed."""
    word, bit = divmod(token_id, 32)
    mask[word] ^= np.array(1 << bit, np.uint32).view(np.int32)
