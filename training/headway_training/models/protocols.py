"""What a model must offer to be trained and exported, whether it is of this kit or not (docs/bring-your-own.md).

The protocols below say which methods it has. To be trained it must also fulfil these, which `contract.py` tries:

1. It reads the tensors that the task's batch has, rows first, and gives a prediction for each target: logits with the
   axes of the targets and, behind them, as many classes as the data has. Fresh weights give finite numbers.
2. A row's answer depends on that row alone. So the loss of a batch is the sum over the targets of its rows, whichever
   processes and parts have them, and rows without targets count for nothing.
3. In evaluation mode it answers the same twice.
4. Where tokens are predicted in their order, what comes later changes nothing.
5. Padding behind a text changes nothing.
6. Every weight that is trained gets a gradient from every batch.
7. Forward changes no buffer: what a model is after a step follows from its weights and the batch.
8. It computes on tensors without values (torch's device `meta`), on which memory is counted before a run.

B rows, G rows of a sentence (its beams), T target tokens, S source tokens, D model width, H heads, K head width,
V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import get_annotations
from typing import Any, Protocol

from torch import Tensor

from headway_training.models.parts.attention import Attend, AttendCross, Kernel
from headway_training.models.recurrent import Recur


class Decoder(Protocol):
    """A model that generates text."""

    max_length: int
    """Most tokens, prompt and continuation together."""

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D); each layer calls `attend` once."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class SeeingDecoder(Decoder, Protocol):
    """A model that generates text, whose prompts may have images."""

    cell: int | None
    """Side of the square of pixels that a vector stands for, of a model of images of any size; None: of one size."""
    has_grid_positions: bool
    """True if tokens of images have rows and columns as positions."""

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, M, D): vectors in place of those of as many tokens.

        Images of any size are (B, 3, rows, cell, columns, cell).
        """
        ...

    def hidden_states_with_media(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, media: Sequence[Tensor]
    ) -> Tensor:
        """Reads tokens, some of which have embeddings of their own.

        Args:
            input_ids: (B, T).
            position_ids: (B, T).
            attend: Called once by each layer.
            media: Places of these tokens among all, row by row, (M,); their embeddings, (M, D); and for positions of a
                grid what is added to `position_ids` for the place, the row and the column of each token, (B, T, 3).

        Returns:
            (B, T, D).
        """
        ...


