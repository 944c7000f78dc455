"""Makes constraints of requests, for one model."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from headway_server.engine.constraints.grammar import explain, write_grammar
from headway_server.engine.constraints.request import ConstraintRequest
from headway_server.engine.constraints.state import ConstraintState, ModelMasks
from headway_server.engine.constraints.vocabulary import (
    UnsupportedTokenizerError,
    Vocabulary,
    read_vocabulary,
)
from headway_server.errors import InvalidInputError, WrongTaskError
from headway_server.preprocessing.pool import text_pool

MAX_CACHED = 32
"""Compiled constraints that are kept."""

_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # a few hundred bytes each, for every sequence
    verbose_errors=False,
)
"""Beside the library's own: work to build a grammar, its size, and work a step."""


@dataclass(frozen=True, slots=True)
class _ModelParts:
    """What is made once for a model."""

    vocabulary: Vocabulary
    tokenizer: LLTokenizer
    masks: ModelMasks


class CompiledConstraint:
    """What texts may look like, ready to be started for any number of sequences. Safe to use from several threads."""

    __slots__ = ("_end_ids", "_lock", "_masks", "_matcher")

    def __init__(self, matcher: LLMatcher, masks: ModelMasks, eos_id: int | None) -> None:
        self._matcher = matcher
        self._masks = masks
        self._end_ids = frozenset(() if eos_id is None else (eos_id,))
        self._lock = Lock()

    def start(self, *, end_ids: frozenset[int] = frozenset(), follows_text: bool = True) -> ConstraintState:
        """Makes the state of a new sequence; takes some microseconds.

        Args:
            end_ids: Tokens that end the text beside the model's end-of-sequence token: the request's stop tokens. They
                may follow only where the text may end.
            follows_text: Whether the prompt has any text; False if it is nothing but special tokens.
        """
        with self._lock:
            matcher = self._matcher.deep_copy()
        return ConstraintState(matcher, self._masks, end_ids=self._end_ids | end_ids, is_at_beginning=not follows_text)


class ConstraintCompiler:
    """Compiles the constraints of one model. Safe to use from several threads.

    What it needs of the vocabulary is made with the first constraint, not when it is made itself.
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
        self._cache: OrderedDict[ConstraintRequest, CompiledConstraint] = OrderedDict()

    async def compile_off_loop(self, request: ConstraintRequest, *, field: str) -> CompiledConstraint:
        """Does `compile` on a thread of its own kind, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(text_pool(), lambda: self.compile(request, field=field))

    def compile(self, request: ConstraintRequest, *, field: str) -> CompiledConstraint:
        """Makes a constraint, or finds one that was made of the same request. Blocks: not for the event loop.

        Args:
            request: What the text must look like.
            field: What the request calls it, such as `sampling.constraint`.

        Raises:
            InvalidInputError: It is too large, means nothing, allows no text, or needs what is not supported.
            WrongTaskError: The model's tokenizer cannot be constrained.
        """
        with self._lock:
            if (found := self._cache.get(request)) is not None:
                self._cache.move_to_end(request)
                return found
        request.check_size(field)
        compiled = self._compile(request, field)
        with self._lock:
            self._cache[request] = compiled
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, request: ConstraintRequest, field: str) -> CompiledConstraint:
        parts = self._load()
        field = f"{field}.{request.kind}"
        grammar = write_grammar(request, parts.vocabulary, field)
        matcher = LLMatcher(parts.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some mistakes show with the first mask, and it makes every first step faster
        if matcher.is_error():
            raise InvalidInputError(field, explain(matcher.get_error(), request))
        compiled = CompiledConstraint(matcher, parts.masks, self._eos_id)
        first = compiled.start()
        first.fill(mask := np.empty_like(parts.masks.text))
        if first.failure is not None:
            raise InvalidInputError(field, f"cannot be met: {first.failure}")
        if not (mask & parts.masks.text).any():
            raise InvalidInputError(field, "allows no text but the empty one, which needs no model")
        return compiled

    def _load(self) -> _ModelParts:
        with self._lock:
            if self._parts is None:
                self._parts = _load_parts(self._tokenizer, self._vocab_size, self._eos_id)
            return self._parts

    def __repr__(self) -> str:
        return f"ConstraintCompiler({self._vocab_size} tokens, {len(self._cache)} of {MAX_CACHED} constraints kept)"


def _load_parts(tokenizer: Tokenizer | Path, vocab_size: int, eos_id: int | None) -> _ModelParts:
    if isinstance(tokenizer, Path):
        tokenizer = Tokenizer.from_file(str(tokenizer))
    try:
        vocabulary = read_vocabulary(tokenizer, vocab_size, eos_id)
    except UnsupportedTokenizerError as error:
        raise WrongTaskError(f"this model's texts cannot be constrained: {error}") from error
    # The library wants one token that ends a text; a model has none or several, so it gets one past the model's.
    library_tokens = SimpleNamespace(
        tokens=(*vocabulary.tokens, b""), eos_token_id=vocab_size, bos_token_id=None, special_token_ids=[vocab_size]
    )
    masks = ModelMasks(
        text=vocabulary.mask(bool),
        first=vocabulary.mask(lambda token: bool(token) and not (vocabulary.drops_first_space and b" " in token)),
        num_words=-(-(vocab_size + 1) // 32),
        spells_everything=vocabulary.spells_everything,
    )
    return _ModelParts(vocabulary, LLTokenizer(TokenizerWrapper(library_tokens)), masks)
