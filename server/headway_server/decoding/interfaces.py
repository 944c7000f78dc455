"""What the engine needs of a runner; `runner.py` is the one that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headway_server.decoding.beam_search.block import SlotCopy


class Decoder(Protocol):
    """A decoder whose state lives in slots. One thread calls it."""

    num_slots: int
    num_prefix_slots: int
    """Slots past `num_slots` that never run: they keep chunks of prompts."""
    max_length: int
    vocab_size: int
    prefill_chunk: int

    def prefill(self, slot: int, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Reads tokens (T,) into a slot from position `start`; returns the logits (V,) after the last of them.

        They hold until the next call, like those of `decode`.
        """

    def score(self, slot: int, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Reads tokens as `prefill` does; returns the logits (T, V) after every one, an array of their own."""

    def decode(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], first_slot: int = 0
    ) -> NDArray[np.float32]:
        """Runs one token (R,) in each of R slots from `first_slot` on, at `positions` (R,).

        Returns the logits (R, V) after each, which the caller may change.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot, which nobody reads any more, to another."""

    def copy(self, *, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copies `length` positions from a (slot, position) to another, in a slot of its own."""

    def reorder(self, copies: Sequence[SlotCopy]) -> None:
        """Copies positions of slots over those of others. No slot is both read and written."""

    def align(self, slot: int, source: Any, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the attention (T, S) over the S tokens of an encoded sentence of the tokens that follow each of (T,).

        `token_ids` are read anew from position 0 of a slot, whose state is lost; `source` is what `set_sources` takes.
        Rows sum to one.
        """

    def begin(self, slot: int, source: Any) -> None:
        """Fills what an encoded sentence starts from into the slot it was given, before its first step."""

    def set_sources(self, sources: Sequence[Any], first_slot: int = 0) -> None:
        """Says which encoded sentences the slots read that `decode` runs from `first_slot` on.

        In their order; each sentence is read by as many neighbouring slots as the others.
        """


class Encoder(Protocol):
    """The encoder of a translation model."""

    def encode(self, sources: Sequence[NDArray[np.int64]]) -> Sequence[Any]:
        """Encodes sentences (S,) in one batch; returns for each what `set_sources` takes."""


class Constraint(Protocol):
    """What one sequence's text must look like, and how far it is. One thread calls it."""

    failure: str | None
    """Why nothing may follow although the text is not complete, for the caller; None as long as something may."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Marks the tokens that may follow: bit i % 32 of word i // 32 of `mask`, (ceil(V / 32),) int32, for token i.

        The end-of-sequence token is among them where the text may end here.
        """

    def accept(self, token_id: int) -> None:
        """Takes the next token, one of those that may follow."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
