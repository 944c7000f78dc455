"""What a module must offer to be exported (docs/bring-your-own.md). The models of the kit follow it too.

Shapes: B rows, T target tokens, S source tokens, D model width, H heads, K head width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Self-attention of one layer: query (B, T, H, K), key and value (B, T, H_kv, K) -> context (B, T, H, K)."""

AttendCross: TypeAlias = Callable[[Tensor], Tensor]
"""Cross-attention of one layer: query (B, T, H, K) -> context (B, T, H, K)."""


class TextClassifier(Protocol):
    """Task text_classification."""

    max_length: int

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> logits (B, C)."""


class ImageClassifier(Protocol):
    """Task image_classification."""

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""


class Decoder(Protocol):
    """Task generation."""

    max_length: int

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""


class EncoderDecoder(Protocol):
    """Task translation."""

    max_source_length: int
    max_target_length: int

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S), (B, S) -> memory (B, S, D)."""

    def cross_keys_values(self, memory: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """(B, S, D) -> a (key, value) a layer, each (B, S, H, K)."""

    def decode(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
