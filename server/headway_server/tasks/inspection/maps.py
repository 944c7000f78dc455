"""Attention maps from the weights of all layers and heads.

H heads, T query tokens, S key tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Graph, TensorSpec, attention_layers
from headway_server.errors import InvalidInputError

_CROSS = "cross_attention"
_BYTES_OF_WEIGHT = 4


class Summary(StrEnum):
    """Summary of the heads of a layer."""

    EACH_HEAD = "each_head"
    """No summary: one map for each head."""
    MEAN = "mean"
    MAXIMUM = "maximum"
    ROLLOUT = "rollout"
    """One map for all layers: attention rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """Requested weights."""

    layers: tuple[int, ...] = ()
    """From 0; empty: all."""
    heads: tuple[int, ...] = ()
    """From 0; empty: all."""
    summary: Summary = Summary.EACH_HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMap:
    """Attention of each query token to each key token."""

    layer: int | None
    """None: a rollout of several layers."""
    head: int | None
    """None: a summary of several heads."""
    weights: NDArray[np.float32]
    """(T, S)"""


Maps = Mapping[str, Sequence[AttentionMap]]
"""The maps of each of `ATTENTION_KINDS` that a model has."""


class AttentionPlan:
    """A request, checked against the graph of the attention weights.

    Attributes:
        outputs: Names of the graph's outputs to compute.
    """

    def __init__(self, request: AttentionRequest, graph: Graph) -> None:
        """Checks the request.

        Raises:
            InvalidInputError: A layer or head does not exist.
        """
        self._kinds = attention_layers(graph.outputs)
        num_layers = max(map(len, self._kinds.values()))
        num_heads = max(_num_heads(spec) for specs in self._kinds.values() for spec in specs)
        self._layers = _checked("attention.layers", request.layers, num_layers)
        self._heads = _checked("attention.heads", request.heads, num_heads)
        self._summary = request.summary
        self._specs = {
            kind: {layer: specs[layer] for layer in self._layers if layer < len(specs)}
            for kind, specs in self._kinds.items()
        }
        self.outputs = tuple(spec.name for specs in self._specs.values() for spec in specs.values())

    def sizes(self, axes: Mapping[str, int]) -> list[tuple[int, int, int, int]]:
        """Returns layers, heads, rows and columns of the graph's weights, as blocks of equal size.

        Args:
            axes: Sizes of the graph's dynamic axes.
        """
        blocks: dict[tuple[int, int, int], int] = {}
        for specs in self._specs.values():
            for spec in specs.values():
                rows, columns = (axis if isinstance(axis, int) else axes[axis] for axis in spec.shape[2:])
                shape = (_num_heads(spec), rows, columns)
                blocks[shape] = blocks.get(shape, 0) + 1
        return [(count, *shape) for shape, count in blocks.items()]

    def read(self, outputs: Mapping[str, NDArray[np.float32]]) -> Maps:
        """Makes maps from the graph's outputs, (H, T, S) each."""
        return {
            kind: self._summarised(kind, {layer: self._of_heads(outputs[spec.name]) for layer, spec in specs.items()})
            for kind, specs in self._specs.items()
        }

    def _of_heads(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """Selects the requested heads of (H, T, S)."""
        heads = [head for head in self._heads if head < len(weights)]
        return weights if heads == list(range(len(weights))) else weights[heads]

    def _summarised(self, kind: str, layers: Mapping[int, NDArray[np.float32]]) -> list[AttentionMap]:
        if self._summary is Summary.EACH_HEAD:
            return [
                AttentionMap(layer=layer, head=head, weights=row)
                for layer, weights in layers.items()
                for head, row in zip(self._heads, weights, strict=False)
            ]
        if self._summary is Summary.ROLLOUT and kind != _CROSS and layers:
            means = (layers[layer].mean(axis=0) for layer in sorted(layers))
            return [AttentionMap(layer=None, head=None, weights=rollout(means))]
        summarise = np.max if self._summary is Summary.MAXIMUM else np.mean
        return [
            AttentionMap(layer=layer, head=None, weights=summarise(weights, axis=0))
            for layer, weights in layers.items()
        ]


def rollout(layers: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Attention rollout (Abnar and Zuidema 2020, section 3): contribution of input tokens to the last layer's.

    A layer's attention is averaged with the identity, for the residual connection. The results are multiplied.

    Args:
        layers: (T, T) each, averaged over heads, from the first layer to the last.

    Returns:
        (T, T), whose rows sum to 1.
    """
    result: NDArray[np.float32] | None = None
    for weights in layers:
        mixed = (0.5 * weights + 0.5 * np.eye(len(weights), dtype=np.float32)).astype(np.float32)
        result = mixed if result is None else mixed @ result
    assert result is not None, "there is at least one layer"
    return result


def num_bytes_of(sizes: Iterable[tuple[int, int, int, int]]) -> int:
    """Returns the bytes of the weights of blocks of layers, heads, rows and columns."""
    return sum(_BYTES_OF_WEIGHT * layers * heads * rows * columns for layers, heads, rows, columns in sizes)


def _num_heads(spec: TensorSpec) -> int:
    heads = spec.shape[1]
    assert isinstance(heads, int), "the manifest's validator requires it"
    return heads


def _checked(field: str, asked: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the requested indices, each once; all if there are none.

    Raises:
        InvalidInputError: An index is not from 0 to `count` - 1.
    """
    for index, number in enumerate(asked):
        if not 0 <= number < count:
            raise InvalidInputError(f"{field}[{index}]", f"is {number}; this model has 0 to {count - 1}")
    return tuple(dict.fromkeys(asked)) or tuple(range(count))
