"""One step of the engine: sequences leave, sequences enter, a chunk of a prompt is read, all others get a token.

docs/engine.md describes it.

Shapes: R running sequences (slots 0 to R-1), T tokens and S source positions of a sequence, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Elements
from contextlib import suppress
from typing import Final, Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.decoding.beam_search.step import SearchStep, align
from headway_server.decoding.core.block_layout import Group, Move
from headway_server.decoding.core.outbox import Outbox
from headway_server.decoding.core.pace import EnginePace
from headway_server.decoding.core.prefill import PrefillStep
from headway_server.decoding.core.scheduler import Chunk, Scheduler
from headway_server.decoding.core.waiting import PriorityScope
from headway_server.decoding.interfaces import Decoder, DraftVerifier, Encoder
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.sampler import SampledTokens, TokenSampler
from headway_server.decoding.sequence import Sequence, Stage
from headway_server.decoding.slots import Slots
from headway_server.decoding.speculation.drafting import Drafting, VerifiedDraft
from headway_server.errors import InvalidInputError, ModelRunError, RequestError, is_failure
from headway_server.observers import (
    NO_OBSERVER,
    ModelId,
    Observer,
    QueueEvent,
    SequenceEvent,
    StepEvent,
    TokensEvent,
)
from headway_server.runtime.worker import run_error

_log = structlog.get_logger(__name__)

_NOT_FINITE: Final = "the model's logits are not finite, or no token is allowed"
_SHORT_PREFILLS: Final = 4
"""Short prompts that are read between two decode steps at most. However short, each takes a pass over all weights,
about a quarter of the time of a whole chunk."""
_MASK_BUDGET_S: Final = 0.01
"""Processor time of a step for token rules. When it is used up, the sequences that are left get no token in this step
and come first in the next one. Usual constraints take 0.01 to 0.2 ms a sequence (docs/constraints.md)."""


class StepError(ModelRunError):
    """A step failed for a reason that is not the caller's: a bug, or a machine out of memory."""


