"""The graphs of a bundle as modules that can be traced: a model with the attention of the graph injected.

Shapes: R slots, N sources, T tokens of a step, S source tokens, H heads, K head width, L asked positions, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from headway_export.attention import CachedAttention, CrossAttention
from headway_training.models.protocols import Decoder, EmbeddingClassifier, EncoderDecoder


def float_dtype(module: nn.Module) -> torch.dtype:
    """Returns the dtype of a module's parameters."""
    return next(parameter.dtype for parameter in module.parameters())


def pooling_of(module: nn.Module) -> str | None:
    """Returns which vector a classifier can be asked for (`EmbeddingClassifier`), None where it offers none."""
    offers = callable(getattr(module, "logits_and_embedding", None))
    pooling = getattr(module, "pooling", None)
    return pooling if offers and isinstance(pooling, str) and pooling else None


class ClassifierGraph(nn.Module):
    """Graph `model`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.pooling = pooling_of(module)

    def forward(self, first: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Ids and mask (and types), or pixels, to float32 logits (B, C), or (B, T, C) of a token classifier.

        Of a module that offers a vector of its input, that comes second: float32 (B, D).
        """
        if first.is_floating_point():
            first = first.to(float_dtype(self.module))
        if self.pooling is None:
            return (self.module(first, *rest).float(),)
        logits, pooled = cast("EmbeddingClassifier", self.module).logits_and_embedding(first, *rest)
        return logits.float(), pooled.float()


class DecoderGraph(nn.Module):
    """Graph `decoder` of a generation model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_positions: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        """A step of (R, T) tokens: float32 logits (R, L, V), then the present state."""
        module = cast("Decoder", self.module)
        attend = CachedAttention(list(past), seqlens_k, total_sequence_length)
        hidden = module.hidden_states(input_ids, position_ids, attend)  # (R, T, D)
        return (_logits_at(module, hidden, logits_positions), *attend.present)


class EncoderGraph(nn.Module):
    """Graph `encoder` of a translation model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """(N, S), (N, S) -> a key and a value a layer, each (N, H, S, K)."""
        module = cast("EncoderDecoder", self.module)
        pairs = module.cross_keys_values(module.encode(input_ids, attention_mask))
        return tuple(tensor.transpose(1, 2).contiguous() for pair in pairs for tensor in pair)  # (N, H, S, K)


class CrossDecoderGraph(nn.Module):
    """Graph `decoder` of a translation model."""

    def __init__(self, module: nn.Module, num_state_tensors: int, alignment_layer: int) -> None:
        super().__init__()
        self.module = module
        self.num_state_tensors = num_state_tensors
        self.alignment_layer = alignment_layer

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_positions: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """A step of (R, T) tokens; the past state, the source mask and the cross tensors follow as `tensors`."""
        module = cast("EncoderDecoder", self.module)
        past, (source_mask, *cross) = tensors[: self.num_state_tensors], tensors[self.num_state_tensors :]
        attend = CachedAttention(list(past), seqlens_k, total_sequence_length)
        attend_cross = CrossAttention(cross, source_mask, self.alignment_layer)
        hidden = module.decode(input_ids, position_ids, attend, attend_cross)  # (R, T, D)
        return (_logits_at(module, hidden, logits_positions), attend_cross.alignment, *attend.present)


def _logits_at(module: Decoder | EncoderDecoder, hidden: Tensor, positions: Tensor) -> Tensor:
    """Logits of the asked positions alone: (R, T, D), (R, L) -> (R, L, V), since the projection is a step's dearest."""
    index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return module.logits(hidden.gather(1, index)).float()
