"""Extractive question answering: parts of a context that answer a question.

A context longer than a window is read in several that overlap, each with the question. The probabilities of an
answer's first and last token are softmax over the window's tokens of the context and the special token before the
question, which stands for no answer (Devlin et al. 2019, section 4.3). The score of an answer is their product.

T tokens of a window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Postprocess, Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import Manifest
from headway_server.errors import ContextLengthError, InvalidInputError
from headway_server.preprocessing.pool import off_loop
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.calls import counted_tokens, current_caller
from headway_server.serving.limits import check_texts
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.parameters import check_range, check_rules
from headway_server.tasks.question_answering.windows import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_WINDOW_TOKENS,
    Context,
    Found,
    PairFrame,
    Window,
    merge,
    shared_tokens,
    split,
)
from headway_server.tasks.text.model import BYTES_OF_OFFSETS, BYTES_OF_TOKEN, TextInputs, TextModel, text_tensors

MAX_WINDOWS: Final = 1024
"""Maximum windows of a call."""
_WORK_OF_PAIR: Final = 64
"""Minimum work of a context, in bytes."""
_FEW: Final = 2_000
"""Tokens, or answers of windows, that are handled on the event loop, in some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionRequest:
    """Questions, and the contexts in which answers are found."""

    questions: Sequence[str]
    """1 to `MAX_TEXTS`: one for each context, or a single one for all."""
    contexts: Sequence[str]
    """1 to `MAX_TEXTS`: one for each question, or a single one for all."""
    top_k: int = 0
    """Most answers of a context; 0: one."""
    max_answer_tokens: int = 0
    """Most tokens of an answer; 0: `DEFAULT_ANSWER_TOKENS`."""
    window_tokens: int = 0
    """Tokens of a window; 0: `DEFAULT_WINDOW_TOKENS`, or the model's maximum."""
    overlap_tokens: int | None = None
    """Tokens that neighbouring windows share; None: `DEFAULT_OVERLAP_TOKENS`, or half of the context's in a window."""
    no_answer_threshold: float | None = None
    """Excess of the score of no answer from which there is none; None: there is always one."""
    splits_words: bool = False
    """True lets answers begin and end within words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedAnswer:
    """A part of a context: characters `start` to `end`, `end` excluded, in Unicode code points."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredQuestion:
    """Answers in one context, the best first."""

    answers: tuple[ExtractedAnswer, ...]
    no_answer_score: float
    num_tokens: int
    num_windows: int


@dataclass(slots=True, kw_only=True)
class _Pair:
    """A question and a context, and what has been found so far."""

    question: NDArray[np.int64]
    """Tokens of the question."""
    context: Context
    text: str
    """Text of the context."""
    found: list[list[Found]] = field(default_factory=list)
    """Answers of each window that was read."""
    null: float = 1.0
    """Lowest score of no answer."""
    num_tokens: int = 0

    def result(self, top_k: int, threshold: float | None) -> AnsweredQuestion:
        """Returns the answers of all windows together."""
        best = merge(self.found, top_k)
        if threshold is not None and self.null - (best[0].score if best else 0.0) > threshold:
            best = []
        return AnsweredQuestion(
            answers=tuple(
                ExtractedAnswer(text=self.text[one.start : one.end], score=one.score, start=one.start, end=one.end)
                for one in best
            ),
            no_answer_score=self.null,
            num_tokens=self.num_tokens,
            num_windows=len(self.found),
        )


