"""Beam search of one sequence: its beams, its hypotheses, and the slots that its beams are in.

The search is that of Sutskever et al. 2014 (arXiv 1409.3215, section 3.2), with the bookkeeping that is common today. A
sequence has K beams, each an output so far with its log-probability. At a step:

1. All K x V continuations are ranked by log-probability, and the best 2 K of these are looked at.
2. A continuation that ends the sequence becomes a hypothesis if it is among the best K; otherwise it is dropped. Its
   score is its log-probability divided by (number of tokens ** length_penalty); the end counts as a token, and so do
   the tokens that the decoder is given after its first one.
3. The best K of the others are the next beams.
4. The best K hypotheses are kept. `EarlyStopping` says when a search with K of them ends. When the limit of tokens is
   reached, the beams become hypotheses as they stand, scored alike.

Ties go to the lower beam, then to the lower token id.

Required phrases are met by dynamic beam allocation (Post and Vilar 2018, arXiv 1804.06609). A continuation is in bank n
if it has n tokens of required phrases: all tokens of those that have appeared, and the tokens of the one begun. The
best 2 K continuations of each bank are looked at; the end is allowed only once every phrase has appeared. The K beams
are shared out evenly among the banks, and the remainder goes to the fullest. A beam that its bank cannot fill goes to
the next lower bank, and after the lowest to the banks from the lowest up. Without required phrases there is one bank,
and this is plain beam search.

Deviations from the paper: phrases are followed in one automaton, so they may overlap, appear in any order, and appear
by chance. Every continuation competes within its bank, not only the best of each beam and the best of all.

A beam that goes on stays in its slot. If several beams continue the same one, one of them stays, and the others take
slots whose own beams have ended. Two slots have the same content up to where their histories parted and nowhere after,
since each slot writes for a beam of its own at every step. So only the positions after that point are copied, into the
free slot whose history parted last.

`step.py` ranks the continuations of all sequences at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from headway_server.decoding.beam_search.rules import RequiredPhrases, required_phrases, search_rule
from headway_server.decoding.interfaces import SlotCopy
from headway_server.decoding.parameters import EarlyStopping, SearchParameters
from headway_server.decoding.rules import Logits, Mask, TokenRule, all_of
from headway_server.decoding.sequence import FinishReason


class Continuation(NamedTuple):
    """A beam and the token that may follow it."""

    log_probability: float
    """Log-probability of all tokens, including this one."""
    beam: int
    """Its index among the beams, from 0."""
    token_id: int


@dataclass(frozen=True, slots=True)
class Beam:
    """An output in the making."""

    log_probability: float
    token_ids: tuple[int, ...] = ()
    parent: int = 0
    """Its index among the beams of the previous step."""
    rule: TokenRule | None = None
    """Rule of its next token, if any."""
    required: RequiredPhrases | None = None
    """Which required phrases it has, if there are any."""

    def allow(self, mask: Mask, logits: Logits) -> None:
        """Clears the bits (M,) of tokens that may not follow it; the logits are (V,)."""
        for rule in (self.rule, self.required):
            if rule is not None:
                rule.allow(mask, logits)


@dataclass(frozen=True, slots=True)
class Found:
    """A hypothesis as tokens."""

    token_ids: tuple[int, ...]
    """Without the end of the sequence."""
    log_probability: float
    score: float
    num_new_tokens: int
    """With the end of the sequence."""
    num_met: int
    """Required phrases that it has."""
    finish_reason: FinishReason


class BeamSearch:
    """The beams of one sequence and its hypotheses.

    Attributes:
        beams: At most K, the likeliest first; at the start a single empty one.
        num_banks: Banks within which continuations compete; one without required phrases.
        num_tokens: Tokens of each beam.
        is_finished: True once the search has ended.
    """

    def __init__(
        self, parameters: SearchParameters, *, max_new_tokens: int, eos_id: int | None, rule: TokenRule | None = None
    ) -> None:
        """Begins a search.

        Args:
            parameters: How to search.
            max_new_tokens: Maximum tokens of a hypothesis, including its end.
            eos_id: Token that ends a sequence.
            rule: Rule of the next token, in addition to the parameters.
        """
        self._parameters = parameters
        self._max_new_tokens = max_new_tokens
        self._eos_id = eos_id
        self._found: list[Found] = []  # the best K, the best first
        required = required_phrases(parameters, eos_id)
        self.num_banks = 1 if required is None else required.num_banks
        self.beams = [Beam(0.0, rule=all_of(rule, search_rule(parameters, eos_id)), required=required)]
        self.num_tokens = 0
        self.is_finished = False

    def __repr__(self) -> str:
        return f"BeamSearch({len(self.beams)} beams of {self.num_tokens} tokens, {len(self._found)} found)"

    @property
    def _length(self) -> int:
        """Tokens that a score counts."""
        return self.num_tokens + self._parameters.num_given

    @property
    def num_wanted(self) -> int:
        """Maximum tokens that continue a required phrase in one of the beams."""
        if self.num_banks == 1:
            return 0
        return max(len(beam.required.wanted()) for beam in self.beams if beam.required is not None)

    def advance(self, continuations: Sequence[Continuation]) -> None:
        """Takes a step: ends become hypotheses, the best of the others are the beams from now on.

        Args:
            continuations: Allowed continuations, ranked by falling log-probability, then by beam, then by token id.
                They include the best 2 K of each bank, or all there are; an empty list means that nothing may follow.
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

    @property
    def num_hypotheses(self) -> int:
        """Requested number of hypotheses."""
        return self._parameters.num_hypotheses

    @property
    def found(self) -> Sequence[Found]:
        """At most K hypotheses, the best first. Several may have the same text."""
        return self._found

    def _banks(self, continuations: Iterable[Continuation]) -> list[list[Beam]]:
        """Returns the best K of every bank that go on, ranked; ends among a bank's best K become hypotheses."""
        size = self._parameters.beam_size
        banks: list[list[Beam]] = [[] for _ in range(self.num_banks)]
        num_ends = [0] * len(banks)
        for continuation in continuations:
            parent = self.beams[continuation.beam]
            if continuation.token_id == self._eos_id:
                number = len(banks) - 1  # an end has every phrase
                if len(banks[number]) + num_ends[number] < size:
                    self._find(parent, continuation.log_probability, FinishReason.END_OF_SEQUENCE)
                num_ends[number] += 1
                continue
            required = None if parent.required is None else parent.required.follow(continuation.token_id)
            bank = banks[0 if required is None else required.bank]
            if len(bank) < size:
                token_ids = (*parent.token_ids, continuation.token_id)
                rule = None if parent.rule is None else parent.rule.follow(continuation.token_id)
                bank.append(Beam(continuation.log_probability, token_ids, continuation.beam, rule, required))
            elif len(banks) == 1:
                break
        return banks

    def _allocate(self, banks: list[list[Beam]]) -> list[Beam]:
        """Distributes the K beams among the banks and returns the chosen ones, ranked."""
        if len(banks) == 1:
            return banks[0]
        shares = share_beams(self._parameters.beam_size, [len(bank) for bank in banks])
        beams = [beam for bank, share in zip(banks, shares, strict=True) for beam in bank[:share]]
        return sorted(beams, key=lambda beam: (-beam.log_probability, beam.parent, beam.token_ids[-1]))

    def _end_with(self, beams: list[Beam], finish_reason: FinishReason) -> None:
        for beam in beams:
            self._find(beam, beam.log_probability, finish_reason)
        self.is_finished = True

    def _find(self, beam: Beam, log_probability: float, finish_reason: FinishReason) -> None:
        """Adds a hypothesis and keeps the best K."""
        met = 0 if beam.required is None else beam.required.num_met
        score = log_probability / max(self._length, 1) ** self._parameters.length_penalty
        self._found.append(Found(beam.token_ids, log_probability, score, self.num_tokens, met, finish_reason))
        self._found.sort(
            key=lambda found: (-found.num_met, -found.score)
        )  # stable: among equals the earlier one stays first
        del self._found[self._parameters.beam_size :]

    def _may_stop(self) -> bool:
        """Returns True if there are K hypotheses and, by the early stopping rule, no beam can improve on them."""
        parameters = self._parameters
        if len(self._found) < parameters.beam_size:
            return False
        if parameters.beam_size == 1 or parameters.early_stopping is EarlyStopping.FIRST:
            return True
        length = self._length
        if parameters.early_stopping is EarlyStopping.NEVER and parameters.length_penalty > 0:
            length = self._max_new_tokens + parameters.num_given
        best = max(beam.log_probability for beam in self.beams)
        return bool(best / length**parameters.length_penalty <= self._found[-1].score)


