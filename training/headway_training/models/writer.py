"""What models that write share: a decoder that attends to what an encoder has made of a source (Vaswani et al. 2017).

B rows, T target tokens, S source positions, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway_training.models.base import Model, check_length
from headway_training.models.parts.attention import Attend, AttendCross, Kernel, causal_attention, cross_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.layer import Stack
from headway_training.models.protocols import Writes

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""The cross-attention keys and values of each layer of a decoder, each (B, S, H, K)."""


class Writer(Model):
    """Predicts the next target token from a memory of the source and the target so far; subclasses make its parts."""

    tokens: TokenEmbedding
    target_embedding: PositionedEmbedding
    decoder: Stack
    output: nn.Linear | None
    """The output projection; None: the tokens' embedding."""
    max_target_length: int
    target_name: str = "a text"
    """What is written, in errors."""

    def __init__(self) -> None:
        super().__init__()
        self.output = None

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, S, D) -> the cross-attention keys and values of each decoder layer, each (B, S, H, K)."""
        return self.decoder.cross_keys_values(memory)

    def decode(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """Computes the decoder's last states.

        Args:
            input_ids: int64 (B, T), target tokens.
            position_ids: int64 (B, T) or (T), from 0.
            attend: attention among target tokens; each layer calls it once.
            attend_cross: attention to the source; each layer calls it once.

        Returns:
            float (B, T, D).
        """
        embedded = self.target_embedding(self.tokens(input_ids), position_ids)  # (B, T, D)
        attend = self.target_embedding.attention(attend, position_ids)
        hidden_states: Tensor = self.decoder(embedded, attend, attend_cross)
        return hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        logits: Tensor = self.tokens.logits(hidden_states) if self.output is None else self.output(hidden_states)
        return logits

    def target_states(self, target_ids: Tensor, keys_values: KeysValues, source_mask: Tensor | None = None) -> Tensor:
        """Computes the decoder's last states at every target token, as training reads them.

        Args:
            target_ids: int64 (B, T), padded on the right.
            keys_values: of the sources, as `cross_keys_values` returns them.
            source_mask: int64 (B, S), 1 at what is there and 0 at padding; None: all is there.

        Returns:
            float (B, T, D).

        Raises:
            ValueError: a target is longer than its limit.
        """
        check_length(self.target_name, target_ids.shape[1], self.max_target_length)
        return target_states(self, self.kernel, target_ids, keys_values, source_mask)


def target_states(
    model: Writes, kernel: Kernel, target_ids: Tensor, keys_values: KeysValues, source_mask: Tensor | None = None
) -> Tensor:
    """As `Writer.target_states`, of any model that writes: attention is computed by `kernel`."""
    if source_mask is None:
        source_mask = torch.ones(len(target_ids), keys_values[0][0].shape[1], device=target_ids.device)
    position_ids = torch.arange(target_ids.shape[1], device=target_ids.device).expand_as(target_ids)
    attend_cross = cross_attention(keys_values, source_mask, kernel)
    return model.decode(target_ids, position_ids, causal_attention(kernel), attend_cross)
