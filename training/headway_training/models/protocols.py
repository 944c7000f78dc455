"""What the rest of the project asks of a model, of this kit or not (docs/bring-your-own.md).

B rows, G rows of a sentence (its beams), T target tokens, S source tokens, D model width, H heads, K head width,
V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headway_training.models.parts.attention import Attend, AttendCross
from headway_training.models.parts.recurrence import Recur


class Decoder(Protocol):
    """A model that generates text."""

    max_length: int
    """Most tokens, prompt and continuation together."""

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class EncoderDecoder(Protocol):
    """A model that translates."""

    max_source_length: int
    """Most tokens of a source sentence."""
    max_target_length: int
    """Most tokens of a translation, its first token included."""

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S), (B, S) -> memory (B, S, D)."""
        ...

    def cross_keys_values(self, memory: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """(B, S, D) -> a (key, value) a layer, each (B, S, H, K)."""
        ...

    def decode(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        ...


class RecurrentEncoderDecoder(Protocol):
    """A model that translates with a state of fixed size in the place of attention to its own tokens."""

    max_source_length: int
    """Most tokens of a source sentence."""
    max_target_length: int
    """Most tokens of a translation, its first token included."""

    def encode_source(
        self, input_ids: Tensor, attention_mask: Tensor, recur: Recur
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(B, S), (B, S) -> what every step reads, each (B, S, .), and the states it begins with, each (B, .)."""
        ...

    def step(
        self, token_ids: Tensor, states: tuple[Tensor, ...], cross: tuple[Tensor, ...], source_mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """(B, G), states (B, G, .), ... -> logits (B, G, V), the next states, attention to the source (B, G, S)."""
        ...


def is_recurrent(model: object) -> bool:
    """Whether a model that translates follows `RecurrentEncoderDecoder`, and not `EncoderDecoder`."""
    return callable(getattr(model, "step", None))


class TextClassifier(Protocol):
    """A model that classifies texts, or their tokens."""

    max_length: int
    """Most tokens of a text."""

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> logits (B, C), or (B, T, C) of a token classifier."""
        ...


class EmbeddingClassifier(Protocol):
    """A classifier of texts, tokens or images that can be asked for a vector of its input, too."""

    pooling: str
    """Which vector it is: `mean`, `max`, `first_token`, `class_token` or a name of the module's own."""

    def logits_and_embedding(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the model is called with -> the logits that calling it gives, and the vectors (B, D)."""
        ...


class ImageClassifier(Protocol):
    """A model that labels images."""

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        ...