def share_beams(num_beams: int, sizes: Sequence[int]) -> list[int]:
    """Distributes beams among banks, the fullest last; see the module's docstring.

    Args:
        num_beams: K.
        sizes: How many continuations each bank has.

    Returns:
        Number of beams of each bank; fewer than K in all only if there are fewer continuations.
    """
    even, left = divmod(num_beams, len(sizes))
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


class BeamBlock:
    """A search and the K slots that it runs in, which are counted from 0 here.

    Attributes:
        search: The search.
        slots: All K slots: first those of the beams, in order, then those without a beam.
    """

    def __init__(self, search: BeamSearch, num_slots: int) -> None:
        """Begins with nothing written.

        Args:
            search: The search.
            num_slots: K.
        """
        self.search = search
        self.slots = list(range(num_slots))
        # Number of common positions of each pair of slots.
        self._shared = [[0] * num_slots for _ in range(num_slots)]

    def __repr__(self) -> str:
        return f"BeamBlock({self.search!r}, beams in {self.slots[: len(self.search.beams)]})"

    def log_probabilities(self) -> list[float]:
        """Returns the log-probabilities of the beams, in the order of `slots`; minus infinity without a beam."""
        values = [beam.log_probability for beam in self.search.beams]
        return values + [-inf] * (len(self.slots) - len(values))

    def next_inputs(self, first_id: int) -> list[int]:
        """Returns the next input token of each slot; a slot without a beam gets the best beam's.

        Empty beams read `first_id`, the last token of the decoder's prompt.
        """
        beams = self.search.beams
        last_ids = [beam.token_ids[-1] if beam.token_ids else first_id for beam in beams]
        token_ids = [last_ids[0]] * len(self.slots)
        for slot, token_id in zip(self.slots, last_ids, strict=False):
            token_ids[slot] = token_id
        return token_ids

    def reorder(self, first_slot: int, num_written: int) -> list[SlotCopy]:
        """Gives each beam a slot after the search has advanced.

        Args:
            first_slot: The decoder's slot that is slot 0 here.
            num_written: Positions that are written in each slot.

        Returns:
            Copies to make.
        """
        before = self.slots
        staying: set[int] = set()
        slots: list[int] = []
        moving: list[tuple[int, int]] = []  # beams whose parent's slot is taken, and that slot
        for index, beam in enumerate(self.search.beams):
            home = before[beam.parent]
            if home in staying:
                moving.append((index, home))
            staying.add(home)
            slots.append(home)
        free = [slot for slot in before if slot not in staying]
        copies: list[SlotCopy] = []
        for index, source in moving:
            shared = self._shared[source]
            target = slots[index] = max(free, key=shared.__getitem__)
            free.remove(target)
            copies.append(SlotCopy(first_slot + source, first_slot + target, shared[target], num_written))
            self._note_copy(source, target, num_written)
        self.slots = slots + free
        return copies

    def _note_copy(self, source: int, target: int, num_written: int) -> None:
        """Records that the target has the source's content, with the source's common positions."""
        shared = self._shared
        shared[target] = shared[source].copy()
        shared[target][source] = shared[source][target] = num_written
        for slot, row in enumerate(shared):
            if slot != target:
                row[target] = shared[target][slot]
