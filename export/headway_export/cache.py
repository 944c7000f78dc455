"""Makes the key/value cache of a decoder's graph int8: a quarter of the memory, and of what a decode step reads.

Keys and values are stored as round(x / scale), int8, with one scale a layer for keys and one for values: constants,
since what a slot holds was written at different steps. They are the largest magnitude that calibration saw, with some
room above it; what lies beyond is clipped.

`GroupQueryAttention` writes and reads such a cache by itself, and is faster with it as long as a row has one token:
1.4 ms of one core instead of 2.2, for 32 rows, 12 heads of 64 and 190 cached tokens. For a chunk of 128 tokens it is
slow: 1.6 ms instead of 0.5. So an `If` takes another way for chunks: quantize, write into the cache with
`TensorScatter`, and give the operator without quantization what was written, as numbers. Both ways attend to what the
cache holds and to nothing more exact, so that it does not matter which way a position was written.

R rows (1 in a chunk), T tokens, S cached tokens, G key/value heads, K head width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headway_export.calibration import LayerRange
from headway_export.tracing import TracedModel
from headway_server.bundles import TensorSpec

HEADROOM = 1.1
"""How far past the largest magnitude seen the codes reach."""

OPSET = 24
"""The first that has TensorScatter."""

_INT8_MAX = 127
_SMALLEST_SCALE = 1e-6  # for a layer whose values are all zero
_CONTRIB = "com.microsoft"


def quantize_cache(traced: TracedModel, ranges: Sequence[LayerRange]) -> TracedModel:
    """Rewrites the decoder's graph in place and returns the model with the new dtype of its state.

    Args:
        traced: A model whose decoder has one `GroupQueryAttention` a layer.
        ranges: What the keys and values of each layer reach.
    """
    *others, decoder = traced.graphs
    graph = decoder.model.graph
    by_past = {_pasts(node)[0].name: node for node in graph if node.op_type == "GroupQueryAttention"}
    step = _Step(graph)
    for key, found in zip(traced.state[::2], ranges, strict=True):
        _replace_attention(graph, by_past[key.past], step, found)
    graph.opset_imports[""] = OPSET
    names = {name for tensor in traced.state for name in (tensor.past, tensor.present)}
    decoder = dataclasses.replace(
        decoder, inputs=_with_int8(decoder.inputs, names), outputs=_with_int8(decoder.outputs, names)
    )
    return dataclasses.replace(traced, graphs=(*others, decoder))


def _with_int8(specs: tuple[TensorSpec, ...], names: set[str]) -> tuple[TensorSpec, ...]:
    return tuple(spec.model_copy(update={"dtype": "int8"}) if spec.name in names else spec for spec in specs)


class _Nodes:
    """Nodes in the making, whose outputs are named `prefix.0` and so on: branches name theirs for themselves."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[ir.Node] = []
        self._prefix = prefix
        self._count = itertools.count()

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        dtypes: Sequence[ir.DataType] = (ir.DataType.FLOAT,),
        domain: str = "",
    ) -> list[ir.Value]:
        """Appends a node and returns its outputs, one a dtype."""
        node = ir.node(op_type, inputs, attributes or {}, num_outputs=len(dtypes), domain=domain)
        for output, dtype in zip(node.outputs, dtypes, strict=True):
            output.name, output.type = f"{self._prefix}.{next(self._count)}", ir.TensorType(dtype)
        self.nodes.append(node)
        return list(node.outputs)


class _Step:
    """What all layers of a step share: its lengths, and constants."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        inputs = {value.name: value for value in graph.inputs}
        self.seqlens_k, self.total_length = inputs["seqlens_k"], inputs["total_sequence_length"]
        self.zero_point = self.constant("headway.cache.zero_point", np.zeros(1, np.int8))
        one = self.integers(1)
        int64 = (ir.DataType.INT64,)
        first = _Nodes("headway.cache.step")
        (length,) = first.add("Shape", [inputs["input_ids"]], {"start": 1, "end": 2}, dtypes=int64)  # (1,): T
        (longer,) = first.add("Greater", [length, one], dtypes=(ir.DataType.BOOL,))
        (self.is_chunk,) = first.add("Squeeze", [longer], dtypes=(ir.DataType.BOOL,))
        (total,) = first.add("Cast", [self.total_length], {"to": int(ir.DataType.INT64)}, dtypes=int64)
        (total,) = first.add("Reshape", [total, one], dtypes=int64)
        (self.start,) = first.add("Sub", [total, length], dtypes=int64)  # (1,): tokens before a chunk
        graph.insert_before(graph[0], first.nodes)

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """Returns an initializer, registered with its first use."""
        if name not in self._graph.initializers:
            tensor, shape = ir.tensor(array, name=name), ir.Shape(array.shape)
            self._graph.register_initializer(
                ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            )
        return self._graph.initializers[name]

    def integers(self, *values: int) -> ir.Value:
        """Returns an int64 vector."""
        return self.constant("headway.cache.integers_" + "_".join(map(str, values)), np.array(values, np.int64))


def _replace_attention(graph: ir.Graph, node: ir.Node, step: _Step, found: LayerRange) -> None:
    """Puts an `If` of both ways in the place of a layer's attention."""
    scales = [
        step.constant(f"{value.name}.scale", np.array([_scale(magnitude)], np.float32))
        for value, magnitude in zip(_pasts(node), (found.key, found.value), strict=True)
    ]
    for value in _pasts(node):
        value.type = ir.TensorType(ir.DataType.INT8)
    branch = ir.node(
        "If",
        [step.is_chunk],
        {"then_branch": _chunk_branch(node, step, scales), "else_branch": _token_branch(node, step, scales)},
        num_outputs=3,
    )
    graph.insert_before(node, branch)
    for old, new in zip(node.outputs, branch.outputs, strict=True):
        new.type = ir.TensorType(ir.DataType.INT8) if old.is_graph_output() else old.type
        new.shape = old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = None, old.name
    graph.remove(node, safe=True)


