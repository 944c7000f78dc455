"""A sequence: one prompt or source on its way through the engine, and its results.

    WAITING ──▶ PREFILLING ──▶ RUNNING ──▶ FINISHED
       │            │             │            ▲
       └────────────┴─────────────┴────────────┘  cancelled, past its deadline, failed

The sequence of an encoder-decoder skips PREFILLING: its source is encoded when it is admitted, and the few tokens that
its decoder starts from are read at once. The engine's thread alone changes a sequence, except for `cancelled`, which
the event loop sets and the engine reads at its next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.interfaces import EncodedSource, EncoderInput, OutputAssembler, PromptMedia
from headway_server.decoding.parameters import SamplingParameters, SearchParameters
from headway_server.decoding.rules import MinimumLength, TokenRule, all_of
from headway_server.errors import CancelledError, DeadlineError, OverloadedError
from headway_server.observers import current_call
from headway_server.runtime.worker import Pending


class FinishReason(Enum):
    """Why a sequence ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    """The model produced its end-of-sequence token."""
    STOP = "stop"
    """A stop string or stop token appeared, or the output is complete for another reason of its assembler's."""
    LENGTH = "length"
    """The limit of new tokens was reached."""
    CONSTRAINT = "constraint"
    """The text satisfies its constraint and nothing may follow."""


