"""Attention to places of maps of features, and windows of Swin, for images of any size.

Maps of an image are in a row, the finest first, and all indices are computed in the graph: with slices and paddings,
whose sizes follow from those of an image by long formulas, PyTorch takes minutes to trace what takes seconds so.

B rows, M maps (levels), N places of all maps, Q queries, H heads, K head width, P points of a map, S places of all
windows, W places of a window, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_EDGE: Final = 1e-5
"""How far shares are kept from 0 and 1 before their logits are taken, as in the library."""
_MASKED: Final = -100.0
"""Added to scores of places that a shifted window joins and the image does not, as in the library."""


def flatten_maps(maps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Puts maps in a row, M times (B, D, rows, columns) -> (B, N, D), and rows and columns of each, int64 (B, M, 2)."""
    sizes = torch.stack([torch.stack([_whole(one.shape[2]), _whole(one.shape[3])]) for one in maps])
    row = torch.cat([one.flatten(2).transpose(1, 2) for one in maps], dim=1)
    return row, sizes.expand(maps[0].shape[0], -1, -1)


def _whole(size: int) -> Tensor:
    return torch.full((), size, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the places of maps are."""

    sizes: Tensor
    """(B, M, 2), rows and columns."""
    starts: Tensor
    """(B, M), the first place of each map."""
    level: Tensor
    """(B, N), the map of each place."""
    cells: Tensor
    """(B, N, 2), row and column of each place in its map."""

    @classmethod
    def of(cls, sizes: Tensor, num_places: int) -> Places:
        """Finds them, of maps of `sizes` int64 (B, M, 2)."""
        counts = sizes.prod(dim=-1)  # (B, M)
        ends = counts.cumsum(dim=1)
        starts, places = ends - counts, torch.arange(num_places)[None]
        level = (places[..., None] >= ends[:, None]).long().sum(dim=-1)
        columns = sizes[..., 1].gather(1, level)
        inner = places - starts.gather(1, level)
        row = torch.div(inner, columns, rounding_mode="floor")
        return cls(sizes, starts, level, torch.stack([row, inner - row * columns], dim=-1))

    @property
    def of_sizes(self) -> Tensor:
        """Rows and columns of the map of each place, (B, N, 2)."""
        return self.sizes.gather(1, self.level[..., None].expand(-1, -1, 2))

    @property
    def centres(self) -> Tensor:
        """Centre of each place as shares of the image, (B, N, 2): across and down."""
        return ((self.cells + 0.5) / self.of_sizes).flip(-1)

    def waves(self, width: int, temperature: float) -> Tensor:
        """Returns sines and cosines of the places, (B, N, width), first down and then across.

        Those of images without padding: Carion et al. 2020 (arXiv 2005.12872), section A.4, with positions from 1.
        """
        shares = (self.cells + 1) / (self.of_sizes + 1e-6)  # (B, N, 2)
        return waves_of(shares, width // 2, temperature=temperature).flatten(2)


def waves_of(shares: Tensor, width: int, *, temperature: float = 10_000) -> Tensor:
    """Returns sines and cosines of shares, (B, N, .) -> (B, N, ., width)."""
    exponents = 2 * torch.div(torch.arange(width, dtype=torch.float32), 2, rounding_mode="floor") / width
    angles = shares[..., None] * (2 * math.pi) / temperature**exponents
    return torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=-1).flatten(-2)


def logit_of(shares: Tensor) -> Tensor:
    """Returns the logits of shares, which are kept a little from 0 and 1."""
    inside = shares.clamp(_EDGE, 1 - _EDGE)
    return torch.log(inside / (-inside + 1))


def attend_to_places(attention: Any, states: Tensor, read: Tensor, maps: Places, where: Tensor) -> Tensor:
    """Attends to points around places of maps; Zhu et al. 2021 (arXiv 2010.04159), equation 3.

    Args:
        attention: Layer of the library, with the projections.
        states: (B, Q, D), positions included.
        read: What is attended to, (B, N, D).
        maps: Of which it is made.
        where: (B, Q, 2), as shares of the image; or with width and height, (B, Q, 4).

    Returns:
        (B, Q, D).
    """
    heads, levels, points = attention.n_heads, attention.n_levels, attention.n_points
    offsets = attention.sampling_offsets(states).unflatten(-1, (heads, levels, points, 2))
    shares = attention.attention_weights(states).unflatten(-1, (heads, -1)).softmax(dim=-1)  # (B, Q, H, M P)
    shares = shares.unflatten(-1, (levels, points))
    sides = maps.sizes.flip(-1)[:, None, None, :, None].float()  # (B, 1, 1, M, 1, 2), columns and rows
    centre = where[:, :, None, None, None]  # (B, Q, 1, 1, 1, .)
    if where.shape[-1] == 2:
        cells = centre * sides + offsets - 0.5  # (B, Q, H, M, P, 2)
    else:
        cells = (centre[..., :2] + offsets * (centre[..., 2:] * (0.5 / points))) * sides - 0.5
    first = cells.floor()
    part = cells - first
    columns, rows = sides.unbind(-1)
    start = maps.starts[:, None, None, :, None].float()
    batch, num_places = read.shape[:2]
    head = torch.arange(heads)[:, None, None] + (torch.arange(batch) * (num_places * heads))[:, None, None, None, None]
    values = attention.value_proj(read).reshape(batch * num_places * heads, -1)
    summed: Any = 0
    for right in (0, 1):
        x = first[..., 0] + right
        of_x = part[..., 0] if right else -part[..., 0] + 1
        for below in (0, 1):
            y = first[..., 1] + below
            of_y = part[..., 1] if below else -part[..., 1] + 1
            is_inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
            place = torch.where(is_inside, start + y * columns + x, 0.0).long() * heads + head  # (B, Q, H, M, P)
            weight = torch.where(is_inside, shares * of_x * of_y, 0.0).flatten(3)
            found = values.index_select(0, place.flatten()).reshape(batch, -1, heads, levels * points, values.shape[1])
            summed = summed + weight[..., None, :] @ found  # (B, Q, H, 1, K)
    return cast("Tensor", attention.output_proj(summed.flatten(2)))


# Swin


class SwinMaps(nn.Module):
    """A `SwinBackbone` of the library, for images of any size."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, pixel_values: Tensor) -> list[Tensor]:
        """(B, 3, height, width) -> maps of features, (B, D of it, rows, columns)."""
        backbone: Any = self.backbone
        embeddings = backbone.swin.embeddings
        rest = embeddings.patch_size - 1  # what lacks to a whole patch is black, and there is no patch of black alone
        patches = embeddings.patch_embeddings.projection(functional.pad(pixel_values, (0, rest, 0, rest)))
        rows, columns = patches.shape[2:]
        states = embeddings.norm(patches.flatten(2).transpose(1, 2))
        found = [(states, rows, columns)]
        for stage in backbone.swin.encoder.layers:
            windows = {
                block.shift_size: _Windows.of(rows, columns, block.window_size, block.shift_size)
                for block in stage.blocks
            }
            for block in stage.blocks:
                states = windows[block.shift_size].read(block, states)
            found.append((states, rows, columns))
            if stage.downsample is not None:
                states, rows, columns = _halve(stage.downsample, states, rows, columns)
        return [
            backbone.hidden_states_norms[name](states).transpose(1, 2).reshape(states.shape[0], -1, rows, columns)
            for name, (states, rows, columns) in zip(backbone.stage_names, found, strict=True)
            if name in backbone.out_features
        ]


def _halve(merging: Any, states: Tensor, rows: int, columns: int) -> tuple[Tensor, int, int]:
    """(B, rows columns, D) -> the same of half as many rows and columns, rounded up, and of 2 D."""
    fewer, narrower = (rows + 1) // 2, (columns + 1) // 2
    places, width = torch.arange(fewer * narrower), _whole(narrower)
    row = torch.div(places, width, rounding_mode="floor") * 2
    column = (places - torch.div(places, width, rounding_mode="floor") * width) * 2
    parts = [
        _take(states, row + down, column + across, _whole(rows), _whole(columns))
        for across in (0, 1)
        for down in (0, 1)
    ]
    return merging.reduction(merging.norm(torch.cat(parts, dim=-1))), fewer, narrower


def _take(states: Tensor, row: Tensor, column: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns states of cells, (B, places, D), and zeros of those that are outside of their map."""
    is_inside = (row < rows) & (column < columns)
    taken = states.index_select(1, torch.where(is_inside, row * columns + column, 0))
    return taken * is_inside[:, None].float()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Windows:
    """Windows that a map is cut into after a shift; Liu et al. 2021 (arXiv 2103.14030), section 3.2."""

    size: tuple[Tensor, Tensor]
    """Rows and columns of the map."""
    row: Tensor
    """(S,), row in the map of each place of the windows; behind the last where the map is filled up."""
    column: Tensor
    slot: Tensor
    """(rows columns,), place in the windows of each cell of the map."""
    bias: Tensor | None
    """(windows, 1, W, W), what is added to scores; None without a shift."""
    num_windows: int
    side: int

    @classmethod
    def of(cls, rows: int, columns: int, side: int, shift: int) -> _Windows:
        """Cuts a map into windows of `side` rows and columns."""
        high, wide = (rows + side - 1) // side, (columns + side - 1) // side
        height, width, across = _whole(high * side), _whole(wide * side), _whole(wide)
        slots = torch.arange(high * wide * (side * side))
        window = torch.div(slots, side * side, rounding_mode="floor")
        inner = slots - window * (side * side)
        above = torch.div(window, across, rounding_mode="floor")
        line = torch.div(inner, side, rounding_mode="floor")
        row = above * side + line
        column = (window - above * across) * side + inner - line * side
        bias = None
        if shift:
            region = [
                (places >= size - side).long() + (places >= size - shift).long()
                for places, size in ((row, height), (column, width))
            ]
            regions = (region[0] * 3 + region[1]).reshape(high * wide, side * side)
            bias = (regions[:, :, None] != regions[:, None]).float()[:, None] * _MASKED
        cells = torch.arange(rows * columns)
        down = torch.div(cells, _whole(columns), rounding_mode="floor")
        moved = [
            torch.where(place < shift, place + size, place) - shift
            for place, size in ((down, height), (cells - down * columns, width))
        ]
        window_of = [torch.div(place, side, rounding_mode="floor") for place in moved]
        line_of = [place - window * side for place, window in zip(moved, window_of, strict=True)]
        return cls(
            size=(_whole(rows), _whole(columns)),
            row=torch.where(row + shift >= height, row + shift - height, row + shift),
            column=torch.where(column + shift >= width, column + shift - width, column + shift),
            slot=((window_of[0] * across + window_of[1]) * side + line_of[0]) * side + line_of[1],
            bias=bias,
            num_windows=high * wide,
            side=side,
        )

    def read(self, block: Any, states: Tensor) -> Tensor:
        """A block of Swin, (B, rows columns, D) -> the same."""
        attention = block.attention
        read = _take(block.layernorm_before(states), self.row, self.column, *self.size)  # (B, S, D)
        windows = read.reshape(read.shape[0], self.num_windows, self.side**2, read.shape[2])
        query, key, value = (
            project(windows).unflatten(-1, (attention.num_attention_heads, -1)).transpose(2, 3)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # (B, windows, H, W, K)
        scores = query @ key.transpose(-1, -2) * attention.scaling + attention.relative_position_bias()
        if self.bias is not None:
            scores = scores + self.bias
        attended = (scores.softmax(dim=-1) @ value).transpose(2, 3).flatten(3).flatten(1, 2)  # (B, S, D)
        states = states + attention.o_proj(attended.index_select(1, self.slot))
        return cast("Tensor", states + block.mlp(block.layernorm_after(states)))
