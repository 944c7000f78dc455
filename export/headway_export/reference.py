"""PyTorch's own answers: the whole computation, without cache, padding or batch. What the exports are held against.

Shapes: T tokens, S source tokens, V vocabulary, C classes, D width of an embedding.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_training.models.parts.attention import Attend, causal_attention, cross_attention, fused_attention
from headway_training.models.protocols import (
    Decoder,
    EmbeddingClassifier,
    EncoderDecoder,
    RecurrentEncoderDecoder,
    is_recurrent,
)
from headway_training.models.recurrent import recur_packed

CAUSAL: Attend = causal_attention(fused_attention)


def generation_logits(module: nn.Module, token_ids: NDArray[np.int64], attend: Attend = CAUSAL) -> NDArray[np.float32]:
    """Logits after every token of a text: (T,) int64 -> (T, V) float32. `attend` must compute what `CAUSAL` does."""
    decoder = cast("Decoder", module)
    with torch.inference_mode():
        ids = torch.from_numpy(token_ids).unsqueeze(0)
        hidden = decoder.hidden_states(ids, torch.arange(len(token_ids)).unsqueeze(0), attend)
        return decoder.logits(hidden)[0].float().numpy()


def translation_logits(
    module: nn.Module, source_ids: NDArray[np.int64], target_ids: NDArray[np.int64], attend: Attend = CAUSAL
) -> NDArray[np.float32]:
    """Logits after every token of a target: (S,), (T,) int64 -> (T, V) float32. `attend` as for a text."""
    model = cast("EncoderDecoder", module)
    with torch.inference_mode():
        source = torch.from_numpy(source_ids).unsqueeze(0)
        mask = torch.ones_like(source)
        if is_recurrent(module):
            return _recurrent_logits(cast("RecurrentEncoderDecoder", module), source, mask, target_ids)
        keys_values = model.cross_keys_values(model.encode(source, mask))
        attend_cross = cross_attention(keys_values, mask, fused_attention)
        target = torch.from_numpy(target_ids).unsqueeze(0)
        positions = torch.arange(len(target_ids)).unsqueeze(0)
        return model.logits(model.decode(target, positions, attend, attend_cross))[0].float().numpy()


def _recurrent_logits(
    model: RecurrentEncoderDecoder, source: Tensor, mask: Tensor, target_ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Logits after every token of a target, one token after another."""
    cross, first = model.encode_source(source, mask, recur_packed)
    states = tuple(state[:, None] for state in first)
    rows = []
    for token in torch.from_numpy(target_ids).reshape(-1, 1, 1):
        logits, states, _ = model.step(token, states, cross, mask)
        rows.append(logits[0, 0])
    return torch.stack(rows).float().numpy()


def embedding_of(module: nn.Module, *inputs: NDArray[Any]) -> NDArray[np.float32]:
    """The vector a module offers: ids and types of one text, or pixels of one image -> (D,) float32."""
    tensors = [torch.from_numpy(array).unsqueeze(0) for array in inputs]
    if not tensors[0].is_floating_point():
        tensors.insert(1, torch.ones_like(tensors[0]))
    with torch.inference_mode():
        _, pooled = cast("EmbeddingClassifier", module).logits_and_embedding(*tensors)
        vector: NDArray[np.float32] = pooled[0].float().numpy()
        return vector


def text_logits(
    module: nn.Module, token_ids: NDArray[np.int64], token_types: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Logits of a text: (T,) int64 -> (C,) float32, or (T, C) of a token classifier."""
    with torch.inference_mode():
        ids = torch.from_numpy(token_ids).unsqueeze(0)
        types = () if token_types is None else (torch.from_numpy(token_types).unsqueeze(0),)
        logits: NDArray[np.float32] = module(ids, torch.ones_like(ids), *types)[0].float().numpy()
        return logits


def image_logits(module: nn.Module, pixel_values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits of an image: (3, height, width) float32 -> (C,) float32."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = module(torch.from_numpy(pixel_values).unsqueeze(0))[0].float().numpy()
        return logits
