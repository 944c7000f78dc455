"""Makes the int8 variant of an fp32 graph: weights in int8, activations quantized as they come.

Every product of an activation with a weight becomes

    m = max|x| over a row of x                       q_x = round(127 x / m) + 128, uint8
    scale_w = max|w| / 127 over a column of w        q_w = round(w / scale_w), int8
    y = (q_x - 128) q_w  (scale_w / 127)  m

written with standard operators, as few as there can be: each is a pass over memory. A scale a row, where ONNX Runtime's
own dynamic quantization takes one for the tensor, makes the answer for a row independent of its neighbours, bit for
bit, and loses less. q_x is unsigned because the kernel for signed activations is not a fast one: 768 x 3072 at 32 rows
takes 0.31 ms with uint8, 4.2 ms with int8 and 0.94 ms in fp32 (two AVX-512 cores with VNNI).

What an activation function gives lies mostly on one side of zero, and so do its 256 levels then: `_ONE_SIDED`. A row of
zeros divides zero by zero; whatever byte comes of that is multiplied by its m, which is 0.

Embedding tables are stored in int8 with a scale a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

MIN_WEIGHT_SIZE = 1 << 12
"""Elements of a weight below which it stays fp32: a small classifier head costs nothing and decides everything."""

_INT8_MAX = 127
_SMALLEST_SCALE = 1e-12  # for weights that are all zeros


@dataclass(frozen=True, slots=True)
class _Levels:
    """How the 256 levels of a quantized activation are spread."""

    positive: int
    """Level of the largest value of a row, counted from that of zero."""
    zero_point: int
    """Level of zero, and how many there are below it."""
    least_maximum: float | None
    """The least that a row's largest value is taken for, so that the levels below zero reach the function's minimum;
    None: the function has no minimum, and the largest magnitude counts."""


_SYMMETRIC = _Levels(positive=127, zero_point=128, least_maximum=None)
_ONE_SIDED = {
    "Relu": _Levels(positive=255, zero_point=0, least_maximum=0.0),
    "Gelu": _Levels(positive=215, zero_point=40, least_maximum=0.9375),  # 40 / 215 * 0.9375 > 0.17, its minimum
}
"""By the operator that gives the activation."""


def quantize(model: ir.Model) -> int:
    """Rewrites the matrix products and embedding look-ups of `model` in place; returns how many.

    Args:
        model: An fp32 graph, whose weights are initializers.
    """
    rewriter = _Rewriter(model.graph)
    count = sum(rewriter.rewrite(node) for node in list(model.graph))
    rewriter.remove_unused_initializers()
    return count


@dataclass(frozen=True, slots=True)
class _QuantizedWeight:
    """An int8 weight, its rows or columns scaled."""

    values: ir.Value  # int8
    scale: ir.Value  # float32, one per output column of a product, or per row of a table


@dataclass(frozen=True, slots=True)
class _QuantizedRows:
    """A quantized activation."""

    values: ir.Value  # uint8, the shape of the activation
    maximum: ir.Value  # float32, (..., 1)
    levels: _Levels


class _Rewriter:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._weights: dict[tuple[str, bool], _QuantizedWeight] = {}
        self._rows: dict[str, _QuantizedRows] = {}
        self._constants: dict[str, ir.Value] = {}

    def rewrite(self, node: ir.Node) -> bool:
        """Rewrites one node if it is a product with a weight or a look-up in a table; tells whether it was."""
        if node.op_type == "MatMul":
            return self._rewrite_product(node, transposed=False, bias=None)
        if node.op_type == "Gemm":
            plain = not node.attributes.get_int("transA", 0) and all(
                node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta")
            )
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            transposed = bool(node.attributes.get_int("transB", 0))
            return plain and self._rewrite_product(node, transposed=transposed, bias=bias)
        if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
            return self._rewrite_look_up(node)
        return False

    def remove_unused_initializers(self) -> None:
        """Drops the fp32 weights that nothing reads any more, and the nodes that read them to no end."""
        for node in reversed(list(self._graph)):
            if not any(output.uses() or output.is_graph_output() for output in node.outputs):
                self._graph.remove(node, safe=True)
        for name, value in list(self._graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]

    def _rewrite_product(self, node: ir.Node, *, transposed: bool, bias: ir.Value | None) -> bool:
        activation, weight = node.inputs[0], node.inputs[1]
        assert activation is not None, "a product has two inputs"
        assert weight is not None, "a product has two inputs"
        producer = weight.producer()
        if producer is not None and producer.op_type == "Transpose":  # a tied projection
            assert producer.inputs[0] is not None, "a transposition has an input"
            weight, transposed = producer.inputs[0], not transposed
        if _matrix(weight) is None:
            return False
        rows, quantized = self._quantize_rows(node, activation), self._quantize_weight(weight, by_row=transposed)
        right = quantized.values
        if transposed:  # folded by the runtime when it loads the graph, so that a tied table is stored once
            right = self._add(node, "Transpose", [right], {"perm": [1, 0]}, dtype=ir.DataType.INT8)
        zero_point = self._zero_point(rows.levels)
        sums = self._add(node, "MatMulInteger", [rows.values, right, zero_point], dtype=ir.DataType.INT32)
        result = self._add(node, "Cast", [sums], {"to": int(ir.DataType.FLOAT)})
        result = self._add(node, "Mul", [result, self._step(quantized.scale, rows.levels)])
        result = self._add(node, "Mul", [result, rows.maximum])
        if bias is not None:
            result = self._add(node, "Add", [result, bias])
        self._replace(node, result)
        return True

    def _rewrite_look_up(self, node: ir.Node) -> bool:
        table, indices = node.inputs
        assert table is not None, "a look-up has two inputs"
        assert indices is not None, "a look-up has two inputs"
        if _matrix(table) is None:
            return False
        quantized = self._quantize_weight(table, by_row=True)
        rows = self._add(node, "Gather", [quantized.values, indices], {"axis": 0}, dtype=ir.DataType.INT8)
        scale = self._add(node, "Gather", [quantized.scale, indices], {"axis": 0})
        scale = self._add(node, "Unsqueeze", [scale, self._constant("headway.last_axis", np.array([-1], np.int64))])
        rows = self._add(node, "Cast", [rows], {"to": int(ir.DataType.FLOAT)})
        self._replace(node, self._add(node, "Mul", [rows, scale]))
        return True

    def _quantize_rows(self, before: ir.Node, activation: ir.Value) -> _QuantizedRows:
        """Quantizes an activation, once however many products read it (query, key and value projections do)."""
        name = str(activation.name)
        if name not in self._rows:
            producer = activation.producer()
            levels = _ONE_SIDED.get(producer.op_type, _SYMMETRIC) if producer is not None else _SYMMETRIC
            maximum = self._maximum(before, activation, levels)
            step = self._constant(f"headway.step_{levels.positive}", np.float32(1 / levels.positive))
            values = self._add(before, "Div", [activation, maximum])
            values = self._add(
                before, "QuantizeLinear", [values, step, self._zero_point(levels)], dtype=ir.DataType.UINT8
            )
            self._rows[name] = _QuantizedRows(values, maximum, levels)
        return self._rows[name]

    def _maximum(self, before: ir.Node, activation: ir.Value, levels: _Levels) -> ir.Value:
        """Adds what finds the value of each row, (..., D) -> (..., 1), that gets the highest level."""
        last_axis = self._constant("headway.last_axis", np.array([-1], np.int64))
        if levels.least_maximum is None:
            activation = self._add(before, "Abs", [activation])
        maximum = self._add(before, "ReduceMax", [activation, last_axis], {"keepdims": 1})
        if levels.least_maximum:
            least = self._constant("headway.least_maximum", np.float32(levels.least_maximum))
            maximum = self._add(before, "Max", [maximum, least])
        return maximum

    def _zero_point(self, levels: _Levels) -> ir.Value:
        return self._constant(f"headway.zero_point_{levels.zero_point}", np.uint8(levels.zero_point))

    def _step(self, weight_scale: ir.Value, levels: _Levels) -> ir.Value:
        """Returns what one unit of a product's sum stands for, (N,), but for the row's maximum."""
        assert weight_scale.const_value is not None, "the scale of a weight is a constant"
        step = weight_scale.const_value.numpy() / np.float32(levels.positive)
        return self._constant(f"{weight_scale.name}_{levels.positive}", step)

    def _quantize_weight(self, weight: ir.Value, *, by_row: bool) -> _QuantizedWeight:
        """Quantizes a weight, once however it is read: a tied table by its rows, for look-ups and for products."""
        key = (str(weight.name), by_row)
        if key not in self._weights:
            matrix = _matrix(weight)
            assert matrix is not None, "the caller has looked"
            values, scale = quantize_matrix(matrix, axis=1 if by_row else 0)
            suffix = "rows" if by_row else "columns"
            self._weights[key] = _QuantizedWeight(
                self._initializer(f"{weight.name}.int8_{suffix}", values),
                self._initializer(f"{weight.name}.scale_{suffix}", scale),
            )
        return self._weights[key]

    def _constant(self, name: str, value: NDArray[np.generic] | np.generic) -> ir.Value:
        if name not in self._constants:
            self._constants[name] = self._initializer(name, np.asarray(value))
        return self._constants[name]

    def _initializer(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _add(
        self,
        before: ir.Node,
        op_type: str,
        inputs: list[ir.Value],
        attributes: dict[str, int | list[int]] | None = None,
        *,
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        """Inserts a node before `before` and returns its output."""
        node = ir.node(op_type, inputs, attributes or {})
        self._graph.insert_before(before, node)
        output = node.outputs[0]
        output.type = ir.TensorType(dtype)
        return output

    def _replace(self, node: ir.Node, result: ir.Value) -> None:
        """Puts `result` in the place of the node's output, its name included."""
        output = node.outputs[0]
        ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
        if output.name is not None:
            name, output.name = output.name, None
            result.name = name
            result.shape = output.shape
        self._graph.remove(node, safe=True)


def quantize_matrix(matrix: NDArray[np.float32], *, axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantizes a matrix symmetrically to -127 .. 127.

    Args:
        matrix: float32 (K, N).
        axis: The axis a scale is shared along: 0 for a scale a column, 1 for a scale a row.

    Returns:
        int8 (K, N), and float32 scales, (N,) or (K,): the matrix is about their product.
    """
    scale = np.maximum(np.abs(matrix).max(axis=axis) / _INT8_MAX, _SMALLEST_SCALE).astype(np.float32)
    values = np.round(matrix / np.expand_dims(scale, axis))
    return np.clip(values, -_INT8_MAX, _INT8_MAX).astype(np.int8), scale


def _matrix(value: ir.Value) -> NDArray[np.float32] | None:
    """Returns a value's constant if it is a weight worth quantizing."""
    if value.const_value is None or value.is_graph_input():
        return None
    constant = value.const_value
    if constant.dtype != ir.DataType.FLOAT or len(constant.shape) != 2 or constant.size < MIN_WEIGHT_SIZE:
        return None
    matrix: NDArray[np.float32] = constant.numpy()
    return matrix
