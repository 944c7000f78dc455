"""A sequence: one prompt or sentence on its way through the engine.

    WAITING ──▶ PREFILLING ──▶ RUNNING ──▶ FINISHED
       │            │             │            ▲
       └────────────┴─────────────┴────────────┘  cancelled, past its deadline, failed

A translation skips PREFILLING: its source goes through the encoder when it is admitted. The engine's thread alone
changes a sequence, but for `cancelled`, which the event loop sets and the engine reads at its next step.
"""

from __future__ import annotations

from collections.abc import Sequence as Elements
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.beam_search.hypothesis import Hypothesis, SearchParameters
from headway_server.decoding.interfaces import Constraint
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.reply import Reply
from headway_server.errors import CancelledError, DeadlineError


class FinishReason(Enum):
    """Why a sequence ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    """The model produced its end-of-sequence token."""
    STOP = "stop"
    """A stop string or stop token appeared."""
    LENGTH = "length"
    """The limit of new tokens was reached."""
    CONSTRAINT = "constraint"
    """The text fulfils its constraint and nothing may follow."""


class Stage(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How to choose tokens; `sampler.py` defines each exactly. Checked where it is made, `tasks/parameters.py`."""

    max_new_tokens: int
    """Most tokens to produce."""
    temperature: float = 0.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 turns it off."""
    top_p: float = 1.0
    """Sample among the smallest set of tokens whose probability reaches p."""
    seed: int = 0
    """Seed of the random stream, 0 to 2**64 - 1."""
    sample: int = 0
    """Number of the sample among those of one seed."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the text, as the end-of-sequence token does."""
    min_new_tokens: int = 0
    """Tokens to produce before the end-of-sequence token or a stop token may follow."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability; 0 turns it off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt and of the text so far."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the text so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for every time it is in the text so far."""
    logit_biases: tuple[tuple[int, float], ...] = ()
    """Token and what is added to its logit; every token once."""
    num_top_tokens: int | None = None
    """Likeliest tokens whose log-probabilities are wanted at each position, beside the chosen one's."""
    wants_prompt_log_probabilities: bool = False
    """Whether those of the prompt's tokens are wanted too."""


@dataclass(frozen=True, slots=True)
class TokenLogProbability:
    """A token and how likely the model found it, before penalties, biases, constraint and temperature."""

    token_id: int
    log_probability: float | None
    """Natural logarithm; None for the first token of a prompt."""
    top_tokens: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its place with their log-probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What became of a sequence."""

    text: str
    finish_reason: FinishReason
    num_new_tokens: int
    """Tokens produced, the end of the sequence included."""
    log_probability: float
    """Sum of the natural logarithms of the produced tokens' probabilities; 0 where the engine does not compute it."""
    arrived_at: float
    """When it was handed to the engine, in seconds of `time.monotonic`, like the next two."""
    started_at: float
    """When it left the queue."""
    finished_at: float
    """When its last token was there."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that had been read for an earlier sequence and were not read again."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """The produced tokens, where log-probabilities were asked for; without those that are not part of the text at its
    end (the end of the sequence, a stop token)."""
    prompt_tokens: tuple[TokenLogProbability, ...] = ()
    """The prompt's tokens, where theirs were asked for."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """What its search found, the best first: as many as were asked for, or as there are. Its text, finish reason,
    number of tokens and log-probability are those of the best. Without a search, the one translation there is where its
    alignment was asked for, and otherwise nothing."""


class SharedPrompt:
    """What the samples of one prompt share: the first of them reads it, the others begin where that one did."""

    __slots__ = ("logits", "members")

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self.logits: NDArray[np.float32] | None = None
        """(V,) after the prompt's last token, once it has been read."""

    def reader(self) -> Sequence | None:
        """Returns a member whose slot holds the whole prompt, if there is one."""
        if self.logits is None:
            return None
        return next((member for member in self.members if member.stage is Stage.RUNNING), None)

    def forget(self) -> None:
        """Lets go of logits and members once all of them have begun; they hold each other."""
        if not any(member.stage in (Stage.WAITING, Stage.PREFILLING) for member in self.members):
            self.logits = None
            self.members.clear()

    def __repr__(self) -> str:
        return f"SharedPrompt({len(self.members)} members, {'un' * (self.logits is None)}read)"


def share_prompt(sequences: Elements[Sequence]) -> None:
    """Lets sequences with the same prompt, about to wait in this order, read it once."""
    shared = SharedPrompt()
    shared.members.extend(sequences)
    for sequence in sequences:
        sequence.shared_prompt = shared