class StatefulDecoder(Protocol):
    """A model that generates text with a state of fixed size instead of attention to the tokens before."""

    max_length: int
    """Most tokens, prompt and continuation together."""

    def first_states(self, rows: int) -> list[Tensor]:
        """Returns the state at the beginning of B texts: zeros, float32 (B, ...) each, of fixed sizes."""
        ...

    def read(self, input_ids: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(B, T), states of the tokens before -> (B, T, D), the next states; in one piece or several alike."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class HybridDecoder(Protocol):
    """A model that generates text with attention in some layers and states of fixed size in others, or in the same."""

    max_length: int
    """Most tokens, prompt and continuation together."""

    def first_states(self, rows: int) -> list[Tensor]:
        """Returns the states at the beginning of B texts: zeros, float32 (B, ...) each, of fixed sizes."""
        ...

    def read_attending(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """(B, T), (B, T), states of the tokens before -> (B, T, D), the next states; in one piece or several alike.

        `attend` is called as in a `Decoder`, by the layers that attend, which are numbered from 0.
        """
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class Writes(Protocol):
    """A model that writes what it attends to in a memory of the source."""

    max_target_length: int
    """Most tokens that it writes, those that it begins with included."""

    def cross_keys_values(self, memory: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """(B, S, D) -> the cross-attention keys and values of each layer, each (B, S, H, K)."""
        ...

    def decode(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T), (B, T) -> (B, T, D); each layer calls both functions once."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class EncoderDecoder(Writes, Protocol):
    """A model that translates."""

    max_source_length: int
    """Most tokens of a source sentence."""

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S), (B, S) -> memory (B, S, D)."""
        ...


class ImageToText(Writes, Protocol):
    """A model that writes captions."""

    grid: tuple[int, int]
    """Rows and columns of the patches of an image, which the memory holds row by row. A module whose memory has other
    tokens before them, a class token first, says how many in `num_leading_tokens`."""

    def encode(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> memory (B, S, D)."""
        ...


class PromptSegmenter(Protocol):
    """A model that cuts out of images what prompts point at.

    B images, N prompts, Q points of a prompt, S side of a mask in cells, M masks of a prompt, 2 or more. An embedding
    is one tensor or several of fixed shapes, such as `embedding`, (B, L, E) of L positions and width E.
    """

    mask_size: int
    """S."""
    encoder: Callable[[Tensor], dict[str, Tensor]]
    """Float (B, 3, height, width) -> the tensors of an embedding by name, (B, ...) each."""
    decoder: Callable[..., dict[str, Tensor]]
    """By keyword the tensors of the embedding of each prompt's image (N, ...), `points` (N, Q, 2), `point_labels`
    (N, Q), `earlier_mask` (N, S, S) and `has_earlier_mask` (N,) or None -> `masks` (N, M, S, S) and `predicted_iou`
    (N, M), as `MaskDecoder` has them."""


class SpeechToText(Writes, Protocol):
    """A model that writes what is said."""

    max_source_length: int
    """Positions of a window of audio, which the memory holds."""

    def encode(self, input_features: Tensor) -> Tensor:
        """(B, mel bins, frames) -> memory (B, S, D)."""
        ...


class RecurrentEncoderDecoder(Protocol):
    """A model that translates with a state of fixed size instead of attention to its own tokens."""

    max_source_length: int
    """Most tokens of a source sentence."""
    max_target_length: int
    """Most tokens of a translation, its first token included."""

    def encode_source(
        self, input_ids: Tensor, attention_mask: Tensor, recur: Recur
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(B, S), (B, S) -> tensors that every step reads, each (B, S, .), and the first states, each (B, .)."""
        ...

    def step(
        self, token_ids: Tensor, states: tuple[Tensor, ...], cross: tuple[Tensor, ...], source_mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """(B, G), states (B, G, .), ... -> logits (B, G, V), the next states, attention weights (B, G, S)."""
        ...


def is_recurrent(model: object) -> bool:
    """True if a translation model follows `RecurrentEncoderDecoder`, False if it follows `EncoderDecoder`.

    Raises:
        ValueError: It follows both, or neither.
    """
    return _followed(model, RecurrentEncoderDecoder, EncoderDecoder) is RecurrentEncoderDecoder


def sees(model: object) -> bool:
    """True if the prompts of a model that generates text may have images (`SeeingDecoder`)."""
    return callable(getattr(model, "embed_images", None))


DecoderKind = type[Decoder] | type[HybridDecoder] | type[StatefulDecoder]


def decoder_kind(model: object) -> DecoderKind:
    """Returns the protocol that a model follows which generates text.

    Raises:
        ValueError: It follows several, or none.
    """
    kind: DecoderKind = _followed(model, Decoder, HybridDecoder, StatefulDecoder)
    return kind


def _followed(model: object, *protocols: type) -> Any:
    """Returns the protocol that a model follows, by all of its methods: one may be a helper that is called alike.

    Raises:
        ValueError: It follows several, or none.
    """
    methods = {
        one: [name for base in one.__mro__ for name in vars(base) if not name.startswith("_")] for one in protocols
    }
    lacks = {one: [name for name in methods[one] if not callable(getattr(model, name, None))] for one in methods}
    followed = [one for one in methods if not lacks[one]]
    if len(followed) == 1:
        return followed[0]
    if followed:
        found = " and ".join(f"{', '.join(methods[one])} of {one.__name__}" for one in followed)
        raise ValueError(f"it has {found}; a model follows one of them, so give what is a helper another name")
    missing = " and ".join(f"{', '.join(lacks[one])} of {one.__name__}" for one in lacks)
    raise ValueError(f"it lacks {missing}; a model has all methods of one of them")


def lacking(model: object, *protocols: type) -> list[str]:
    """Returns the attributes and methods that a model lacks of one of the protocols, of the one it is nearest to."""
    members = [[name for base in one.__mro__ for name in (*get_annotations(base), *vars(base))] for one in protocols]
    lacks = [[name for name in names if not name.startswith("_") and not hasattr(model, name)] for names in members]
    return min(lacks, key=len, default=[])


class TextClassifier(Protocol):
    """A model that classifies texts or tokens."""

    max_length: int
    """Most tokens of a text."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> logits (B, C), or (B, T, C) from a token classifier."""
        ...


class EmbeddingClassifier(Protocol):
    """A classifier of texts, tokens or images that also returns an embedding of its input."""

    pooling: str
    """How the embedding is made: `mean`, `max`, `first_token`, `class_token` or a name of the module's own."""

    def logits_and_embedding(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of `__call__` -> the logits of `__call__`, and the embeddings (B, D)."""
        ...


class ShowsAttention(Protocol):
    """A model with layers that attend without being given an attention function: an encoder of texts or images."""

    kernel: Kernel
    """Computes the attention of each of these layers, called once a layer, in their order. Another one may be put in
    its place. It is told by its parameters `query`, `key` and `value`; an `nn.Module` is none."""


class ImageClassifier(Protocol):
    """A model that labels images."""

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        ...
