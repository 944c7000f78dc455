"""One step of the engine: who leaves, who enters, a chunk of a prompt, a token for everyone (docs/engine.md).

Shapes: R running sequences (slots 0 to R-1), T tokens and S source tokens of a translation, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Elements
from contextlib import suppress

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.decoding.beam_search.step import SearchStep, align
from headway_server.decoding.core.block_layout import Group, Move
from headway_server.decoding.core.outbox import Outbox
from headway_server.decoding.core.prefill import PrefillStep
from headway_server.decoding.core.scheduler import Chunk, Scheduler
from headway_server.decoding.interfaces import Decoder, Encoder
from headway_server.decoding.sampling.sampler import SampledTokens, Sampler
from headway_server.decoding.sequence import Sequence, Stage
from headway_server.decoding.speculation.drafts import Drafting, VerifiedDraft
from headway_server.decoding.speculation.prompt_lookup import DraftVerifier
from headway_server.errors import InternalError, InvalidInputError

_log = structlog.get_logger(__name__)

_STEP_FAILED = "a step failed"
_NOT_FINITE = "the model's logits are not finite, or no token is allowed"
_SHORT_PREFILLS = 4
"""Short prompts that are read between two decode steps at most. However short, one costs a pass over all weights, about
a quarter of what a whole chunk costs."""


class StepError(InternalError):
    """A step failed for a reason that is not the caller's: a bug, or a machine out of memory."""


