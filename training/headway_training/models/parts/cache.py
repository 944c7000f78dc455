"""Attention over a key/value cache, for decoding in PyTorch a few tokens at a time.

B rows, T new tokens, L cache length, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway_training.models.parts.attention import Attend, Kernel, scaled_dot_product_attention


class CachedAttention:
    """Remembers the keys and values of every layer; new tokens see themselves and all that came before in their row.

    Rows may be at different positions. Padding right of a row's tokens is harmless: what it writes lies at later
    positions, which nobody sees before the row's own token has overwritten them.

    Args:
        max_length: positions a row can hold.
        kernel: what computes attention.
    """

    def __init__(self, max_length: int, kernel: Kernel = scaled_dot_product_attention) -> None:
        self._max_length = max_length
        self._kernel = kernel
        self._keys: list[Tensor] = []  # a layer: (B, L, G, K)
        self._values: list[Tensor] = []

    def __repr__(self) -> str:
        return f"CachedAttention(max_length={self._max_length}, layers={len(self._keys)})"

    def at(self, position_ids: Tensor) -> Attend:
        """Gives the attention function of one step; each of its calls serves the next layer.

        Args:
            position_ids: int64 (B, T), the positions of the step's tokens, from 0 and without gaps in a row.

        Raises:
            ValueError: a position is not in the cache.
        """
        last = int(position_ids.max())
        if last >= self._max_length:
            raise ValueError(f"position {last} is past the cache, which holds positions 0 to {self._max_length - 1}")
        rows = torch.arange(len(position_ids), device=position_ids.device)[:, None]  # (B, 1)
        cached = torch.arange(self._max_length, device=position_ids.device)  # (L)
        mask = (cached <= position_ids[..., None])[:, None]  # (B, 1, T, L)
        layer = 0

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            nonlocal layer
            if layer == len(self._keys):
                self._keys.append(self._empty(key))
                self._values.append(self._empty(value))
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, position_ids] = key
            values[rows, position_ids] = value
            layer += 1
            return self._kernel(query, keys, values, mask)

        return attend

    def _empty(self, tensor: Tensor) -> Tensor:
        rows, _, heads, head_dim = tensor.shape
        return tensor.new_zeros(rows, self._max_length, heads, head_dim)
