"""Phrase rules of a search's outputs, forbidden and required, besides the rules of `decoding/rules.py`.

Phrases are followed by an Aho-Corasick automaton (Aho and Corasick 1975). They form a trie, and an output is at the
node of the longest beginning of a phrase at its end. So where it is follows from where it was and its next token alone,
and phrases may overlap. A set of phrases is an integer with a bit for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from headway_server.decoding.parameters import SearchParameters
from headway_server.decoding.rules import (
    Logits,
    Mask,
    MinimumLength,
    TokenRule,
    all_of,
    begin_with,
    distinct_ngrams,
    forbid,
)

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
        """Returns the length of the longest beginning of `phrases` with which an output at `node` ends."""
        while node != ROOT and not self._unfinished[node] & phrases:
            node = self._back[node]
        return self._depth[node]


@dataclass(frozen=True, slots=True)
class ForbiddenPhrases(TokenRule):
    """Phrases that may not appear."""

    automaton: PhraseAutomaton
    node: int = ROOT

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        forbid(mask, self.automaton.completing(self.node))

    def follow(self, token_id: int) -> ForbiddenPhrases:
        """See `TokenRule`."""
        return ForbiddenPhrases(self.automaton, self.automaton.follow(self.node, token_id))


@dataclass(frozen=True, slots=True)
class RequiredPhrases(TokenRule):
    """Phrases that must appear before the end."""

    automaton: PhraseAutomaton
    lengths: tuple[int, ...]
    """Tokens of each phrase."""
    end_id: int | None
    node: int = ROOT
    met: int = 0
    """Phrases that have appeared."""

    @property
    def unmet(self) -> int:
        """Phrases that have not appeared."""
        return ((1 << len(self.lengths)) - 1) & ~self.met

    @property
    def num_met(self) -> int:
        """How many phrases have appeared."""
        return self.met.bit_count()

    @property
    def num_banks(self) -> int:
        """Values that `bank` may have: one more than the phrases have tokens."""
        return sum(self.lengths) + 1

    @property
    def bank(self) -> int:
        """Number of phrase tokens in the output, including those of an unfinished phrase."""
        met = sum(length for number, length in enumerate(self.lengths) if self.met >> number & 1)
        return met + self.automaton.num_begun(self.node, self.unmet)

    def wanted(self) -> set[int]:
        """Returns the tokens that begin, continue or complete a phrase that has not appeared."""
        return self.automaton.continuing(self.node, self.unmet) if self.unmet else set()

    def allow(self, mask: Mask, logits: Logits) -> None:  # noqa: ARG002 (of the interface)
        """See `TokenRule`."""
        if self.unmet and self.end_id is not None:
            forbid(mask, (self.end_id,))

    def follow(self, token_id: int) -> RequiredPhrases:
        """See `TokenRule`."""
        node = self.automaton.follow(self.node, token_id)
        return RequiredPhrases(self.automaton, self.lengths, self.end_id, node, self.met | self.automaton.ending(node))


def search_rule(parameters: SearchParameters, eos_id: int | None) -> TokenRule | None:
    """Returns the rule of a search without required phrases; None if it has none."""
    least, phrases = parameters.min_new_tokens, parameters.forbidden_phrases
    rule = all_of(
        distinct_ngrams(parameters.no_repeat_ngram_size),
        ForbiddenPhrases(phrase_automaton(phrases)) if phrases else None,
        MinimumLength((eos_id,), least) if least and eos_id is not None else None,
    )
    return begin_with(parameters.prefix_ids, rule)


def required_phrases(parameters: SearchParameters, eos_id: int | None) -> RequiredPhrases | None:
    """Returns the rule for the phrases that a search requires; None if it requires none."""
    phrases = parameters.required_phrases
    if not phrases:
        return None
    return RequiredPhrases(phrase_automaton(phrases), tuple(map(len, phrases)), eos_id)


_automata: Final[WeakValueDictionary[tuple[tuple[int, ...], ...], PhraseAutomaton]] = WeakValueDictionary()
"""Those of running searches, by their phrases."""


def phrase_automaton(phrases: tuple[tuple[int, ...], ...]) -> PhraseAutomaton:
    """Returns an automaton, which nothing changes: the sentences of a call often share a glossary, and so this."""
    automaton = _automata.get(phrases)
    if automaton is None:
        automaton = _automata[phrases] = PhraseAutomaton(phrases)
    return automaton
