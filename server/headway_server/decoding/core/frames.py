"""Steps that read and write numbers instead of one token: frames of a spectrogram, or codes of all codebooks.

Slots, sources, turns, deadlines and results are those of `step.py`. What a step reads and what becomes of its output
is the sequence's own affair (`FrameWriter`). A sequence may have several rows, as guidance needs: neighbouring slots
that read the same source.

R rows of a sequence, V numbers that a step gives of a row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Elements
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.core.block_layout import Group
from headway_server.decoding.core.step import Stepper
from headway_server.decoding.interfaces import OutputAssembler
from headway_server.decoding.sequence import FinishReason, Sequence

START: Final[NDArray[np.int64]] = np.zeros(1, np.int64)
"""Prompt of a sequence of frames: one position, whose content its writer says."""


class FrameWriter(OutputAssembler, Protocol):
    """Writes the output of a sequence, step by step. The engine's thread calls it."""

    num_rows: int
    """R: neighbouring slots of a sequence; the same of all sequences of a model."""

    def read(self) -> tuple[NDArray[np.int64], Mapping[str, NDArray[Any]]]:
        """Returns what the next step reads: tokens (R,), and the graph's other inputs, (R, ...) each."""

    def write(self, output: NDArray[np.float32]) -> FinishReason | None:
        """Takes what the step gives, (R, V), valid until the call returns; returns why the sequence ends with it."""

    def push(self, token_id: int) -> bool:
        """See `OutputAssembler`; there are no tokens."""
        raise AssertionError(f"numbers are written, and not token {token_id}")

    def whole(self, token_ids: Elements[int]) -> Any:
        """See `OutputAssembler`; there is no search."""
        raise AssertionError(f"numbers are written, and not tokens {token_ids}")


class FrameSequence(Sequence):
    """A sequence whose output is a `FrameWriter`."""

    __slots__ = ()

    @property
    def writer(self) -> FrameWriter:
        """What writes its output."""
        return cast("FrameWriter", self.output)

    @property
    def num_beams(self) -> int:
        """See `Sequence`."""
        return self.writer.num_rows


class FrameStepper(Stepper):
    """The step of `FrameSequence`s."""

    def _join(self, sequence: Sequence) -> None:
        """See `Stepper`; nothing is kept of a slot beside its state."""
        for move in self.scheduler.join(sequence):
            self._make(move)

    def _sample(self, group: Group) -> None:
        """Takes each sequence of a group one step further."""
        self.outbox.pace(len(group.sequences))
        began, width = time.monotonic(), group.kind.width
        sequences = [cast("FrameSequence", sequence) for sequence in group.sequences]
        tokens, further = zip(*(sequence.writer.read() for sequence in sequences), strict=True)
        outputs = self._decoder.decode(
            np.concatenate(tokens),
            np.repeat([sequence.num_new_tokens for sequence in sequences], width),
            group.start,
            further={name: np.concatenate([one[name] for one in further]) for name in further[0]},
        )  # (sequences * R, V)
        self._report_run("decode", len(outputs), len(outputs), began)
        self._report_tokens(sequences)
        finished: list[Sequence] = []
        broken: list[tuple[Sequence, Exception]] = []
        for number, sequence in enumerate(sequences):
            output = outputs[number * width : (number + 1) * width]
            try:
                if not np.isfinite(output).all():
                    raise FloatingPointError("the model's numbers are not finite")
                finish_reason = sequence.writer.write(output)
                sequence.num_new_tokens += 1
                if finish_reason is None and sequence.num_new_tokens == sequence.parameters.max_new_tokens:
                    finish_reason = FinishReason.LENGTH
                self.outbox.add_progress(sequence, finish_reason)
                if finish_reason is not None:
                    self._report_end(sequence, finish_reason.value)
                    finished.append(sequence)
            except Exception as error:  # its output cannot be made; the others go on
                broken.append((sequence, error))
        self._leave(finished, broken)
