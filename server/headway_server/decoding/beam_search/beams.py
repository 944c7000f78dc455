"""The search of one sentence, as `hypothesis.py` defines it: which beams go on, and what they have found.

Required phrases are met by dynamic beam allocation (Post and Vilar 2018, arXiv 1804.06609). A continuation is in the
bank of as many tokens of required phrases as it has: of those that have appeared, and of the one begun. Of a step's
K x V continuations the best 2 K of each bank are looked at, an end only where every phrase has appeared. The K places
are shared out evenly among the banks, what is left over going to the fullest; a place that its bank cannot fill goes to
the next lower bank, and from the lowest upwards again. Without required phrases there is one bank, and this is plain
beam search.

Deviations from the paper: phrases are followed in one automaton, so that they may overlap and appear in any order, and
appearing by chance counts; every continuation competes within its bank, not only the best of each beam and of all.

The tensors are elsewhere: `continuations.py` ranks what may follow, `beam_block.py` knows in which slots the beams are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway_server.decoding.beam_search.hypothesis import EarlyStopping, SearchParameters
from headway_server.decoding.beam_search.rules import RuleState, SearchRules
from headway_server.decoding.sequence import FinishReason

NO_TOKENS: frozenset[int] = frozenset()


class Continuation(NamedTuple):
    """A beam and the token that may follow it."""

    log_probability: float
    """Of all tokens, this one included."""
    beam: int
    """Its place among the beams, from 0."""
    token_id: int


@dataclass(frozen=True, slots=True)
class Beam:
    """A text in the making."""

    log_probability: float
    token_ids: tuple[int, ...] = ()
    parent: int = 0
    """Its place among the beams of the step before."""
    state: RuleState | None = None
    """How far it is by the rules, where there are any."""


@dataclass(frozen=True, slots=True)
class Found:
    """A hypothesis, as tokens."""

    token_ids: tuple[int, ...]
    """The end of the sequence left out."""
    log_probability: float
    score: float
    num_new_tokens: int
    """The end of the sequence included."""
    num_met: int
    """Required phrases that it has."""
    finish_reason: FinishReason


class BeamSearch:
    """The beams of one sentence and its hypotheses.

    Attributes:
        beams: By falling log-probability, at most K; one, empty, at the start.
        num_tokens: Tokens of each beam.
        is_finished: Whether there is nothing left to do.
    """

    def __init__(self, parameters: SearchParameters, *, max_new_tokens: int, eos_id: int | None) -> None:
        """Begins a search.

        Args:
            parameters: How to search.
            max_new_tokens: Most tokens of a hypothesis, its end included.
            eos_id: Token that ends a sentence.
        """
        self._parameters = parameters
        self._rules = SearchRules.of(parameters)
        self._max_new_tokens = max_new_tokens
        self._eos_id = eos_id
        self._found: list[Found] = []  # the best K, the best first
        self.beams = [Beam(0.0, state=None if self._rules is None else self._rules.start())]
        self.num_tokens = 0
        self.is_finished = False

    def __repr__(self) -> str:
        return f"BeamSearch({len(self.beams)} beams of {self.num_tokens} tokens, {len(self._found)} found)"

    @property
    def forced_token(self) -> int | None:
        """The token that must follow each beam, as long as the prefix lasts."""
        prefix = self._parameters.prefix_ids
        return prefix[self.num_tokens] if self.num_tokens < len(prefix) else None

    @property
    def has_required_phrases(self) -> bool:
        """Whether continuations compete within banks."""
        return bool(self._parameters.required_phrases)

    @property
    def is_restricted(self) -> bool:
        """Whether a step needs other continuations than the best 2 K of all: those of the prefix, or of each bank."""
        return self.forced_token is not None or self.has_required_phrases

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of the text but to be likely."""
        return self._rules is None and not self._parameters.prefix_ids

    def banned(self, beam: Beam) -> set[int] | frozenset[int]:
        """Returns the tokens that may not follow a beam."""
        if self._rules is None or beam.state is None:
            return NO_TOKENS
        tokens = self._rules.banned(beam.state)
        if self._eos_id is not None and not self._rules.may_end(beam.state):
            tokens.add(self._eos_id)
        return tokens

    def wanted(self, beam: Beam) -> set[int] | frozenset[int]:
        """Returns the tokens with which a beam comes nearer to a required phrase, banned ones left out."""
        if self._rules is None or beam.state is None or not self.has_required_phrases:
            return NO_TOKENS
        return self._rules.wanted(beam.state) - self.banned(beam)

    def advance(self, continuations: Sequence[Continuation]) -> None:
        """Takes a step: ends become hypotheses, the best of the others are the beams from now on.

        Args:
            continuations: What may follow, ranked: by falling log-probability, then by beam, then by token id. At
                least the best 2 K of each bank are among them, or all there are; none is impossible.
        """
        self.num_tokens += 1
        before = self.beams
        self.beams = self._allocate(self._banks(continuations))
        if not self.beams and not self._found:  # nothing may follow
            self.num_tokens -= 1
            self._end_with(before, FinishReason.CONSTRAINT)
        elif self.num_tokens >= self._max_new_tokens:
            self._end_with(self.beams, FinishReason.LENGTH)
        else:
            self.is_finished = not self.beams or self._may_stop()

    def hypotheses(self) -> list[Found]:
        """Returns as many as were asked for, the best first, or as there are."""
        return self._found[: self._parameters.num_hypotheses]

    def _banks(self, continuations: Iterable[Continuation]) -> list[list[Beam]]:
        """Returns the best K beams that go on of every bank, ranked; ends among its best K become hypotheses."""
        size, rules = self._parameters.beam_size, self._rules
        banks: list[list[Beam]] = [[] for _ in range(1 if rules is None else rules.num_banks)]
        num_ends = [0] * len(banks)
        for continuation in continuations:
            parent = self.beams[continuation.beam]
            if continuation.token_id == self._eos_id:
                number = len(banks) - 1  # an end has every phrase
                if len(banks[number]) + num_ends[number] < size:
                    self._find(parent, continuation.log_probability, FinishReason.END_OF_SEQUENCE)
                num_ends[number] += 1
                continue
            state = None if rules is None or parent.state is None else rules.follow(parent.state, continuation.token_id)
            bank = banks[0 if rules is None or state is None else rules.bank(state)]
            if len(bank) < size:
                token_ids = (*parent.token_ids, continuation.token_id)
                bank.append(Beam(continuation.log_probability, token_ids, continuation.beam, state))
            elif len(banks) == 1:
                break
        return banks

    def _allocate(self, banks: list[list[Beam]]) -> list[Beam]:
        """Shares the K places out among the banks, and returns the beams that have got one, ranked."""
        if len(banks) == 1:
            return banks[0]
        shares = share_places(self._parameters.beam_size, [len(bank) for bank in banks])
        beams = [beam for bank, share in zip(banks, shares, strict=True) for beam in bank[:share]]
        return sorted(beams, key=lambda beam: (-beam.log_probability, beam.parent, beam.token_ids[-1]))

    def _end_with(self, beams: list[Beam], finish_reason: FinishReason) -> None:
        for beam in beams:
            self._find(beam, beam.log_probability, finish_reason)
        self.is_finished = True

    def _find(self, beam: Beam, log_probability: float, finish_reason: FinishReason) -> None:
        """Takes a hypothesis, and keeps the best K."""
        met = 0 if self._rules is None or beam.state is None else self._rules.num_met(beam.state)
        score = log_probability / max(self.num_tokens, 1) ** self._parameters.length_penalty
        self._found.append(Found(beam.token_ids, log_probability, score, self.num_tokens, met, finish_reason))
        self._found.sort(key=lambda found: (-found.num_met, -found.score))  # stable: the earlier one stays before
        del self._found[self._parameters.beam_size :]

    def _may_stop(self) -> bool:
        """Whether there are K hypotheses and, by what was asked for, no beam can do better."""
        parameters = self._parameters
        if len(self._found) < parameters.beam_size:
            return False
        if parameters.beam_size == 1 or parameters.early_stopping is EarlyStopping.FIRST:
            return True
        length = self.num_tokens
        if parameters.early_stopping is EarlyStopping.NEVER and parameters.length_penalty > 0:
            length = self._max_new_tokens
        best = max(beam.log_probability for beam in self.beams)
        return bool(best / length**parameters.length_penalty <= self._found[-1].score)


def share_places(num_places: int, sizes: Sequence[int]) -> list[int]:
    """Shares places out among banks, the fullest last, as this module's docstring says.

    Args:
        num_places: K.
        sizes: How many continuations each bank has.

    Returns:
        How many places each bank gets; together fewer than K only where there are fewer continuations.
    """
    even, left = divmod(num_places, len(sizes))
    shares = [min(even, size) for size in sizes]
    shares[-1] = min(even + left, sizes[-1])
    left = even + left - shares[-1]
    for number in reversed(range(len(sizes) - 1)):
        room = even + left
        shares[number] = min(room, sizes[number])
        left = room - shares[number]
    for number, size in enumerate(sizes):
        more = min(left, size - shares[number])
        shares[number] += more
        left -= more
    return shares
