"""What a sequence thinks before it answers: how long it may, and what its answer alone is held to.

    BEFORE ──▶ THINKING ──▶ AFTER
       └──────────────────────▲    the text does not begin with a thought

A sequence thinks from the mark that begins a thought, at the beginning of its text or at the end of its prompt, to the
mark that ends it. Marks are looked for in the text, as `ReasoningReader` does, whichever tokens spell them.

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
class ThinkingMarks:
    """The marks around what a model thinks, as its tokens."""

    form: ReasoningForm
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    decode: Decode
    """Token ids to text, with the marks where they are special tokens."""

    @classmethod
    def of(cls, form: ReasoningForm, tokenizer: TextTokenizer) -> ThinkingMarks | None:
        """Spells the marks of a form; None if the vocabulary cannot write the one that ends a thought."""
        decode = tokenizer.decoder({index for _, index in form.special_tokens})
        begin_ids, end_ids = (tuple(tokenizer.encode_now(mark).input_ids.tolist()) for mark in (form.begin, form.end))
        if form.end not in decode(end_ids):
            return None
        return cls(form=form, begin_ids=begin_ids, end_ids=end_ids, decode=decode)


class _Stage(Enum):
    BEFORE = "before"
    THINKING = "thinking"
    AFTER = "after"


class Thinking(TokenRule):
    """What may follow in a sequence that may think before it answers."""

    def __init__(
        self,
        marks: ThinkingMarks,
        *,
        is_open: bool,
        context_ids: Sequence[int] = (),
        budget: int | None = None,
        answer: ConstraintState | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begins a text.

        Args:
            marks: The model's.
            is_open: True if the prompt ends where the model is to think.
            context_ids: Last tokens of the prompt.
            budget: Tokens of a thought, its marks aside, after which it is made to end. None: no limit.
            answer: What the text after the thought is held to, or the whole text without one. None: nothing.
            end_ids: Tokens that end a text; none may follow in a thought before an answer that is held to something.
        """
        self._marks = marks
        self._detokenizer = Detokenizer(marks.decode, context_ids)
        self._stage = _Stage.THINKING if is_open else _Stage.BEFORE
        self._budget = budget
        self._answer = answer
        self._end_ids = end_ids
        self._tail = ""  # the end of the text, which a mark may be part of
        self._is_blank = True  # nothing but white space has been written
        self._num_thought = 0
        self._recent: tuple[int, ...] = ()  # the last tokens of the thought: they may begin the mark that ends it
        self._forced: tuple[int, ...] = ()  # what is left to be written of that mark
        self._force()

    @property
    def failure(self) -> str | None:
        """Why nothing may follow in the answer although it is not complete."""
        return None if self._answer is None else self._answer.failure

    @property
    def is_complete(self) -> bool:
        """True if nothing but the end may follow."""
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
            may_begin = self._stage is _Stage.BEFORE and self._is_blank and len(self._marks.begin_ids) == 1
            begin = mask & mask_of(self._marks.begin_ids, len(mask)) if may_begin else None
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
            self._think(token_id)
            return
        if self._stage is _Stage.BEFORE:
            text, begin = self._tail.lstrip(), self._marks.form.begin
            if text.startswith(begin):
                self._stage, self._tail = _Stage.THINKING, text[len(begin) :]
                self._end_at_mark()
                self._force()
                return
            if not begin.startswith(text):
                self._stage = _Stage.AFTER
        if self._answer is not None:
            self._answer.follow(token_id)

    def _think(self, token_id: int) -> None:
        """Takes the next token of a thought."""
        was_forced, self._forced = self._forced, self._forced[1:]
        if self._end_at_mark() or was_forced:
            return
        self._num_thought += 1
        self._recent = (*self._recent, token_id)[-len(self._marks.end_ids) :]
        self._force()

    def _end_at_mark(self) -> bool:
        """Ends the thought if the mark that ends it is there; returns True if it is."""
        end = self._marks.form.end
        if end not in self._tail:
            self._tail = self._tail[-len(end) :]
            return False
        self._stage, self._forced = _Stage.AFTER, ()
        if self._answer is not None:
            self._answer.restart()
        return True

    def _force(self) -> None:
        """Forces what is left of the mark that ends the thought, if it may not go on."""
        if self._stage is not _Stage.THINKING or self._budget is None or self._num_thought < self._budget:
            return
        ids = self._marks.end_ids
        written = next(n for n in range(len(ids) - 1, -1, -1) if self._recent[len(self._recent) - n :] == ids[:n])
        self._forced = ids[written:]

    def __repr__(self) -> str:
        return f"Thinking({self._stage.value}, {self._num_thought} of {self._budget} tokens, {self._answer!r})"
