"""Interfaces of the engine's parts: runners and output assemblers.

Shapes: T tokens, S positions of an encoded source, R slots of a decode step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Encoder input of one sequence: a sentence, an image, a spectrogram."""

    tensors: Mapping[str, NDArray[Any]]
    """By the name that the encoder's graph gives each, without the batch axis."""
    cost: int
    """Size in tokens, or in whatever positions the encoder computes. A batch of inputs is padded to the largest, so it
    costs their number times the largest of their costs (`EngineSettings.max_encoder_tokens`)."""

    @classmethod
    def of_tokens(cls, input_ids: NDArray[np.int64]) -> EncoderInput:
        """Returns the input of an encoder that reads the tokens (S,) of a sentence."""
        return cls({"input_ids": input_ids}, len(input_ids))

    @classmethod
    def of_pixels(cls, pixel_values: NDArray[np.float32], num_patches: int) -> EncoderInput:
        """Returns the encoder input of an image, (3, height, width), with its number of patches."""
        return cls({"pixel_values": pixel_values}, num_patches)

    @classmethod
    def of_features(cls, input_features: NDArray[np.float32], num_positions: int) -> EncoderInput:
        """Returns the encoder input of a window of audio, (mel bins, frames), with its number of positions."""
        return cls({"input_features": input_features}, num_positions)


class Block(NamedTuple):
    """Neighbouring tokens that attend to each other, to later ones too."""

    start: int
    stop: int
    """The place behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """Embeddings in a prompt, in place of those of its tokens: its images."""

    positions: NDArray[np.int64]
    """(M,) places in the prompt, rising."""
    embeddings: tuple[NDArray[np.float32], ...]
    """(M,) of (D,): views of what is held for the images, since joining them copies up to some GiB"""
    keys: tuple[bytes, ...]
    """(M,) what identifies each embedding; images of different content or callers have none in common."""
    offsets: NDArray[np.int64] | None = None
    """(T, 3) what is added to the position of each token of the prompt for its place, row and column; None: nothing."""
    blocks: tuple[Block, ...] = ()
    """Tokens that attend to each other, in their order."""

    def between(self, start: int, stop: int) -> PromptMedia | None:
        """Returns those of tokens `start` to before `stop`, with places from `start` on; None if there are none."""
        first, last = np.searchsorted(self.positions, [start, stop]).tolist()
        blocks = tuple(
            Block(max(block.start, start) - start, min(block.stop, stop) - start)
            for block in self.blocks
            if block.start < stop and start < block.stop
        )
        if first == last and self.offsets is None and not blocks:
            return None
        return PromptMedia(
            self.positions[first:last] - start,
            self.embeddings[first:last],
            self.keys[first:last],
            None if self.offsets is None else self.offsets[start:stop],
            blocks,
        )

    def block_around(self, place: int) -> Block | None:
        """Returns the block that a cut before the token at `place` would divide; None if there is none."""
        return next((block for block in self.blocks if block.start < place < block.stop), None)

    @property
    def is_block(self) -> bool:
        """True if the first block has all tokens, those of a step."""
        return bool(self.blocks) and self.blocks[0].start == 0


def next_stop(start: int, length: int, chunk: int, media: PromptMedia | None = None) -> int:
    """Returns where the step ends that reads a prompt from `start` on.

    Steps end at multiples of `chunk`, and a block of tokens that attend to each other is a step of its own. So a step
    follows from the tokens up to its end, wherever the prompt was begun.

    Args:
        start: Tokens that have been read.
        length: Tokens of the prompt.
        chunk: Most tokens of a step without such a block.
        media: The prompt's images.
    """
    stop = min(start - start % chunk + chunk, length)
    for block in () if media is None else media.blocks:
        if block.start <= start < block.stop:
            return block.stop
        if start < block.start < stop:
            return block.start
    return stop


def steps_of(length: int, chunk: int, media: PromptMedia | None) -> Iterator[tuple[int, int]]:
    """Yields start and stop of the steps that a text is read in, as a server reads a prompt."""
    start = 0
    while start < length:
        stop = next_stop(start, length, chunk, media)
        yield start, stop
        start = stop


class EncodedSource(Protocol):
    """Encoder output of one input. The engine passes it to the decoder unchanged."""

    @property
    def num_positions(self) -> int:
        """S: positions that a decoder attends to."""


class Encoder(Protocol):
    """An encoder. One engine's thread or several call it."""

    def encode(self, inputs: Sequence[EncoderInput]) -> Sequence[EncodedSource]:
        """Encodes inputs in one batch; returns an `EncodedSource` for each, in order."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The likeliest tokens of each row of a step, found where its logits were computed."""

    token_ids: NDArray[np.int64]
    """(R, C) by falling logit; the lower id first among equals."""
    logits: NDArray[np.float32]
    """(R, C)"""
    normalizers: NDArray[np.float64]
    """(R,) log sum exp of all logits; not finite if the logits are not, and then the tokens mean nothing."""


class SlotCopy(NamedTuple):
    """Positions of a slot that are copied over the same positions of another."""

    source: int
    """Slot to read from. No copy of the same step writes there."""
    target: int
    start: int
    """First position."""
    stop: int
    """Position after the last."""