class Stepper:
    """The state that a step changes, and the step. For the engine's thread alone.

    Attributes:
        scheduler: Who waits and who runs.
        prefix_cache: Chunks of prompts that are kept.
        drafting: What is drafted, where drafts can be verified.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        encoder: Encoder | None,
        max_encoder_tokens: int,
        name: str,
        outbox: Outbox,
        verifier: DraftVerifier | None = None,
    ) -> None:
        """Starts with every slot free.

        Args:
            decoder: The runner.
            encoder: For translation: sequences are sentences that it reads, and log-probabilities are computed.
            max_encoder_tokens: Tokens of an encoder batch, padding counted.
            name: Of the engine, for the log.
            outbox: Takes what is handed out.
            verifier: Runs drafts in the decoder's slots; None drafts nothing.
        """
        self._decoder = decoder
        self._encoder = encoder
        self._max_encoder_tokens = max_encoder_tokens
        self._name = name
        self._outbox = outbox
        self.scheduler = Scheduler(num_slots=decoder.num_slots, prefill_chunk=decoder.prefill_chunk)
        self._prefill_step = PrefillStep(decoder)
        self.prefix_cache = self._prefill_step.prefix_cache
        self._sampler = Sampler(
            num_slots=decoder.num_slots, vocab_size=decoder.vocab_size, with_log_probabilities=encoder is not None
        )
        self.drafting: Drafting | None = None
        if verifier is not None:
            self.drafting = Drafting(verifier, num_slots=decoder.num_slots, max_length=decoder.max_length)
        self._token_ids = np.zeros(decoder.num_slots, np.int64)  # of each slot: the token that the next step reads
        self._positions = np.zeros(decoder.num_slots, np.int64)  # and its position
        self._search_step = SearchStep(decoder, outbox)

    def __repr__(self) -> str:
        return f"Stepper({self._name}, {self.scheduler!r}, {self.prefix_cache!r}, {self.drafting!r})"

    def step(self) -> None:
        """Drops who has gone, admits, prefills one chunk's worth at most, decodes every running sequence once.

        Whatever fails ends its own sequences, or all that have a slot; the engine goes on.
        """
        try:
            now = time.monotonic()
            self._drop_overdue(now)
            if self._encoder is None:
                self._read_prompts(now)
            else:
                self._admit_sources(self._encoder, now)
            self._decode()
        except Exception as error:  # what the slots hold is not known after a step broke off
            self.prefix_cache.clear()
            self.report(_STEP_FAILED, self.scheduler.reset(), error)
        self._outbox.flush()

    def _drop_overdue(self, now: float) -> None:
        if overdue := self.scheduler.overdue(now):
            for sequence in overdue:
                self._outbox.add_end(sequence.reply, sequence.overdue_error())
            self._retire(overdue)

    def _read_prompts(self, now: float) -> None:
        """Prefills as much as a whole chunk takes: one chunk, or several prompts that are short."""
        whole = self.scheduler.prefill_chunk
        budget = whole
        while budget > 0:
            self._admit(now)
            chunk = self.scheduler.next_chunk()
            if chunk is None:
                return
            cost = max(chunk.stop - chunk.start, whole // _SHORT_PREFILLS)
            if cost > budget:
                return
            self._prefill(chunk)
            budget -= cost

    def _admit(self, now: float) -> None:
        """Gives the next prompt its slot; samples of a prompt that has been read join at once, and so may the next."""
        while (sequence := self.scheduler.admit(now)) is not None:
            shared = sequence.shared_prompt
            reader = None if shared is None else shared.reader()
            if reader is None:
                self._prefill_step.reuse_chunks(sequence)
                return
            assert shared is not None, "there is a reader"
            assert shared.logits is not None, "a reader has read"
            self._prefill_step.share(reader, sequence)
            self._begin(sequence, shared.logits)

    def _prefill(self, chunk: Chunk) -> None:
        """Reads one chunk of a prompt; after the last one, the sequence gets its first token and joins the batch."""
        sequence = chunk.sequence
        try:
            logits = self._prefill_step.read(chunk)
        except Exception as error:  # the running sequences are not touched by it
            self._fail([sequence], error)
            return
        sequence.num_prefilled = chunk.stop
        self._prefill_step.keep_chunk(chunk)
        if chunk.is_last:
            if (shared := sequence.shared_prompt) is not None and shared.logits is None:
                shared.logits = logits.copy()
            self._begin(sequence, logits)
            self._outbox.flush()  # the first token does not wait for the decode step that follows

    def _begin(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Lets a sequence whose prompt has been read join, with its first token from the logits (V,)."""
        self._join(sequence, position=len(sequence.input_ids) - 1)
        self._allow(sequence)
        self._hand_out(self._sampler.sample(logits[np.newaxis], sequence.slot), [sequence], sequence.slot)
        if sequence.shared_prompt is not None:
            sequence.shared_prompt.forget()

    def _admit_sources(self, encoder: Encoder, now: float) -> None:
        """Encodes waiting sentences in one batch; they join with the next decode step."""
        admitted = self.scheduler.admit_sources(now, self._max_encoder_tokens)
        if not admitted:
            return
        try:
            encoded = encoder.encode([sequence.input_ids for sequence in admitted])
            for sequence, cross in zip(admitted, encoded, strict=True):
                assert sequence.first_id is not None, "a translation begins with a token of its own"
                sequence.cross = cross
                self._join(sequence, position=0)
                for offset in range(sequence.num_beams):
                    self._decoder.begin(sequence.slot + offset, cross)
                self._token_ids[sequence.slot] = sequence.first_id
        except Exception as error:  # some may have joined; the queue knows none of them any more
            self._fail(admitted, error)

    def _join(self, sequence: Sequence, position: int) -> None:
        for move in self.scheduler.join(sequence):
            self._make(move)
        if sequence.search is not None:
            self._search_step.begin(sequence)
            return
        self._sampler.assign(
            sequence.slot,
            sequence.parameters,
            prompt_ids=sequence.input_ids if sequence.first_id is None else None,
            end_ids=sorted(sequence.end_ids),
        )
        if self.drafting is not None:
            self.drafting.assign(sequence.slot, sequence.input_ids)
        self._positions[sequence.slot] = position

    def _decode(self) -> None:
        """Runs every running sequence by one token, those of a kind in one call."""
        for group in self.scheduler.groups.copy():  # sequences that retire move others of their own group alone
            if self._encoder is not None and group.has_changed:
                self._decoder.set_sources([sequence.cross for sequence in group.sequences], group.start)
            group.has_changed = False
            if group.kind.has_search:
                self._search(group)
            else:
                self._sample(group)

    def _search(self, group: Group) -> None:
        """Takes the searches of a group one token further."""
        ended, invalid = self._search_step.run(group.sequences, group.start)
        finished: list[Sequence] = []
        broken: list[tuple[Sequence, Exception]] = []
        for sequence in ended:
            try:
                self._search_step.hand_out(sequence)
                finished.append(sequence)
            except Exception as error:  # its text or alignment cannot be made: not the other sentences' business
                broken.append((sequence, error))
        broken += [(sequence, FloatingPointError(_NOT_FINITE)) for sequence in invalid]
        self._leave(finished, broken)

    def _sample(self, group: Group) -> None:
        """Chooses the next token of each sequence of a group, which have a slot each."""
        self._outbox.pace(len(group.sequences))
        if self._follow_drafts(group.sequences.copy()):
            return
        slots = slice(group.start, group.stop)
        logits = self._decoder.decode(self._token_ids[slots], self._positions[slots], group.start)  # (R, V)
        for sequence in group.sequences:
            self._allow(sequence)
        self._hand_out(self._sampler.sample(logits, group.start), group.sequences, group.start)

    def _follow_drafts(self, running: Elements[Sequence]) -> bool:
        """Takes all running sequences on by several tokens, as far as drafts are right; False: nothing was run."""
        if self.drafting is None:
            return False
        slots = slice(len(running))
        num_left = [sequence.parameters.max_new_tokens - sequence.num_new_tokens for sequence in running]
        drafts = self.drafting.verify(self._token_ids[slots], self._positions[slots], num_left)
        for draft in drafts:
            self.drafting.settle(draft, self._follow(draft, running[draft.slot]))
        return bool(drafts)

    def _follow(self, draft: VerifiedDraft, sequence: Sequence) -> int:
        """Samples token after token as if each came from a step; returns how many are those of the draft."""
        num_accepted = 0
        for logits, expected in draft:
            self._allow(sequence)
            sampled = self._sampler.sample(logits[np.newaxis], draft.slot)
            self._hand_out(sampled, [sequence], draft.slot)
            if sampled.token_ids[0] != expected:
                break
            num_accepted += 1
            if sequence.stage is not Stage.RUNNING:
                break
        return num_accepted

    def _allow(self, sequence: Sequence) -> None:
        """Restricts a sequence's next token to what its constraint allows."""
        if sequence.constraint is not None:
            mask = self._sampler.mask_row(sequence.slot)
            sequence.constraint.fill(mask)
            self._sampler.allow(sequence.slot, mask)

    def _hand_out(self, sampled: SampledTokens, sequences: Elements[Sequence], first_slot: int) -> None:
        """Gives sequences, in the slots from `first_slot` on, their tokens; who finishes with one retires."""
        slots = slice(first_slot, first_slot + len(sequences))
        self._token_ids[slots] = sampled.token_ids
        self._positions[slots] += 1
        if self.drafting is not None:
            self.drafting.append(first_slot, sampled.token_ids)
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
                if self._outbox.add_token(
                    sequence, token_id, log_probability, sampled.top_tokens.get(row, ()), align=self._align
                ):
                    finished.append(sequence)
            except Exception as error:  # its text cannot be made: not the other rows' business
                broken.append((sequence, error))
        self._leave(finished, broken)

    def _align(self, sequence: Sequence) -> NDArray[np.float32]:
        """Returns the attention (T, S) of a translation that has finished and still has its slot."""
        return align(self._decoder, sequence, sequence.token_ids)

    def _leave(self, finished: list[Sequence], broken: list[tuple[Sequence, Exception]]) -> None:
        """Retires sequences that were handed their results, and those that cannot go on, which are told why."""
        if finished:
            self._retire(finished)
        for sequence, reason in broken:
            self._fail_row(sequence, reason)

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        """Frees the slots of sequences whose end was handed out."""
        for move in self.scheduler.retire(sequences):
            self._make(move)

    def _make(self, move: Move) -> None:
        for source, target in move.slots():
            self._decoder.move(source, target, move.sequence.num_cached)
        if move.sequence.stage is Stage.RUNNING and move.sequence.search is None:
            self._sampler.move(move.source, move.target)
            if self.drafting is not None:
                self.drafting.move(move.source, move.target)
            self._token_ids[move.target] = self._token_ids[move.source]
            self._positions[move.target] = self._positions[move.source]

    def _fail_row(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence for a reason of its own, which may be that its constraint led nowhere."""
        if sequence.constraint is not None and (failure := sequence.constraint.failure) is not None:
            self._outbox.add_end(sequence.reply, InvalidInputError("parameters.constraint", failure))
            self._retire([sequence])
        else:
            self._fail([sequence], error)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """Ends sequences that the model could not be run for."""
        self.report(_STEP_FAILED, sequences, error)
        self._retire(sequences)

    def report(self, event: str, sequences: list[Sequence], error: BaseException) -> None:
        """Hands out a failure, and only then logs it: a log that cannot be written keeps nobody waiting."""
        for sequence in sequences:
            failure = StepError("the model could not be run; the server's log says why")
            failure.__cause__ = error
            self._outbox.add_end(sequence.reply, failure)
        self._outbox.flush()
        with suppress(Exception):
            _log.error(event, engine=self._name, num_sequences=len(sequences), exc_info=error)
