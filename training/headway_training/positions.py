"""Tables of positions in models of any origin: which of the weights they are, and how long a text they have rows for.

T tokens, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NAME: Final = re.compile(
    r"(?:^|[._])(?:positions?|positional|pos|wpe|rel|relative|distance|rpb|attention_biases)(?:[._]|$)"
)
"""Of tables: `position_embeddings`, `embed_positions`, `pos_embed`, GPT-2's `wpe`, and of tables of distances
`relative_attention_bias`, `rel_embeddings`, `distance_embedding`, LeViT's `attention_biases`."""
_PROJECTIONS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PROBED_TOKENS: Final = 8
_LOOK_UP: Final = torch.ops.aten.embedding.default


def is_position_name(name: str) -> bool:
    """True of the name, or the last part of one, that a table of positions has."""
    return _NAME.search(name) is not None


def position_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a model that are looked up by a position or a distance, by their names.

    They are told by their names, and are the model's own or those of an embedding: a projection of positions is none.
    """
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _PROJECTIONS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            told_by = prefix.rpartition(".")[2] if name == "weight" else name  # an embedding's, or the table itself
            if parameter.ndim > 1 and is_position_name(told_by):
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def longest_text(read: Callable[[Tensor, Tensor], object], tokens: Sequence[int]) -> int | None:
    """How many tokens the tables of a model have rows for; None: it looks no token up by its position.

    A text is read twice, with other tokens: a table that is looked up by the same rows, one after another, is one of
    positions, and what comes before the first row is for something else, such as padding. Weights may be on the device
    `meta`, as long as buffers are not: what is computed of such weights is zeros.

    Args:
        read: Runs the model on ids and mask, int64 (1, T); errors are ignored, as positions are looked up first.
        tokens: Ids of ordinary tokens, two at least.
    """
    looked_up = []
    for shift in (0, 1):
        probe = _Probe()
        chosen = torch.tensor([[tokens[(place + shift) % len(tokens)] for place in range(_PROBED_TOKENS)]])
        with suppress(Exception), probe, torch.no_grad():  # whatever its code raises
            read(chosen, torch.ones_like(chosen))
        looked_up.append(probe.looked_up)
    rows = [
        len(table) - first
        for (table, one), (_, other) in zip(*looked_up, strict=False)
        if (first := _first_position(one, other)) is not None
    ]
    return min(rows, default=None)


def _first_position(one: Tensor, other: Tensor) -> int | None:
    """The row of the first token, if the rows (1, T) of two texts are the same and follow each other; else None."""
    if one.is_meta or other.is_meta or one.shape != other.shape or not torch.equal(one, other):
        return None
    if one.ndim > 2 or one.numel() != one.shape[-1] or one.numel() < _PROBED_TOKENS:
        return None
    rows = one.flatten()[:_PROBED_TOKENS]  # what follows fills up a text
    return int(rows[0]) if torch.equal(rows - rows[0], torch.arange(_PROBED_TOKENS)) else None


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is not typed
    """Takes note of what is looked up in tables, and computes with zeros where weights have no storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.looked_up: list[tuple[Tensor, Tensor]] = []
        """Table (rows, D) and rows."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _LOOK_UP:
            self.looked_up.append((args[0], args[1].detach()))
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if len({one.is_meta for one in tensors}) < 2:
            return func(*args, **kwargs)
        if func._schema.is_mutable:  # noqa: SLF001 (torch has no other way to tell)
            return args[0]
        moved, named = tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, (args, kwargs))
        shapes = func(*moved, **named)
        return tree_map(lambda one: torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one, shapes)