def _scale(magnitude: float) -> float:
    return max(magnitude * HEADROOM / _INT8_MAX, _SMALLEST_SCALE)


def _pasts(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Returns the past keys and values, each (R, G, cache_length, K)."""
    key, value = node.inputs[3:5]
    assert key is not None, "the exporter gives attention a cache"
    assert value is not None, "the exporter gives attention a cache"
    return key, value


def _token_branch(node: ir.Node, step: _Step, scales: list[ir.Value]) -> ir.Graph:
    """One token a row: the operator does it all."""
    nodes = _Nodes(f"{_pasts(node)[0].name}.token")
    outputs = nodes.add(
        "GroupQueryAttention",
        [*node.inputs[:5], step.seqlens_k, step.total_length, *[None] * 5, *scales],
        _attributes(node) | {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8},
        dtypes=(ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.INT8),
        domain=_CONTRIB,
    )
    return ir.Graph([], outputs, nodes=nodes.nodes, name="token")


def _chunk_branch(node: ir.Node, step: _Step, scales: list[ir.Value]) -> ir.Graph:
    """Many tokens of one row: they are written as codes, and attended to as the numbers that these stand for."""
    nodes = _Nodes(f"{_pasts(node)[0].name}.chunk")
    query, key, value = _query_key_value(node, nodes, step)
    presents, seen, seen_past = [], [], []
    for new, past, scale in zip((key, value), _pasts(node), scales, strict=True):
        quantization = [scale, step.zero_point]
        (codes,) = nodes.add("QuantizeLinear", [new, *quantization], dtypes=(ir.DataType.INT8,))  # (1, T, G K)
        presents += _write(nodes, codes, past, step)
        (written,) = nodes.add(
            "Slice", [past, step.integers(0), step.start, step.integers(2)], dtypes=(ir.DataType.INT8,)
        )
        seen += nodes.add("DequantizeLinear", [codes, *quantization])
        seen_past += nodes.add("DequantizeLinear", [written, *quantization])  # (1, G, S, K)
    context, *_ = nodes.add(
        "GroupQueryAttention",
        [query, *seen, *seen_past, step.seqlens_k, step.total_length],
        _attributes(node),
        dtypes=(ir.DataType.FLOAT,) * 3,
        domain=_CONTRIB,
    )
    return ir.Graph([], [context, *presents], nodes=nodes.nodes, name="chunk")


def _query_key_value(node: ir.Node, nodes: _Nodes, step: _Step) -> list[ir.Value]:
    """Returns query (1, T, H K), key and value (1, T, G K), sliced if attention was handed their product."""
    query, key, value = node.inputs[:3]
    assert query is not None, "attention has a query"
    if key is not None and value is not None:
        return [query, key, value]
    key_heads, width = _heads_and_width(_pasts(node)[0])
    sizes = step.integers(node.attributes.get_int("num_heads") * width, key_heads * width, key_heads * width)
    return nodes.add("Split", [query, sizes], {"axis": 2}, dtypes=(ir.DataType.FLOAT,) * 3)


def _write(nodes: _Nodes, codes: ir.Value, past: ir.Value, step: _Step) -> list[ir.Value]:
    """Writes codes, (1, T, G K), into the cache where they belong; past and present are the same memory."""
    int8 = (ir.DataType.INT8,)
    (by_head,) = nodes.add(
        "Reshape", [codes, step.integers(0, 0, *_heads_and_width(past))], dtypes=int8
    )  # (1, T, G, K)
    (by_head,) = nodes.add("Transpose", [by_head], {"perm": [0, 2, 1, 3]}, dtypes=int8)  # (1, G, T, K)
    return nodes.add("TensorScatter", [past, by_head, step.start], {"axis": 2, "mode": "linear"}, dtypes=int8)


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _heads_and_width(past: ir.Value) -> tuple[int, int]:
    """Returns G and K of a cache."""
    assert past.shape is not None, "the tracer has declared the cache"
    heads, width = past.shape[1], past.shape[3]
    assert isinstance(heads, int), "heads are a fixed axis"
    assert isinstance(width, int), "a head's width is a fixed axis"
    return heads, width
