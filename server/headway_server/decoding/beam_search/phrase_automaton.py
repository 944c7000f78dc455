"""Finds phrases, given as tokens, in a text that grows by one token at a time (Aho and Corasick 1975).

The phrases form a tree of their beginnings. A text is at the node of the longest beginning of a phrase that the text
ends with, so where it is follows from where it was and its next token alone, and phrases may overlap. A set of phrases
is an integer with a bit for each.
"""

from __future__ import annotations

from collections.abc import Sequence

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
