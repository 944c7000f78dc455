"""How much memory a run of a graph takes beside its weights, by the shapes that its values were traced with.

A value takes memory from the node that makes it to the last one that reads it, and a reshaped one is the same memory.
ONNX Runtime writes some values over their inputs, so the sum is more than what they take; its allocator grows
in steps that double, so it may hold twice the sum. XLM-RoBERTa large with 8,192 tokens: 288 MiB, measured 492.

The shapes of a graph with strided convolutions are not written down. What PyTorch would hold is counted there, by a run
on tensors without values, and three times as much is taken. With 30 seconds: Wav2Vec2 base 377 MiB, measured 668; WavLM
base 438, measured 656; Wav2Vec2-BERT 883, measured 2,375, since it writes out a vector for each pair of frames.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway_export.rewriting import axes_of

_ARENA: Final = 2
_EAGER: Final = 3
_VIEWS: Final = frozenset(("Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose output is the memory of their first input."""


def run_bytes(model: ir.Model, sizes: Mapping[str, int]) -> int | None:
    """Returns the most bytes that a run of a graph takes; None where too little is known of its values.

    Args:
        model: The graph, with the shapes that it was traced with.
        sizes: Sizes of dynamic axes by their names in these shapes; an axis of another name has the largest of them.
            Values of which the tracer does not know all axes are left out if they are no product: they make masks.
    """
    products = (node for node in model.graph.all_nodes() if node.op_type == "MatMul")
    if any(axes_of(product.outputs[0]) is None for product in products):
        return None
    return _ARENA * _most_bytes(model.graph, sizes)


def eager_run_bytes(module: nn.Module, *shape: int) -> int:
    """Returns the most bytes that a run of a module takes on one float32 input of a shape, without computing it."""
    held = _Held()
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), held:
        module(torch.empty(shape))
    return _EAGER * held.most


class _Held(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of PyTorch
    """Counts the bytes of tensors that operators have returned and that are still held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.most = 0
        self._num_bytes = 0
        self._tensors: Counter[int] = Counter()
        """Tensors by the storage that they share."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
                self._hold(tensor)
        self.most = max(self.most, self._num_bytes)
        return found

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 (what two tensors share has no other name)
        self._num_bytes += 0 if self._tensors[key] else num_bytes
        self._tensors[key] += 1
        weakref.finalize(tensor, self._give_back, key, num_bytes)

    def _give_back(self, key: int, num_bytes: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]
            self._num_bytes -= num_bytes


def _most_bytes(graph: ir.Graph, sizes: Mapping[str, int]) -> int:
    owner: dict[ir.Value, ir.Value] = {}
    reads: Counter[ir.Value] = Counter()
    nodes = list(graph)
    for node in nodes:
        for output in node.outputs:
            source = node.inputs[0] if node.op_type in _VIEWS else None
            owner[output] = output if source is None else owner.get(source, source)
        reads.update(owner.get(value, value) for value in _read(node))
    held, most = 0, 0
    for node in nodes:
        held += sum(_bytes_of(output, sizes) for output in node.outputs if owner[output] is output)
        most = max(most, held + max((_most_bytes(body, sizes) for body in _bodies(node)), default=0))
        for value in (owner.get(one, one) for one in _read(node)):
            reads[value] -= 1
            if not reads[value] and value in owner:
                held -= _bytes_of(value, sizes)
    return most


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]


def _read(node: ir.Node) -> list[ir.Value]:
    """Returns what a node reads, the graphs within it included."""
    inner = [value for body in _bodies(node) for one in body.all_nodes() for value in one.inputs]
    return [value for value in (*node.inputs, *inner) if value is not None]


def _bytes_of(value: ir.Value, sizes: Mapping[str, int]) -> int:
    axes = axes_of(value)
    if axes is None or value.dtype is None or value.is_initializer():
        return 0
    counts = (axis if isinstance(axis, int) else sizes.get(axis, max(sizes.values())) for axis in axes)
    return math.ceil(math.prod(counts) * value.dtype.itemsize)