class Stepper:
    """The step, and the state it changes. For the engine's thread alone.

    Attributes:
        name: Of the engine.
        outbox: Results to send; its `post` is set before the first step.
        pace: Times of steps and lengths of texts.
        scheduler: Waiting and running sequences.
        prefix_cache: Which chunks of prompts are cached.
        drafting: The drafts of all slots; None if there is nothing to verify them.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        encoder: Encoder | None = None,
        max_encoder_tokens: int = 4096,
        stream_interval_ms: float = 0.0,
        verifier: DraftVerifier | None = None,
        priority_scope: PriorityScope = "caller",
        name: str = "engine",
        observer: Observer = NO_OBSERVER,
        model: ModelId | None = None,
        suppressed_ids: Elements[int] = (),
    ) -> None:
        """Starts with every slot free.

        Args:
            decoder: The runner.
            encoder: Reads the sources of sequences; log-probabilities are computed then. None: sequences have none.
            max_encoder_tokens: Tokens of an encoder batch, padding included.
            stream_interval_ms: Least time between two deltas of a stream.
            verifier: Runs drafts in the decoder's slots; None drafts nothing.
            priority_scope: Whose sequences one of higher priority passes.
            name: Of the engine.
            observer: Notified of every run and of sequences that leave the queue.
            model: Names the model in these events.
            suppressed_ids: Tokens that are never generated.
        """
        self._decoder = decoder
        self._encoder = encoder
        self._max_encoder_tokens = max_encoder_tokens
        self.name = name
        self.outbox = Outbox(stream_interval_ms=stream_interval_ms)
        self._observer = None if observer is NO_OBSERVER else observer
        self._model = model or ModelId(name=name, version="")
        self.scheduler = Scheduler(
            num_slots=decoder.num_slots, prefill_chunk=decoder.prefill_chunk, priority_scope=priority_scope
        )
        self.pace = EnginePace()
        self._prefill_step = PrefillStep(decoder)
        self.prefix_cache = self._prefill_step.prefix_cache
        self._slots = Slots(decoder.num_slots)
        self._masks = TokenMasks(self._slots, vocab_size=decoder.vocab_size, suppressed_ids=suppressed_ids)
        self._sampler = TokenSampler(self._masks, with_log_probabilities=encoder is not None)
        self._search_step = SearchStep(decoder, self._masks)
        self.drafting = None if verifier is None else Drafting(verifier, decoder, self._slots)
        self._token_ids = self._slots.array(np.int64)  # the token that the next step reads
        self._positions = self._slots.array(np.int64)  # and its position
        self._num_steps = 0

    def __repr__(self) -> str:
        return f"Stepper({self.name}, {self.scheduler!r}, {self.prefix_cache!r}, {self.drafting!r})"

    @property
    def max_length(self) -> int:
        """Positions of a slot."""
        return self._decoder.max_length

    @property
    def reads_sources(self) -> bool:
        """True if an encoder reads the sources of sequences."""
        return self._encoder is not None

    def step(self) -> None:
        """Drops overdue sequences, admits, prefills one chunk's worth at most, decodes every running sequence once.

        A failure ends its own sequences, or all sequences with a slot; the engine continues.
        """
        self._num_steps += 1
        try:
            now = time.monotonic()
            self._drop_overdue(now)
            self._drop_hopeless(now)
            if self._encoder is None:
                self._read_prompts(now)
            else:
                self._admit_sources(self._encoder, now)
            if self.scheduler.groups:
                self._decode()
                self.pace.note_step(time.monotonic() - now)  # the engine may be idle next
        except BaseException as error:  # the content of the slots is unknown after a failed step
            if not is_failure(error):
                raise
            self.prefix_cache.clear()
            self._report_failure(self.scheduler.reset(), error)
        self.outbox.flush()

    def _drop_overdue(self, now: float) -> None:
        if overdue := self.scheduler.overdue(now):
            for sequence in overdue:
                self._drop(sequence, sequence.overdue_error(), now)
            self._retire(overdue)

    def _drop_hopeless(self, now: float) -> None:
        """Refuses sequences that could not finish in time any more, so that others get the slots they would take.

        Only where there are such others: a text may end sooner than texts do in the mean.
        """
        scheduler = self.scheduler
        if len(scheduler.waiting) <= scheduler.num_free:
            return
        hopeless = [
            sequence
            for sequence in scheduler.waiting
            if sequence.deadline < now + self.pace.service_s(sequence.parameters.max_new_tokens)
        ]
        if not hopeless or len(hopeless) == len(scheduler.waiting):
            return
        for sequence in hopeless:
            takes_s = self.pace.service_s(sequence.parameters.max_new_tokens)
            self._drop(sequence, sequence.hopeless_error(takes_s, sequence.deadline - now), now)
        self._retire(hopeless)

    def _drop(self, sequence: Sequence, error: RequestError, now: float) -> None:
        """Sends and reports the error of an unfinished sequence; the caller retires it."""
        reason: Literal["cancelled", "expired"] = "cancelled" if sequence.cancelled else "expired"
        self.outbox.add_end(sequence.reply, error)
        if sequence.stage is Stage.WAITING:
            self._report_left(sequence, now, reason)
        self._report_end(sequence, reason)

    def _read_prompts(self, now: float) -> None:
        """Prefills as much as a whole chunk takes: one chunk, a longer block, or several short prompts."""
        whole = self.scheduler.prefill_chunk
        budget = whole
        while budget > 0:
            self._admit(now)
            chunk = self.scheduler.next_chunk()
            if chunk is None:
                return
            cost = max(chunk.stop - chunk.start, whole // _SHORT_PREFILLS)
            if cost > budget and budget < whole:
                return
            self._prefill(chunk)
            budget -= cost

    def _admit(self, now: float) -> None:
        """Assigns a slot to the next prompt. Samples of a prompt that is in another slot join at once, one by one."""
        while (sequence := self.scheduler.admit(now)) is not None:
            self._report_left(sequence, now, "started")
            shared = sequence.shared_prompt
            reader = None if shared is None else shared.reader()
            if reader is None or not self._prefill_step.share(reader, sequence):
                self._prefill_step.reuse_chunks(sequence)
                return
            assert shared is not None, "there is a reader"
            assert shared.logits is not None, "a reader has read"
            self._begin(sequence, shared.logits)

    def _prefill(self, chunk: Chunk) -> None:
        """Reads one chunk of a prompt; after the last one, the sequence gets its first token and joins the batch."""
        sequence = chunk.sequence
        began = time.monotonic()
        try:
            logits = self._prefill_step.read(chunk)
        except Exception as error:  # the running sequences are not affected
            self._fail([sequence], error)
            return
        self._report_run("prefill", 1, chunk.stop - chunk.start, began)
        sequence.num_prefilled = chunk.stop
        self._prefill_step.keep_chunk(chunk)
        if chunk.is_last:
            if (shared := sequence.shared_prompt) is not None and shared.logits is None:
                shared.logits = logits.copy()
                self._prefill_step.keep_prompt(sequence)
            self._begin(sequence, logits)
            self.outbox.flush()  # the first token does not wait for the decode step that follows

    def _begin(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Makes a sequence whose prompt has been read join the batch, with its first token from the logits (V,)."""
        self._join(sequence)
        self._restrict(sequence, logits)
        slots = np.array([sequence.slot])
        self._hand_out(self._sampler.sample(logits[np.newaxis], slots), [sequence], slots)
        if sequence.shared_prompt is not None:
            sequence.shared_prompt.forget()

    def _admit_sources(self, encoder: Encoder, now: float) -> None:
        """Encodes waiting sources in one batch; their sequences join with the next decode step."""
        admitted = self.scheduler.admit_sources(now, self._max_encoder_tokens)
        if not admitted:
            return
        for sequence in admitted:
            self._report_left(sequence, now, "started")
        try:
            self._encode(encoder, [sequence for sequence in admitted if sequence.cross is None])
            for sequence in admitted:
                self._join(sequence)
                for offset in range(sequence.num_beams):
                    self._decoder.begin(sequence.slot + offset, sequence.cross)
                began = time.monotonic()
                if num_read := self._prefill_step.read_start(sequence):
                    self._report_run("prefill", 1, num_read, began)
        except Exception as error:  # some may have joined; none of them is in the queue any more
            self._fail(admitted, error)

    def _encode(self, encoder: Encoder, sequences: Elements[Sequence]) -> None:
        """Encodes the sources of sequences in one batch."""
        began = time.monotonic()
        inputs = [sequence.source for sequence in sequences if sequence.source is not None]
        if not inputs:
            return
        for sequence, cross in zip(sequences, encoder.encode(inputs), strict=True):
            sequence.cross = cross
        costs = [each.cost for each in inputs]
        num_padded = max(costs) * len(costs) - sum(costs)
        self._report_run("encode", len(inputs), sum(costs), began, num_padded)

    def _join(self, sequence: Sequence) -> None:
        """Adds a sequence to the running ones; its newest token is the last one of its prompt."""
        for move in self.scheduler.join(sequence):
            self._make(move)
        if sequence.search is not None:
            self._search_step.begin(sequence)
            return
        slot = sequence.slot
        prompt_ids = sequence.prompt_ids if sequence.source is None else None
        self._sampler.assign(slot, sequence.parameters, prompt_ids=prompt_ids)
        if self.drafting is not None:
            self.drafting.assign(slot, sequence.prompt_ids)
        self._token_ids[slot] = sequence.prompt_ids[-1]
        self._positions[slot] = len(sequence.prompt_ids) - 1

    def _decode(self) -> None:
        """Decodes one token of every running sequence, those of a kind in one call."""
        for group in self.scheduler.groups.copy():  # retiring sequences move only others of their group
            if self._encoder is not None and group.has_changed:
                self._decoder.set_sources([sequence.cross for sequence in group.sequences], group.start)
            group.has_changed = False
            if group.kind.has_search:
                self._search(group)
            else:
                self._sample(group)

    def _search(self, group: Group) -> None:
        """Takes the searches of a group one token further."""
        began = time.monotonic()
        num_rows = group.stop - group.start
        ended, invalid = self._search_step.run(group.sequences, group.start)
        self._report_run("decode", num_rows, num_rows, began)
        if self._observer is not None:
            now = time.monotonic()
            for sequence in group.sequences:
                sequence.first_token_at = sequence.first_token_at or now
        finished: list[Sequence] = []
        broken: list[tuple[Sequence, Exception]] = []
        for sequence in ended:
            try:
                result = self._search_step.result(sequence)
                self.outbox.add_end(sequence.reply, result)
                self._report_end(sequence, result.finish_reason.value, result.num_new_tokens)
                finished.append(sequence)
            except Exception as error:  # its output or alignment cannot be made; the others go on
                broken.append((sequence, error))
        broken += [(sequence, FloatingPointError(_NOT_FINITE)) for sequence in invalid]
        self._leave(finished, broken)

    def _sample(self, group: Group) -> None:
        """Chooses the next token of each sequence of a group without a search."""
        self.outbox.pace(len(group.sequences))
        if self._follow_drafts(group.sequences.copy()):
            return
        began = time.monotonic()
        slots = np.arange(group.start, group.stop)
        logits = self._decoder.decode(self._token_ids[slots], self._positions[slots], group.start)  # (R, V)
        ranking = self._decoder.ranking
        self._report_run("decode", len(slots), len(slots), began)
        sequences = group.sequences.copy()
        if late := self._restrict_all(sequences, logits):
            ready = [row for row in range(len(sequences)) if row not in late]
            sequences, slots, logits, ranking = [sequences[row] for row in ready], slots[ready], logits[ready], None
        self._hand_out(self._sampler.sample(logits, slots, ranking), sequences, slots)

    def _restrict_all(self, sequences: Elements[Sequence], logits: NDArray[np.float32]) -> set[int]:
        """Restricts the next tokens of sequences with rules, within the step's time budget.

        The logits are (R, V).

        Returns:
            The rows whose rules were not asked. They read the same token again in the next step, at the same position,
            which gives the same logits. Where that would change its state, its rule is asked; so are those on
            translations, which cost next to nothing.
        """
        ruled = [row for row, sequence in enumerate(sequences) if sequence.rule is not None]
        ruled.sort(key=lambda row: sequences[row].masked_at)
        may_wait = self._encoder is None and self._decoder.keeps_positions
        began = time.thread_time()
        late: set[int] = set()
        for number, row in enumerate(ruled):
            if number and may_wait and time.thread_time() - began > _MASK_BUDGET_S:
                num_written = sequences[row].num_written
                if self._decoder.can_return(num_written, num_written + 1):
                    late.add(row)
                    continue
            self._restrict(sequences[row], logits[row])
        return late

    def _restrict(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Restricts a sequence's next token, with logits (V,), by its rule."""
        if sequence.rule is not None:
            sequence.rule.allow(self._masks.begin(sequence.slot), logits)
            sequence.masked_at = self._num_steps

    def _follow_drafts(self, running: Elements[Sequence]) -> bool:
        """Takes all running sequences on by several tokens, as far as drafts are right; False if nothing was run."""
        if self.drafting is None:
            return False
        slots = slice(len(running))
        num_left = [sequence.parameters.max_new_tokens - sequence.num_new_tokens for sequence in running]
        began = time.monotonic()
        drafts = self.drafting.verify(self._token_ids[slots], self._positions[slots], num_left)
        if drafts:
            self._report_run("verify", len(drafts), sum(len(draft.logits) for draft in drafts), began)
        for draft in drafts:
            self.drafting.settle(draft, self._follow(draft, running[draft.slot]))
        return bool(drafts)

    def _follow(self, draft: VerifiedDraft, sequence: Sequence) -> int:
        """Samples tokens one by one as if each came from a step; returns the number of accepted draft tokens."""
        num_accepted = 0
        slots = np.array([draft.slot])
        for logits, expected in draft:
            self._restrict(sequence, logits)
            sampled = self._sampler.sample(logits[np.newaxis], slots)
            self._hand_out(sampled, [sequence], slots)
            if sampled.token_ids[0] != expected:
                break
            num_accepted += 1
            if sequence.stage is not Stage.RUNNING:
                break
        return num_accepted

    def _hand_out(self, sampled: SampledTokens, sequences: Elements[Sequence], slots: NDArray[np.intp]) -> None:
        """Adds their tokens to sequences in `slots`; finished ones retire."""
        self._token_ids[slots] = sampled.token_ids
        self._positions[slots] += 1
        if self.drafting is not None:
            self.drafting.append(slots, sampled.token_ids)
        self._report_tokens(sequences)
        finished: list[Sequence] = []
        broken: list[tuple[Sequence, Exception]] = []
        rows = zip(
            sequences,
            sampled.token_ids.tolist(),
            sampled.log_probabilities.tolist(),
            sampled.is_valid.tolist(),
            strict=True,
        )
        for row, (sequence, token_id, log_probability, is_valid) in enumerate(rows):
            if not is_valid:
                broken.append((sequence, FloatingPointError(_NOT_FINITE)))
                continue
            try:
                finish_reason = self.outbox.add_token(
                    sequence, token_id, log_probability, sampled.top_tokens.get(row, ()), align=self._align
                )
                if finish_reason is not None:
                    self._report_end(sequence, finish_reason.value)
                    finished.append(sequence)
            except Exception as error:  # its output cannot be made; the others go on
                broken.append((sequence, error))
        self._leave(finished, broken)

    def _align(self, sequence: Sequence) -> NDArray[np.float32]:
        """Returns the attention (T, S) of a sequence that has finished and still has its slot."""
        return align(self._decoder, sequence, sequence.token_ids)

    def _leave(self, finished: list[Sequence], broken: list[tuple[Sequence, Exception]]) -> None:
        """Retires sequences whose results are sent, and fails those that cannot continue."""
        if finished:
            for sequence in finished:
                self.pace.note_end(sequence.num_new_tokens, sequence.parameters.max_new_tokens)
            self._retire(finished)
        for sequence, reason in broken:
            self._fail_row(sequence, reason)

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        """Frees the slots of sequences whose end was handed out."""
        for move in self.scheduler.retire(sequences):
            self._make(move)

    def _make(self, move: Move) -> None:
        for source, target in move.slots():
            self._decoder.move(source, target, move.sequence.num_written)
            self._slots.move(source, target)

    def _fail_row(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence for a reason of its own; if its rule led nowhere, that is the caller's error."""
        if sequence.rule is not None and (failure := sequence.rule.failure) is not None:
            self.outbox.add_end(sequence.reply, InvalidInputError("parameters.constraint", failure))
            self._report_end(sequence, "failed")
            self._retire([sequence])
        else:
            self._fail([sequence], error)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends sequences that the model could not be run for."""
        self._report_failure(sequences, error)
        self._retire(sequences)

    def _report_failure(self, sequences: list[Sequence], error: BaseException) -> None:
        """Sends a failure before logging it, so that a blocked log delays no call."""
        for sequence in sequences:
            self.outbox.add_end(sequence.reply, run_error(StepError, error))
            self._report_end(sequence, "failed")
        self.outbox.flush()
        with suppress(Exception):
            _log.error("a step failed", engine=self.name, num_sequences=len(sequences), exc_info=error)

    def _report_run(
        self,
        kind: Literal["prefill", "decode", "verify", "encode"],
        num_rows: int,
        num_tokens: int,
        began: float,
        num_padded: int = 0,
    ) -> None:
        if self._observer is not None:
            self._observer.step_finished(
                StepEvent(
                    model=self._model,
                    kind=kind,
                    num_rows=num_rows,
                    num_tokens=num_tokens,
                    num_padded=num_padded,
                    num_waiting=len(self.scheduler.waiting),
                    run_s=time.monotonic() - began,
                )
            )

    def _report_left(self, sequence: Sequence, now: float, reason: Literal["started", "expired", "cancelled"]) -> None:
        if self._observer is not None:
            self._observer.left_queue(
                QueueEvent(
                    model=self._model,
                    queue_s=now - sequence.arrived_at,
                    reason=reason,
                    num_waiting=len(self.scheduler.waiting),
                )
            )

    def _report_tokens(self, sequences: Elements[Sequence]) -> None:
        """Reports that each of these sequences is about to get a token."""
        if self._observer is None:
            return
        now = time.monotonic()
        first: list[float] = []
        gaps: list[float] = []
        for sequence in sequences:
            if sequence.first_token_at:
                gaps.append(now - sequence.token_at)
            else:
                sequence.first_token_at = now
                first.append(now - (sequence.arrived_at if sequence.call is None else sequence.call.started_at))
            sequence.token_at = now
        self._observer.tokens_produced(TokensEvent(model=self._model, first_token_s=first, gaps_s=gaps))

    def _report_end(self, sequence: Sequence, outcome: str, num_new_tokens: int | None = None) -> None:
        """Reports that a sequence leaves, before its caller gets the result."""
        if self._observer is not None:
            source = sequence.source
            self._observer.sequence_finished(
                SequenceEvent(
                    model=self._model,
                    call=sequence.call,
                    arrived_at=sequence.arrived_at,
                    started_at=sequence.started_at,
                    first_token_at=sequence.first_token_at,
                    finished_at=time.monotonic(),
                    outcome=outcome,
                    num_input_tokens=len(sequence.prompt_ids) if source is None else source.cost,
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_output_tokens=sequence.num_new_tokens if num_new_tokens is None else num_new_tokens,
                )
            )
