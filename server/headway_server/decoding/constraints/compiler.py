"""Compiles the constraints of calls, for one model."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, RLock
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from headway_server.decoding.constraints.closing import Closing, ClosingTokens, growth_of
from headway_server.decoding.constraints.grammar import ConstraintRequest, explain, without_tokens, write_grammar
from headway_server.decoding.constraints.state import ConstraintState, ModelMasks
from headway_server.decoding.constraints.trial import (
    CPU_LIMIT_S,
    LIMITS,
    MEMORY_LIMIT_BYTES,
    WALL_LIMIT_S,
    BusyError,
    try_grammar,
)
from headway_server.decoding.constraints.vocabulary import (
    UnsupportedTokenizerError,
    Vocabulary,
    read_vocabulary,
)
from headway_server.errors import InvalidInputError, OverloadedError, WrongTaskError
from headway_server.preprocessing.pool import constraint_pool

MAX_CACHED = 128
"""Constraints whose grammar, or refusal, is remembered, so that it is checked once."""
MAX_COMPILING_S = 10.0
"""Seconds that a call waits for its constraint, including other calls' constraints before it."""
MAX_CONSTRAINT_BYTES = 256 * 2**20
"""Maximum memory of the constraints of all calls, including waiting ones, as measured by their trials."""

_MAX_REMEMBERED_CHARACTERS = 512 * 1024
"""Maximum size of a cached constraint. Valid ones are within it by their limits; invalid ones may have any size."""
_MAX_SHARING = 8
"""Sequences that share an automaton, if another one takes less than `_CHEAP_S`."""
_CHEAP_S = 0.005
_RETRY_S = 1.0

_IDENTIFIERS = "[a-zA-Z0-9]{1,10}"
"""Tokens of this kind are marked together where all of them may follow; the library has other such kinds for JSON."""


@dataclass(frozen=True, slots=True)
class _ModelParts:
    """Parts made once for each model."""

    vocabulary: Vocabulary
    tokenizer: LLTokenizer
    masks: ModelMasks
    closing: ClosingTokens


@dataclass(frozen=True, slots=True)
class _Grammar:
    """A constraint that has passed its trial."""

    text: str
    """As the library reads it."""
    num_bytes: int
    """Its memory when compiled."""
    special_ids: frozenset[int]
    """Special tokens that it allows."""
    growth: int | None
    """See `growth_of`."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a constraint was refused."""

    path: str
    """Name of the field below the constraint, such as `.regex`."""
    description: tuple[str, ...]


class Reservation:
    """Reservation of a compiled grammar's memory, for as long as this object is referenced."""

    __slots__ = ("_num_bytes",)

    _lock: ClassVar = RLock()  # an object may be deleted at any time, within this lock too
    _total_bytes: ClassVar[int] = 0

    def __init__(self, num_bytes: int) -> None:
        """Takes the memory.

        Raises:
            OverloadedError: Other grammars take it.
        """
        self._num_bytes = 0
        with self._lock:
            if Reservation._total_bytes + num_bytes > MAX_CONSTRAINT_BYTES:
                raise OverloadedError(
                    f"the constraints of other calls take {Reservation._total_bytes >> 20} MiB, this one takes "
                    f"{num_bytes / 2**20:g}, and the limit is {MAX_CONSTRAINT_BYTES >> 20}; try again later",
                    _RETRY_S,
                )
            Reservation._total_bytes += num_bytes
            self._num_bytes = num_bytes

    @classmethod
    def total_bytes(cls) -> int:
        """Returns the bytes that all of them take together."""
        return cls._total_bytes

    def __del__(self) -> None:
        with self._lock:
            Reservation._total_bytes -= self._num_bytes

    def __repr__(self) -> str:
        return f"Reservation({self._num_bytes} of {Reservation._total_bytes} bytes)"