class Sequence:
    """One prompt or sentence, its parameters and how far it is."""

    __slots__ = (
        "arrived_at",
        "block",
        "cancelled",
        "constraint",
        "cross",
        "deadline",
        "eos_id",
        "first_id",
        "input_ids",
        "log_probability",
        "num_cached_tokens",
        "num_new_tokens",
        "num_prefilled",
        "num_tokens_taken",
        "parameters",
        "piece_at",
        "place_in_queue",
        "priority",
        "prompt_digests",
        "prompt_tokens",
        "reply",
        "search",
        "shared_prompt",
        "slot",
        "stage",
        "started_at",
        "text",
        "token_ids",
        "tokens",
        "wants_alignment",
        "wants_pieces",
    )

    def __init__(
        self,
        *,
        input_ids: NDArray[np.int64],
        parameters: SamplingParameters,
        text: TextAssembly,
        reply: Reply,
        eos_id: int | None,
        deadline: float | None = None,
        wants_pieces: bool = False,
        first_id: int | None = None,
        priority: int = 0,
        constraint: Constraint | None = None,
        search: SearchParameters | None = None,
        wants_alignment: bool = False,
    ) -> None:
        """Describes a sequence that is about to wait.

        Args:
            input_ids: (T,) int64 tokens of the prompt or of the source sentence, at least one.
            parameters: How to choose tokens.
            text: Makes text of the tokens.
            reply: Takes pieces and the result to the caller.
            eos_id: Token that ends the sequence.
            deadline: When the caller stops waiting, in seconds of `time.monotonic`.
            wants_pieces: Whether the text is handed out as it appears.
            first_id: The token at position 0, for a translation; a prompt has its own.
            priority: Place in the queue: higher ones go first.
            constraint: What the text must look like; the engine's from now on.
            search: How to search for a translation, which then takes `search.beam_size` slots, and of `parameters`
                only the number of tokens holds; None: tokens are chosen as `parameters` says.
            wants_alignment: Whether each token's attention over the source is wanted, for a translation without a
                search; one with a search says so itself.
        """
        self.input_ids = input_ids
        self.parameters = parameters
        self.text = text
        self.reply = reply
        self.eos_id = eos_id
        self.deadline = float("inf") if deadline is None else deadline
        self.wants_pieces = wants_pieces
        self.first_id = first_id
        self.priority = priority
        self.constraint = constraint
        self.search = search
        self.wants_alignment = wants_alignment or (search is not None and search.wants_alignment)
        self.token_ids: list[int] = []  # of the text, where they are needed for its alignment
        self.stage = Stage.WAITING
        self.cancelled = False
        self.slot = -1
        self.place_in_queue = (0, 0)
        self.shared_prompt: SharedPrompt | None = None
        self.prompt_digests: list[bytes] = []  # of whole chunks, for the prefix cache
        self.num_prefilled = 0
        self.num_cached_tokens = 0
        self.num_new_tokens = 0
        self.tokens: list[TokenLogProbability] = []
        self.num_tokens_taken = 0
        self.piece_at = float("-inf")  # when the last piece was handed out
        self.prompt_tokens: list[TokenLogProbability] = []
        self.log_probability = 0.0
        self.block: Any = None  # its beams and where they are, as long as it is searched; a BeamBlock
        self.cross: Any = None  # what the encoder made of the source; the runner's own type
        self.arrived_at = 0.0
        self.started_at = 0.0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.stage.value}, slot {self.slot}, {len(self.input_ids)} input tokens, "
            f"{self.num_prefilled} prefilled, {self.num_new_tokens} of {self.parameters.max_new_tokens} new)"
        )

    @property
    def num_beams(self) -> int:
        """Neighbouring slots that it takes."""
        return 1 if self.search is None else self.search.beam_size

    @property
    def num_cached(self) -> int:
        """Positions of its slot that are written. The newest token is not among them: the next step writes it."""
        return self.num_prefilled + max(self.num_new_tokens - 1, 0) if self.first_id is None else self.num_new_tokens

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        stop_ids = self.parameters.stop_ids
        return stop_ids if self.eos_id is None else stop_ids | {self.eos_id}

    def accept(
        self, token_id: int, log_probability: float, top_tokens: Elements[tuple[int, float]] = ()
    ) -> FinishReason | None:
        """Takes the next token and says whether the sequence ends with it."""
        self.num_new_tokens += 1
        self.log_probability += log_probability
        if token_id == self.eos_id:
            return FinishReason.END_OF_SEQUENCE
        if token_id in self.parameters.stop_ids:
            return FinishReason.STOP
        if self.wants_alignment:
            self.token_ids.append(token_id)
        if self.parameters.num_top_tokens is not None:
            self.tokens.append(TokenLogProbability(token_id, log_probability, tuple(top_tokens)))
        if self.text.push(token_id):
            return FinishReason.STOP
        if self.constraint is not None:
            self.constraint.accept(token_id)
            if self.constraint.is_complete:
                return FinishReason.CONSTRAINT
        if self.num_new_tokens == self.parameters.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def take_tokens(self) -> tuple[TokenLogProbability, ...]:
        """Returns the tokens since the last call, where log-probabilities were asked for."""
        taken = tuple(self.tokens[self.num_tokens_taken :])
        self.num_tokens_taken = len(self.tokens)
        return taken

    def overdue_error(self) -> CancelledError | DeadlineError:
        """Returns why it ends, where it was cancelled or its deadline has passed."""
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

    def result(
        self, finish_reason: FinishReason, now: float, alignment: NDArray[np.float32] | None = None
    ) -> SequenceResult:
        """Closes the text and returns the result, with the alignment (T, S) of the tokens where it is wanted."""
        text = self.text.finish()
        return SequenceResult(
            text=text,
            finish_reason=finish_reason,
            num_new_tokens=self.num_new_tokens,
            log_probability=self.log_probability,
            arrived_at=self.arrived_at,
            started_at=self.started_at,
            finished_at=now,
            num_cached_tokens=self.num_cached_tokens,
            tokens=tuple(self.tokens),
            prompt_tokens=tuple(self.prompt_tokens),
            hypotheses=() if alignment is None else (self._aligned(text, finish_reason, alignment),),
        )

    def _aligned(self, text: str, finish_reason: FinishReason, alignment: NDArray[np.float32]) -> Hypothesis:
        """Returns a translation that was made without a search as a hypothesis, with the usual length penalty of 1."""
        return Hypothesis(
            token_ids=tuple(self.token_ids),
            text=text,
            log_probability=self.log_probability,
            score=self.log_probability / self.num_new_tokens,
            num_new_tokens=self.num_new_tokens,
            finish_reason=finish_reason,
            alignment=alignment,
        )