class QuestionAnswerer(TextModel):
    """Finds answers in texts."""

    _noun = "contexts"

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:  # noqa: ARG003 (the same for all)
        return None

    @classmethod
    def _expected(cls, manifest: Manifest, length: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG003
        return {LOGITS: (2, length)}

    @cached_property
    def _frame(self) -> PairFrame:
        return PairFrame.of(self._tokenizer.library_tokenizer)

    async def answer(self, request: QuestionRequest, *, deadline: float | None) -> Answer[AnsweredQuestion]:
        """Finds answers, one result for each pair of a question and a context.

        Args:
            request: Questions and contexts.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the texts cannot be read or make too many windows, the queue
                is full, the deadline passed, the server is draining.
        """
        self._check_request(request)
        num_pairs = max(len(request.questions), len(request.contexts))
        num_bytes = sum(TextInputs(texts=texts).num_bytes for texts in (request.questions, request.contexts))
        held = num_bytes + self._num_token_bytes(request)
        work = float(num_pairs * _WORK_OF_PAIR + num_bytes * num_pairs / len(request.contexts))
        with self._admission.admit(num_pairs, held, work=work, deadline=deadline, caller=current_caller()):
            began = time.monotonic()
            questions = await self._encode_questions(request)
            pairs, windows = await self._encode_contexts(request, questions)
            preprocessing_s = time.monotonic() - began
            timings: CallTimings | None = None
            for start in range(0, len(windows), MAX_TEXTS):  # so that few windows of a call are in memory
                part = await self._read(request, windows[start : start + MAX_TEXTS], preprocessing_s, deadline)
                timings, preprocessing_s = part if timings is None else timings + part, 0.0
        assert timings is not None, "every context has a window"
        results = await off_loop(
            len(windows) * (request.top_k or 1),
            lambda: [pair.result(request.top_k or 1, request.no_answer_threshold) for pair in pairs],
            most_on_loop=_FEW,
        )
        return Answer(results=results, timings=timings)

    def _check_request(self, request: QuestionRequest) -> None:
        """Validates a request, before any work is done for it.

        Raises:
            InvalidInputError: A number is out of its range; there are too few or too many texts, or one is empty or too
                large; or questions and contexts do not make pairs.
        """
        for name, number in (
            ("top_k", request.top_k),
            ("max_answer_token_count", request.max_answer_tokens),
            ("no_answer_threshold", request.no_answer_threshold or 0),
        ):
            check_rules(name, number, f"AnswerQuestionRequest.{name}")
        check_range("window_token_count", request.window_tokens, 0, self.max_input_tokens)
        if request.overlap_tokens is not None:
            check_range("overlap_token_count", request.overlap_tokens, 0, self._window_tokens(request))
        num_questions = len(check_texts("questions", request.questions, MAX_TEXTS, self._max_text_bytes))
        num_contexts = len(check_texts("contexts", request.contexts, MAX_TEXTS, self._max_text_bytes))
        if num_questions != num_contexts and 1 not in (num_questions, num_contexts):
            raise InvalidInputError(
                "contexts",
                f"has {num_contexts} elements for {num_questions} questions; give one for each question, a single "
                "context or a single question",
            )

    def _window_tokens(self, request: QuestionRequest) -> int:
        return request.window_tokens or min(DEFAULT_WINDOW_TOKENS, self.max_input_tokens)

    async def _encode_questions(self, request: QuestionRequest) -> list[NDArray[np.int64]]:
        """Tokenizes questions, without special tokens.

        Raises:
            InvalidInputError: One has no tokens, or leaves no room for a token of the context.
        """
        window = self._window_tokens(request)
        most = max(window - len(self._frame) - 1, 0)
        found: list[NDArray[np.int64]] = []
        async with aclosing(self._tokenizer.encode_each(request.questions, add_special_tokens=False)) as each:
            async for question in each:
                name = f"questions[{len(found)}]"
                if not len(question):
                    raise _no_text(name)
                if len(question) > most:
                    raise ContextLengthError(
                        name,
                        f"has {len(question)} tokens, the limit is {most} in a window of {window} tokens, which has a "
                        "part of the context too; shorten it, or raise window_token_count",
                    )
                found.append(question.input_ids)
        return found

    def _num_token_bytes(self, request: QuestionRequest) -> int:
        """Returns the most bytes of the contexts' tokens.

        Those of all windows are in memory, and those of a context that is refused; of one at a time with offsets.
        """
        most = TextInputs(texts=request.contexts).most_tokens(self._max_text_bytes)
        one = min(most, self._max_text_bytes)
        return BYTES_OF_TOKEN * min(most, MAX_WINDOWS * self._window_tokens(request) + one) + BYTES_OF_OFFSETS * one

    async def _encode_contexts(
        self, request: QuestionRequest, questions: Sequence[NDArray[np.int64]]
    ) -> tuple[list[_Pair], list[tuple[_Pair, Window]]]:
        """Tokenizes contexts of any length, and returns all pairs and their windows; stops at the first refusal.

        Raises:
            InvalidInputError: One has no tokens, or the windows are too many or overlap wholly.
        """
        pairs: list[_Pair] = []
        windows: list[tuple[_Pair, Window]] = []
        each = self._tokenizer.encode_each(request.contexts, add_special_tokens=False, with_offsets=True)
        async with aclosing(each):
            async for encoded in each:
                index = len(pairs)  # of the context, unless it is the only one
                if not len(encoded):
                    raise _no_text(f"contexts[{index}]")
                asked = range(len(questions)) if len(request.contexts) == 1 else [min(index, len(questions) - 1)]
                found: list[tuple[int, Window]] = []
                for number in asked:
                    before = len(windows) + len(found)
                    room = self._window_tokens(request) - len(self._frame) - len(questions[number])
                    shared = _shared_tokens(request, room, f"questions[{number}]")
                    own = _windows(len(encoded), room, shared, name=f"contexts[{index}]", before=before)
                    found += [(number, window) for window in own]
                text = request.contexts[index]
                make = partial(Context.of, text, encoded, splits_words=request.splits_words)
                context = await off_loop(len(encoded), make, most_on_loop=_FEW)
                await asyncio.sleep(0)  # a slice has many contexts, each of some milliseconds
                of_question = {
                    number: _Pair(question=questions[number], context=context, text=text) for number in asked
                }
                pairs += of_question.values()
                windows += [(of_question[number], window) for number, window in found]
        return pairs, windows

    async def _read(
        self,
        request: QuestionRequest,
        windows: Sequence[tuple[_Pair, Window]],
        preprocessing_s: float,
        deadline: float | None,
    ) -> CallTimings:
        """Runs windows, and adds what is found to their pairs."""
        frame = self._frame

        def make() -> list[Tensors]:
            joined = [frame.join(pair.question, pair.context.ids[start:end]) for pair, (start, end) in windows]
            return [text_tensors(ids, types, has_types=self.has_types) for ids, types in joined]

        def read(row: Tensors, index: int) -> tuple[list[Found], float]:
            pair, window = windows[index]
            return pair.context.read(
                row[LOGITS],
                window,
                first=len(frame.before) + len(pair.question) + len(frame.between),
                has_null=len(frame.before) > 0,
                top_k=request.top_k or 1,
                max_tokens=request.max_answer_tokens or DEFAULT_ANSWER_TOKENS,
            )

        items = await off_loop(len(windows) * self._window_tokens(request), make, most_on_loop=_FEW)
        lengths = [len(item["input_ids"]) for item in items]
        with counted_tokens(sum(lengths)):
            batched = await self._batcher.submit(
                items, lengths, outputs=(LOGITS,), read=read, deadline=deadline, caller=current_caller()
            )
        for (pair, _), length, (found, null) in zip(windows, lengths, batched.results, strict=True):
            pair.found.append(found)
            pair.null = min(pair.null, null)
            pair.num_tokens += length
        return CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)


def _shared_tokens(request: QuestionRequest, room: int, question: str) -> int:
    """Returns the tokens that neighbouring windows share, of a context's `room` beside a question.

    Raises:
        InvalidInputError: They overlap wholly.
    """
    overlap = request.overlap_tokens
    if overlap is None:
        return shared_tokens(room)
    if overlap >= room:
        raise InvalidInputError(
            "overlap_token_count",
            f"is {overlap}, and beside {question} a window has {room} tokens of the context; give less, or raise "
            "window_token_count",
        )
    return overlap


def _windows(length: int, room: int, shared: int, *, name: str, before: int) -> list[Window]:
    """Returns the windows of a context of `length` tokens, behind `before` others of the call.

    Raises:
        InvalidInputError: They are too many.
    """
    windows = split(length, room, shared)
    if before + len(windows) > MAX_WINDOWS:
        raise InvalidInputError(
            name,
            f"has {length} tokens, which are {len(windows)} windows after {before} of the texts before; the limit of a "
            f"call is {MAX_WINDOWS}; split it, send the texts in several calls, lower overlap_token_count or raise "
            "window_token_count",
        )
    return windows


def _no_text(name: str) -> InvalidInputError:
    return InvalidInputError(name, "has no text; give it at least one word")