class CompiledConstraint:
    """Compiled constraint of a call, which can be started for any number of sequences.

    Safe to use from several threads. The automaton is built as far as texts need it, and its size is limited. Only a
    few sequences share one, and never those of different calls, so that no call uses up the limit of another.
    """

    __slots__ = (
        "_build",
        "_closing",
        "_end_ids",
        "_is_cheap",
        "_lock",
        "_masks",
        "_matcher",
        "_num_bytes",
        "_num_started",
        "_reservation",
    )

    def __init__(
        self,
        build: Callable[[], LLMatcher],
        masks: ModelMasks,
        eos_id: int | None,
        *,
        num_bytes: int,
        closing: Callable[[int], Closing] | None = None,
    ) -> None:
        """Compiles a grammar of `num_bytes`; `closing` makes the end of a text of JSON within a maximum of tokens."""
        self._closing = closing
        began = time.thread_time()
        self._build = build
        self._num_bytes = num_bytes
        self._reservation = Reservation(num_bytes)
        self._matcher = build()
        self._is_cheap = time.thread_time() - began < _CHEAP_S
        self._num_started = 0
        self._masks = masks
        self._end_ids = frozenset(() if eos_id is None else (eos_id,))
        self._lock = Lock()

    @property
    def complaint(self) -> str | None:
        """The library's error message for the grammar; None for a valid one."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def start(
        self, *, end_ids: frozenset[int] = frozenset(), follows_text: bool = True, max_tokens: int | None = None
    ) -> ConstraintState:
        """Makes the state of a new sequence; takes some microseconds, sometimes a few milliseconds.

        Args:
            end_ids: The request's stop tokens, which end the text as the end-of-sequence token does. They may follow
                only where the text may end.
            follows_text: True if the prompt has any text; False if it has only special tokens.
            max_tokens: Maximum tokens of the text and of what is before it, such as reasoning; None: no maximum.

        Raises:
            OverloadedError: It takes another automaton, and there is no memory for it.
        """
        with self._lock:
            if self._is_cheap and self._num_started == _MAX_SHARING:
                self._reservation = Reservation(self._num_bytes)
                self._matcher, self._num_started = self._build(), 0
            self._num_started += 1
            matcher, reservation = self._matcher.deep_copy(), self._reservation
        return ConstraintState(
            matcher,
            self._masks,
            end_ids=self._end_ids | end_ids,
            is_at_beginning=not follows_text,
            closing=None if self._closing is None or max_tokens is None else self._closing(max_tokens),
            reservation=reservation,
        )

    def __repr__(self) -> str:
        return f"CompiledConstraint({'wrong' if self._matcher.is_error() else 'ready'})"


class ConstraintCompiler:
    """Compiles the constraints of one model. Safe to use from several threads.

    It reads the vocabulary when the first constraint comes.
    """

    def __init__(self, tokenizer: Tokenizer | Path, *, vocab_size: int, eos_id: int | None) -> None:
        """Describes the model.

        Args:
            tokenizer: The bundle's tokenizer, or its file.
            vocab_size: V, the number of the model's logits; may be larger than the tokenizer's vocabulary.
            eos_id: Token that ends a text, if the model has one.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._lock = Lock()
        self._parts: _ModelParts | None = None
        self._known: OrderedDict[ConstraintRequest, _Grammar | _Refusal] = OrderedDict()  # its grammar, or why not

    async def compile_off_loop(self, request: ConstraintRequest, *, field: str) -> CompiledConstraint:
        """Does `compile` on a thread for constraints; the caller waits at most `MAX_COMPILING_S`.

        Raises:
            OverloadedError: The time limit passed, or the constraints of other calls leave no memory.
        """
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(constraint_pool(), lambda: self.compile(request, field=field))
        try:
            return await asyncio.wait_for(compiling, MAX_COMPILING_S)
        except TimeoutError:
            raise OverloadedError(
                f"compiling constraints is taking more than {MAX_COMPILING_S:g} s; try again, or use a simpler one",
                MAX_COMPILING_S,
            ) from None

    def compile(self, request: ConstraintRequest, *, field: str) -> CompiledConstraint:
        """Compiles the constraint of a call. Takes milliseconds, and a check may take a second.

        Args:
            request: Constraint of the text.
            field: Its name in the request, such as `parameters.constraint`.

        Raises:
            InvalidInputError: It is too large, invalid, allows no text, or needs an unsupported feature.
            OverloadedError: The constraints of other calls leave no memory.
            WrongTaskError: The model's tokenizer cannot be constrained.
        """
        parts = self._load()
        with self._lock:
            known = self._known.get(request)
            if known is not None:
                self._known.move_to_end(request)
        if isinstance(known, _Refusal):
            raise InvalidInputError(field + known.path, *known.description)
        if known is not None:
            return self._constraint(parts, known)
        try:
            grammar, constraint = self._check(parts, request, field)
        except InvalidInputError as error:
            self._remember(request, _Refusal(error.field.removeprefix(field), error.parts))
            raise
        self._remember(request, grammar)
        return constraint

    def _check(self, parts: _ModelParts, request: ConstraintRequest, field: str) -> tuple[_Grammar, CompiledConstraint]:
        """Compiles a constraint that is not known yet; of several schemas, an error names the wrong one."""
        request.check_size(field)
        try:
            return self._compile(parts, request, f"{field}.{request.kind}")
        except InvalidInputError:
            for name, part in request.parts(field):
                self._compile(parts, part, name)
            raise

    def _compile(
        self, parts: _ModelParts, request: ConstraintRequest, field: str
    ) -> tuple[_Grammar, CompiledConstraint]:
        """Compiles a constraint and tries its first step; `field` is its name in the request with its kind."""
        text = write_grammar(request, parts.vocabulary, field)
        tried = write_grammar(without_tokens(request), parts.vocabulary, field)
        grammar = _Grammar(text, _check_cost(tried, field), request.special_ids, growth_of(request))
        constraint = self._constraint(parts, grammar)
        if constraint.complaint is not None:
            raise InvalidInputError(field, explain(constraint.complaint, request))
        _check_beginning(constraint, parts.masks.with_tokens(grammar.special_ids), field)
        return grammar, constraint

    def _remember(self, request: ConstraintRequest, outcome: _Grammar | _Refusal) -> None:
        """Caches the result of a request, unless it is too large."""
        if request.num_characters > _MAX_REMEMBERED_CHARACTERS:
            return
        with self._lock:
            self._known[request] = outcome
            if len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)

    def _constraint(self, parts: _ModelParts, grammar: _Grammar) -> CompiledConstraint:
        def build() -> LLMatcher:
            matcher = LLMatcher(parts.tokenizer, grammar.text, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some errors show only here, and the first step finds it done
            return matcher

        masks = parts.masks.with_tokens(grammar.special_ids)
        return CompiledConstraint(
            build,
            masks,
            self._eos_id,
            num_bytes=grammar.num_bytes,
            closing=None if grammar.growth is None else partial(Closing, parts.closing, growth=grammar.growth),
        )

    def _load(self) -> _ModelParts:
        with self._lock:
            if self._parts is None:
                self._parts = _load_parts(self._tokenizer, self._vocab_size, self._eos_id)
            return self._parts

    def __repr__(self) -> str:
        return f"ConstraintCompiler({self._vocab_size} tokens, {len(self._known)} of {MAX_CACHED} constraints known)"


def _check_cost(grammar: str, field: str) -> int:
    """Compiles a grammar where it may crash, before the server does; returns the bytes it takes.

    Raises:
        InvalidInputError: It took too much.
        OverloadedError: The trial got too little processor time.
    """
    try:
        if (num_bytes := try_grammar(grammar)) is not None:
            return num_bytes
    except BusyError:
        raise OverloadedError(
            f"the server is too busy to check a constraint in {WALL_LIMIT_S:g} s; try again later", WALL_LIMIT_S
        ) from None
    raise InvalidInputError(
        field,
        f"takes more than {CPU_LIMIT_S:g} s or {MEMORY_LIMIT_BYTES >> 20} MiB to be compiled; use a simpler one, with "
        "fewer allOf, oneOf, patternProperties and patterns that are combined with each other",
    )


def _check_beginning(constraint: CompiledConstraint, masks: ModelMasks, field: str) -> None:
    """Tries the first step.

    Raises:
        InvalidInputError: No token may begin a text.
    """
    state = constraint.start()
    state.allow(mask := np.full_like(masks.text, -1))
    if state.failure is not None:
        raise InvalidInputError(field, f"cannot be met: {state.failure}")
    if not (mask & masks.text).any():
        raise InvalidInputError(field, "allows no text but the empty one, which needs no model")


def _load_parts(tokenizer: Tokenizer | Path, vocab_size: int, eos_id: int | None) -> _ModelParts:
    if isinstance(tokenizer, Path):
        tokenizer = Tokenizer.from_file(str(tokenizer))
    try:
        vocabulary = read_vocabulary(tokenizer, vocab_size, eos_id)
    except UnsupportedTokenizerError as error:
        raise WrongTaskError(f"this model's texts cannot be constrained: {error}") from error
    # The library wants one token that ends a text. A model may have none or several, so it gets one past the model's.
    library_tokens = SimpleNamespace(
        tokens=(*vocabulary.tokens, b""), eos_token_id=vocab_size, bos_token_id=None, special_token_ids=[vocab_size]
    )
    masks = ModelMasks(
        text=vocabulary.mask(bool),
        first=vocabulary.mask(lambda token: bool(token) and not (vocabulary.drops_first_space and b" " in token)),
        num_words=-(-(vocab_size + 1) // 32),
        spells_everything=vocabulary.spells_everything,
    )
    white_space, *texts = LLTokenizer.general_slices()
    slices = [white_space, _IDENTIFIERS, *texts]
    tokenizer_of_library = LLTokenizer(TokenizerWrapper(library_tokens), slices=slices)
    return _ModelParts(vocabulary, tokenizer_of_library, masks, ClosingTokens(vocabulary))
