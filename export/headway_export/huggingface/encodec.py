"""The decoder of EnCodec (Defossez et al. 2022, arXiv 2210.13438), with shapes that do not depend on values.

B rows, T times, F frames, K codebooks, D channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from headway_export.huggingface.recurrence import recur


def embed_codes(codec: Any, codes: Tensor) -> Tensor:
    """Returns the sum of the vectors of a frame's codes: int64 (B, F, K) -> (B, D, F)."""
    tables = [layer.codebook.embed for layer in codec.quantizer.layers[: codes.shape[-1]]]
    vectors = [functional.embedding(codes[..., number], table) for number, table in enumerate(tables)]
    return torch.stack(vectors).sum(dim=0).transpose(1, 2)


def codec_layer(layer: Any, states: Tensor) -> Tensor:
    """A layer of a decoder: (B, D, T) -> (B, D', T')."""
    kind = type(layer).__name__
    if kind == "EncodecResnetBlock":
        inner = states
        for part in layer.block:
            inner = codec_layer(part, inner)
        return codec_layer(layer.shortcut, states) + inner
    if kind == "EncodecLSTM":
        return recur(layer.lstm, states.permute(2, 0, 1)).permute(1, 2, 0) + states
    if kind == "EncodecConvTranspose1d":
        stride = layer.conv.stride[0]
        cut = 0 if layer.causal else (layer.conv.kernel_size[0] - stride + 1) // 2  # of causal ones all at the end
        return cast("Tensor", layer.conv(states)[..., cut : cut + states.shape[-1] * stride])
    if kind == "EncodecConv1d":
        return cast("Tensor", layer.conv(_pad(layer, states)))
    return cast("Tensor", layer(states))


def _pad(layer: Any, states: Tensor) -> Tensor:
    """Pads the input of a convolution. Zeros stand for what is reflected and a short text does not have."""
    missing = (layer.conv.kernel_size[0] - 1) * layer.conv.dilation[0]
    right = 0 if layer.causal else missing // 2
    left = missing - right
    if not missing or layer.pad_mode != "reflect":
        return functional.pad(states, (left, right), layer.pad_mode) if missing else states
    last = states.shape[-1] - 1
    before = torch.arange(left, 0, -1)
    parts = [states[..., before.clamp(max=last)] * (before <= last), states]
    if right:
        behind = last - torch.arange(1, right + 1)
        parts.append(states[..., behind.clamp(min=0)] * (behind >= 0))
    return torch.cat(parts, dim=-1)


def reach_of(layers: Iterable[Any]) -> int:
    """Returns the frames on either side of one that what some layers make of it depends on; none of them recurs."""
    reach = 0
    for layer in reversed(list(layers)):
        kind = type(layer).__name__
        if kind == "EncodecResnetBlock":
            reach += max(_width(part) for part in (layer.block, [layer.shortcut]))
        elif kind == "EncodecConvTranspose1d":
            reach = -(-(reach + layer.conv.kernel_size[0]) // layer.conv.stride[0])
        else:
            reach += _width([layer])
    return reach


def _width(layers: Iterable[Any]) -> int:
    convolutions = [layer.conv for layer in layers if type(layer).__name__ == "EncodecConv1d"]
    return sum((one.kernel_size[0] - 1) * one.dilation[0] for one in convolutions)
