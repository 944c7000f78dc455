"""Reasoning before the answer: its token budget, and the constraint that applies to the answer alone.

    BEFORE ──▶ THINKING ──▶ AFTER
       └──────────────────────▲    the text does not begin with reasoning

Reasoning extends from its start delimiter, at the beginning of the text or the end of the prompt, to its end delimiter.
Delimiters are found in the text, as in `ReasoningReader`, whichever tokens spell them.

Shapes: W words of a mask, 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from headway_server.decoding.constraints import ConstraintState
from headway_server.decoding.output.text import Decode, Detokenizer
from headway_server.decoding.rules import Logits, Mask, TokenRule, forbid, mask_of
from headway_server.preprocessing import ReasoningForm, TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelimiters:
    """Delimiters of a model's reasoning, as tokens."""

    form: ReasoningForm
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    decode: Decode
    """Decodes token ids to text, including delimiters that are special tokens."""

    @classmethod
    def of(cls, form: ReasoningForm, tokenizer: TextTokenizer) -> ReasoningDelimiters | None:
        """Tokenizes the delimiters of a form; None if the vocabulary cannot write the end delimiter."""
        decode = tokenizer.decoder({index for _, index in form.special_tokens})
        begin_ids, end_ids = (
            tuple(tokenizer.encode_now(delimiter).input_ids.tolist()) for delimiter in (form.begin, form.end)
        )
        if form.end not in decode(end_ids):
            return None
        return cls(form=form, begin_ids=begin_ids, end_ids=end_ids, decode=decode)


class _Stage(Enum):
    BEFORE = "before"
    THINKING = "thinking"
    AFTER = "after"


class Thinking(TokenRule):
    """Rule of a sequence that may reason before it answers."""

    def __init__(
        self,
        delimiters: ReasoningDelimiters,
        *,
        is_open: bool,
        context_ids: Sequence[int] = (),
        budget: int | None = None,
        answer: ConstraintState | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Starts at the beginning of a text.

        Args:
            delimiters: Reasoning delimiters of the model.
            is_open: True if the prompt ends with the start delimiter.
            context_ids: Last tokens of the prompt.
            budget: Maximum tokens of the reasoning without delimiters; the end delimiter is forced then. None: no
                limit.
            answer: Constraint of the answer, or of the whole text if it has no reasoning. None: no constraint.
            end_ids: Tokens that end a text; forbidden within reasoning if the answer has a constraint.
        """
        self._delimiters = delimiters
        self._detokenizer = Detokenizer(delimiters.decode, context_ids)
        self._stage = _Stage.THINKING if is_open else _Stage.BEFORE
        self._budget = budget
        self._answer = answer
        self._end_ids = end_ids
        self._tail = ""  # the end of the text, possibly part of a delimiter
        self._is_blank = True  # nothing but white space has been written
        self._num_thought = 0
        self._recent: tuple[
            int, ...
        ] = ()  # the last tokens of the reasoning, possibly the beginning of the end delimiter
        self._forced: tuple[int, ...] = ()  # tokens of the end delimiter still to be written
        self._force()

    @property
    def failure(self) -> str | None:
        """Reason why no token may follow in an incomplete answer; None: no failure."""
        return None if self._answer is None else self._answer.failure

    @property
    def is_complete(self) -> bool:
        """True if only the end may follow."""
        return self._answer is not None and self._stage is not _Stage.THINKING and self._answer.is_complete

    def allow(self, mask: Mask, logits: Logits) -> None:
        """Clears the bits (W,) of tokens that may not follow."""
        if self._forced:
            mask &= mask_of(self._forced[:1], len(mask))
        elif self._answer is None:
            return
        elif self._stage is _Stage.THINKING:
            forbid(mask, self._end_ids)
        else:
            may_begin = self._stage is _Stage.BEFORE and self._is_blank and len(self._delimiters.begin_ids) == 1
            begin = mask & mask_of(self._delimiters.begin_ids, len(mask)) if may_begin else None
            self._answer.allow(mask, logits)
            if begin is not None:
                mask |= begin

    def follow(self, token_id: int) -> Thinking:
        """Takes the next token and returns itself; errors are those of `ConstraintState.follow`."""
        self._take(token_id)
        return self

    def _take(self, token_id: int) -> None:
        if self._stage is not _Stage.AFTER:
            new = self._detokenizer.push((token_id,))
            self._tail += new
            self._is_blank = self._is_blank and new.isspace()
        if self._stage is _Stage.THINKING:
            if self._answer is not None:
                self._answer.pass_by()
            self._think(token_id)
            return
        if self._stage is _Stage.BEFORE:
            text, begin = self._tail.lstrip(), self._delimiters.form.begin
            if text.startswith(begin):
                self._stage, self._tail = _Stage.THINKING, text[len(begin) :]
                if self._answer is not None:
                    self._answer.pass_by()
                self._end_at_delimiter()
                self._force()
                return
            if not begin.startswith(text):
                self._stage = _Stage.AFTER
        if self._answer is not None:
            self._answer.follow(token_id)

    def _think(self, token_id: int) -> None:
        """Takes the next token of the reasoning."""
        was_forced, self._forced = self._forced, self._forced[1:]
        if self._end_at_delimiter() or was_forced:
            return
        self._num_thought += 1
        self._recent = (*self._recent, token_id)[-len(self._delimiters.end_ids) :]
        self._force()

    def _end_at_delimiter(self) -> bool:
        """Ends the reasoning at its end delimiter; returns True if the text has reached it."""
        end = self._delimiters.form.end
        if end not in self._tail:
            self._tail = self._tail[-len(end) :]
            return False
        self._stage, self._forced = _Stage.AFTER, ()
        if self._answer is not None:
            self._answer.restart()
        return True

    def _force(self) -> None:
        """Forces the rest of the end delimiter once the budget is spent."""
        if self._stage is not _Stage.THINKING or self._budget is None or self._num_thought < self._budget:
            return
        ids = self._delimiters.end_ids
        written = next(n for n in range(len(ids) - 1, -1, -1) if self._recent[len(self._recent) - n :] == ids[:n])
        self._forced = ids[written:]

    def __repr__(self) -> str:
        return f"Thinking({self._stage.value}, {self._num_thought} of {self._budget} tokens, {self._answer!r})"