class Decoder(Protocol):
    """A decoder whose state lives in slots. One thread calls it."""

    num_slots: int
    """Slots that run."""
    num_cached_chunks: int
    """Chunks of prompts that the prefix cache has room for."""
    max_length: int
    """Positions of a slot."""
    vocab_size: int
    """V."""
    prefill_chunk: int
    """Tokens of a prefill at most, but for those that attend to each other."""
    has_positions: bool
    """True if some of a slot's state has positions: a key/value cache."""
    keeps_positions: bool
    """True if all of it has. False if each step replaces some as a whole, so that no token can be read again."""
    ranking: Ranking | None
    """Ranking of the last `decode`, until the next one; None if the decoder does not rank logits."""

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        start: int,
        source: Any = None,
        *,
        media: PromptMedia | None = None,
    ) -> NDArray[np.float32]:
        """Reads tokens (T,) into a slot from position `start`; returns the logits (V,) after the last of them.

        The logits are valid until the next call, like those of `decode`. `source` is the `EncodedSource` that the
        tokens attend to, if there is one. `media` are embeddings in place of some tokens', by their places among them;
        if it has a block, that is all of the tokens, and they attend to each other.
        """

    def score(
        self, slot: int, token_ids: NDArray[np.int64], start: int, *, media: PromptMedia | None = None
    ) -> NDArray[np.float32]:
        """Reads tokens as `prefill` does; returns a new array of the logits (T, V) after each of them."""

    def decode(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        first_slot: int = 0,
        *,
        num_likeliest: int = 1,
        further: Mapping[str, NDArray[Any]] = ...,
    ) -> NDArray[np.float32]:
        """Runs one token (R,) in each of R slots from `first_slot` on, at `positions` (R,).

        `further` are other inputs of the graph, (R, ...) each.

        Returns the logits (R, V) after each, which the caller may change. A decoder that ranks them sets `ranking`, of
        `num_likeliest` tokens a row.
        """

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot to another; the first slot is not read again."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot over those of another."""

    def can_return(self, length: int, num_read: int) -> bool:
        """Returns True if a slot that has read `num_read` tokens can go on from the first `length` of them.

        Otherwise a window has dropped positions since. State without positions is not meant.
        """

    def reorder(self, copies: Sequence[SlotCopy]) -> None:
        """Copies positions of slots over those of others. No slot is both read and written."""

    def keep_chunk(self, slot: int, start: int, index: int, num_read: int) -> None:
        """Copies a whole chunk that a slot has just read, from position `start` on, to a place of the prefix cache.

        With it goes the state without positions as it is after the chunk. The slot has read `num_read` tokens.
        """

    def reuse_chunks(self, indices: Sequence[int], slot: int) -> None:
        """Copies the chunks at these places, a prompt's first ones in order, to a slot.

        Without any positions, the place of the last chunk is enough.
        """

    def keep_states(self, slot: int, index: int) -> None:
        """Copies a slot's state without positions to a place of the prefix cache."""

    def reuse_states(self, index: int, slot: int) -> None:
        """Copies the state without positions at a place of the prefix cache over that of a slot."""

    def align(self, slot: int, source: Any, token_ids: NDArray[np.int64], num_prompt: int = 1) -> NDArray[np.float32]:
        """Returns the attention of each token of a finished sequence over the S positions of its source.

        `token_ids` (T,) are the decoder inputs: `num_prompt` start tokens, then all new tokens except the last. They
        are read again from position 0 of a slot, whose state is overwritten. The result has a row for each new
        token, (T - num_prompt + 1, S); rows sum to one.
        """

    def begin(self, slot: int, source: Any) -> None:
        """Fills the state that a slot starts from where the encoder gives one; called before the slot's first step."""

    def set_sources(self, sources: Sequence[Any], first_slot: int = 0) -> None:
        """Sets the encoded sources that the slots from `first_slot` on attend to in `decode`, in their order.

        Each source is read by the same number of neighbouring slots.
        """


class DraftVerifier(Protocol):
    """Runs several tokens a row and gives the very bits of decoding them one by one."""

    width: int
    """T."""

    def verify(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs tokens (R, T) in slots 0 to R-1, from `positions` (R,); returns the logits (R, T, V) after each.

        They are valid until the next call.
        """


class OutputAssembler(Protocol):
    """Assembles a sequence's output from its tokens: text, audio frames, boxes.

    Parts and wholes are of one type of the assembler's own, such as `str`. The engine's thread calls it, `join` aside.
    """

    def push(self, token_id: int) -> bool:
        """Takes the next token; returns True if the output is complete with it, which ends the sequence."""

    def take(self) -> Any:
        """Returns the new part of the output since the last call. For streams."""

    def finish(self) -> Any:
        """Returns the whole output: there are no more tokens."""

    def whole(self, token_ids: Sequence[int]) -> Any:
        """Returns the output of `token_ids`, regardless of pushed tokens; for the hypotheses of a beam search."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Joins at least one part; called on the event loop for a slow reader."""