class Stage(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogProbability:
    """A token and its probability by the model alone, before penalties, biases, constraint and temperature."""

    token_id: int
    log_probability: float | None
    """Natural logarithm; None for the first token of a prompt."""
    top_tokens: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens at this position with log-probabilities, the likeliest first, followed by `scored_token_ids` in
    their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """An output that a search has found."""

    token_ids: tuple[int, ...]
    """Its tokens, including those of the prefix, without the end of the sequence."""
    output: Any
    """Output of the assembler."""
    log_probability: float
    """Sum of the natural logarithms of its tokens' probabilities, prefix and end of the sequence included."""
    score: float
    """Ranking score of the hypothesis."""
    num_new_tokens: int
    """Tokens produced, the end of the sequence included."""
    finish_reason: FinishReason
    alignment: NDArray[np.float32] | None = None
    """(len(token_ids), S) each token's attention over the S source positions; rows sum to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """Result of a sequence."""

    output: Any
    """Output of the assembler; a str for text."""
    finish_reason: FinishReason
    num_new_tokens: int
    """Tokens produced, the end of the sequence included."""
    log_probability: float
    """Sum of the natural logarithms of the produced tokens' probabilities; 0 if the engine does not compute it."""
    arrived_at: float
    """When it was handed to the engine, in seconds of `time.monotonic`, like the next two."""
    started_at: float
    """When it left the queue."""
    finished_at: float
    """When its last token was there."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache or another sample of the prompt had, so that they were not
    computed."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """New tokens without the final end or stop token, if log-probabilities are requested."""
    prompt_tokens: tuple[TokenLogProbability, ...] = ()
    """Tokens of the prompt, if their log-probabilities are requested."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """Hypotheses of a search, the best first, at most the requested number. Output, finish reason, number of tokens and
    log-probability above are those of the best. Without a search: the output, if alignment is requested, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output since the last delta of a stream."""

    output: Any
    """For text: whole characters, possibly none."""
    num_new_tokens: int
    """Tokens produced so far."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """New tokens since the last delta, if log-probabilities are requested."""
    prompt_tokens: tuple[TokenLogProbability, ...] = ()
    """Tokens of an echoed prompt, if their log-probabilities are requested."""
    text_offsets: tuple[int, ...] = ()
    """Character offsets of these tokens in the text, if the task computes them."""
    prompt_ids: NDArray[np.int64] | None = field(default=None, compare=False)
    """(P,) tokens of the prompt, if the task tells them."""
    sample: int = 0
    """Index of the continuation among those of its call."""


class Reply(Pending["SequenceResult"]):
    """Receiving side of a sequence. For the event loop alone."""

    def __init__(self, assembler: OutputAssembler) -> None:
        """Joins deltas for a slow reader as the assembler of the sequence's output does."""
        super().__init__()
        self._assembler = assembler
        self._parts: list[Any] = []
        self._num_new_tokens = 0
        self._tokens: list[TokenLogProbability] = []
        self._arrival = asyncio.Event()

    def add(self, part: Any, num_new_tokens: int, tokens: tuple[TokenLogProbability, ...] = ()) -> None:
        """Takes a part of the output that has appeared."""
        self._parts.append(part)
        self._tokens += tokens
        self._num_new_tokens = num_new_tokens
        self._arrival.set()

    def end(self, outcome: SequenceResult | BaseException) -> None:
        """See `Pending`; `deltas` ends too."""
        super().end(outcome)
        self._arrival.set()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields deltas as they appear; a slow reader gets several joined into one.

        Raises:
            Exception: Error of the sequence.
        """
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            ended = self.result.done()  # read before the yield: later arrivals belong to the next round
            if self._parts:
                parts, self._parts = self._parts, []
                tokens, self._tokens = tuple(self._tokens), []
                yield Delta(output=self._assembler.join(parts), num_new_tokens=self._num_new_tokens, tokens=tokens)
            if ended:
                self.result.result()
                return

    def __repr__(self) -> str:
        return f"Reply({'ended' if self.result.done() else 'open'}, {self._num_new_tokens} tokens)"


class SharedPrompt:
    """Samples of one prompt: the first computes it, the others copy its slot."""

    __slots__ = ("logits", "members")

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self.logits: NDArray[np.float32] | None = None
        """(V,) after the prompt's last token, once it has been computed."""

    def reader(self) -> Sequence | None:
        """Returns a member whose slot has the whole prompt, if there is one."""
        if self.logits is None:
            return None
        return next((member for member in self.members if member.stage is Stage.RUNNING), None)

    def forget(self) -> None:
        """Drops logits and members once all of them have begun: they refer to each other."""
        if not any(member.stage in (Stage.WAITING, Stage.PREFILLING) for member in self.members):
            self.logits = None
            self.members.clear()

    def __repr__(self) -> str:
        return f"SharedPrompt({len(self.members)} members, {'un' * (self.logits is None)}read)"


def share_prompt(sequences: Elements[Sequence]) -> None:
    """Makes sequences that have the same prompt, and are about to wait in this order, compute it once."""
    shared = SharedPrompt()
    shared.members.extend(sequences)
    for sequence in sequences:
        sequence.shared_prompt = shared


class Sequence:
    """One prompt or source, its parameters, and how far it has come."""

    __slots__ = (
        "arrived_at",
        "cache_salt",
        "call",
        "caller",
        "cancelled",
        "cross",
        "deadline",
        "delta_at",
        "eos_id",
        "first_token_at",
        "log_probability",
        "masked_at",
        "media",
        "more_eos_ids",
        "num_cached_tokens",
        "num_new_tokens",
        "num_prefilled",
        "num_tokens_taken",
        "output",
        "parameters",
        "priority",
        "prompt_digests",
        "prompt_ids",
        "prompt_tokens",
        "queue_position",
        "reply",
        "rule",
        "search",
        "search_state",
        "shared_prompt",
        "slot",
        "source",
        "stage",
        "started_at",
        "stop_ids",
        "token_at",
        "token_ids",
        "tokens",
        "wants_alignment",
        "wants_deltas",
    )

    def __init__(
        self,
        *,
        prompt_ids: NDArray[np.int64],
        source: EncoderInput | None = None,
        parameters: SamplingParameters,
        output: OutputAssembler,
        eos_id: int | None,
        more_eos_ids: frozenset[int] = frozenset(),
        deadline: float | None = None,
        wants_deltas: bool = False,
        priority: int = 0,
        caller: str = "",
        cache_salt: str = "",
        rule: TokenRule | None = None,
        search: SearchParameters | None = None,
        wants_alignment: bool = False,
        encoded: EncodedSource | None = None,
        media: PromptMedia | None = None,
    ) -> None:
        """Describes a sequence before it is submitted. Called on the event loop of its reply.

        Args:
            prompt_ids: (T,) int64 first tokens of the decoder, at least one: a prompt, or with a source start tokens
                (`bos`, a language, a task).
            source: Encoder input; None for a model without an encoder.
            parameters: Sampling parameters.
            output: Makes the output of the new tokens.
            eos_id: Token that ends the sequence.
            more_eos_ids: Further tokens that end it, where there is no search.
            deadline: When the caller stops waiting, in seconds of `time.monotonic`.
            wants_deltas: True hands the output out as it appears.
            priority: Priority among the caller's sequences; higher goes first.
            caller: Its caller; callers take turns.
            cache_salt: Isolates the prefix cache: only sequences with the same salt share it.
            rule: Token rule, in addition to the parameters; owned by the engine afterwards. A search needs a rule for
                beams (`TokenRule.follow`).
            search: Beam search parameters, for a sequence with a source. It takes `search.beam_size` slots, and of
                `parameters` only `max_new_tokens` applies. None: no beam search.
            wants_alignment: True returns each token's attention over the source, of a sequence that has one and no
                search (a search has a parameter of its own for it).
            encoded: Encoded source, if already computed: `cross` of an earlier sequence.
            media: Embeddings of the prompt's images, by their places in `prompt_ids`; None: it has none.
        """
        self.prompt_ids = prompt_ids
        self.media = media
        self.source = source
        self.parameters = parameters
        self.stop_ids = frozenset(parameters.stop_token_ids)
        self.output = output
        self.reply = Reply(output)
        self.eos_id = eos_id
        self.more_eos_ids = more_eos_ids
        self.deadline = float("inf") if deadline is None else deadline
        self.wants_deltas = wants_deltas
        self.priority = priority
        self.caller = caller
        self.cache_salt = cache_salt
        self.rule = rule
        self.search = search
        if search is None and parameters.min_new_tokens and self.end_ids:
            self.rule = all_of(rule, MinimumLength(tuple(self.end_ids), parameters.min_new_tokens))
        self.wants_alignment = wants_alignment or (search is not None and search.wants_alignment)
        self.token_ids: list[int] = []  # of the output, if its alignment needs them
        self.stage = Stage.WAITING
        self.cancelled = False
        self.slot = -1
        self.queue_position = (0, 0)
        self.shared_prompt: SharedPrompt | None = None
        self.prompt_digests: list[bytes] = []  # of whole chunks, for the prefix cache
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.num_new_tokens = 0
        self.tokens: list[TokenLogProbability] = []
        self.num_tokens_taken = 0
        self.delta_at = float("-inf")  # when the last delta was handed out
        self.masked_at = 0  # number of the step in which its rule was last asked
        self.prompt_tokens: list[TokenLogProbability] = []
        self.log_probability = 0.0
        self.search_state: Any = None  # a `BeamBlock`, while it is searched
        self.cross: Any = encoded  # `EncodedSource` of `source`
        self.arrived_at = 0.0
        self.started_at = 0.0
        self.call = current_call()  # the next two are written where there is an observer
        self.first_token_at = 0.0
        self.token_at = 0.0  # when it got its newest one

    def __repr__(self) -> str:
        return (
            f"Sequence({self.stage.value}, slot {self.slot}, {len(self.prompt_ids)} prompt tokens, "
            f"{self.num_prefilled} prefilled, {self.num_new_tokens} of {self.parameters.max_new_tokens} new)"
        )

    @property
    def num_beams(self) -> int:
        """Neighbouring slots that it takes."""
        return 1 if self.search is None else self.search.beam_size

    @property
    def num_written(self) -> int:
        """Positions of its slot that are written. The newest token's is not: the next step writes it."""
        if self.num_new_tokens == 0:
            return self.num_prefilled
        return len(self.prompt_ids) + self.num_new_tokens - 1

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        own = self.more_eos_ids if self.eos_id is None else self.more_eos_ids | {self.eos_id}
        return self.stop_ids | own

    def accept(
        self, token_id: int, log_probability: float, top_tokens: Elements[tuple[int, float]] = ()
    ) -> FinishReason | None:
        """Takes the next token; returns why the sequence ends with it, if it does."""
        self.num_new_tokens += 1
        self.log_probability += log_probability
        if token_id == self.eos_id or token_id in self.more_eos_ids:
            return FinishReason.END_OF_SEQUENCE
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if self.wants_alignment:
            self.token_ids.append(token_id)
        if self.parameters.num_top_tokens is not None:
            self.tokens.append(TokenLogProbability(token_id, log_probability, tuple(top_tokens)))
        if self.output.push(token_id):
            return FinishReason.STOP
        if self.rule is not None:
            self.rule = self.rule.follow(token_id)
            if self.rule.is_complete:
                return FinishReason.CONSTRAINT
        if self.num_new_tokens == self.parameters.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def take_tokens(self) -> tuple[TokenLogProbability, ...]:
        """Returns the tokens since the last call, if log-probabilities are requested."""
        taken = tuple(self.tokens[self.num_tokens_taken :])
        self.num_tokens_taken = len(self.tokens)
        return taken

    def overdue_error(self) -> CancelledError | DeadlineError:
        """Returns why it ends, once it was cancelled or its deadline has passed."""
        if self.cancelled:
            return CancelledError("the caller has gone")
        if self.stage is Stage.WAITING:
            return DeadlineError(
                "the deadline passed while the call waited for a free slot; allow more time or try later"
            )
        return DeadlineError(
            f"the deadline passed after {self.num_new_tokens} of at most {self.parameters.max_new_tokens} tokens; "
            "allow more time or ask for fewer"
        )

    def hopeless_error(self, takes_s: float, left_s: float) -> OverloadedError:
        """Returns why it is not begun, though `left_s` seconds are left, once others wait for the slot."""
        return OverloadedError(
            f"waited for a slot until {left_s:.2f} s were left, and would take {takes_s:.2f} s; try again in "
            f"{takes_s:.2f} s",
            takes_s,
            is_late=True,
        )

    def result(
        self, finish_reason: FinishReason, now: float, alignment: NDArray[np.float32] | None = None
    ) -> SequenceResult:
        """Completes the output and returns the result, with the alignment (T, S) of the new tokens if it is wanted."""
        output = self.output.finish()
        return SequenceResult(
            output=output,
            finish_reason=finish_reason,
            num_new_tokens=self.num_new_tokens,
            log_probability=self.log_probability,
            arrived_at=self.arrived_at,
            started_at=self.started_at,
            finished_at=now,
            num_cached_tokens=self.num_cached_tokens,
            tokens=tuple(self.tokens),
            prompt_tokens=tuple(self.prompt_tokens),
            hypotheses=() if alignment is None else (self._aligned(output, finish_reason, alignment),),
        )

    def _aligned(self, output: Any, finish_reason: FinishReason, alignment: NDArray[np.float32]) -> Hypothesis:
        """Returns an output made without a search as a hypothesis, scored with the usual length penalty of 1."""
        return Hypothesis(
            token_ids=tuple(self.token_ids),
            output=output,
            log_probability=self.log_probability,
            score=self.log_probability / self.num_new_tokens,
            num_new_tokens=self.num_new_tokens,
            finish_reason=finish_reason,
            alignment=alignment,
        )
