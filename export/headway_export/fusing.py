"""Fuses what PyTorch's tracer writes as many nodes and ONNX has one operator for.

`FuseNormalizations` root mean square normalization (Zhang and Sennrich 2019)
`FuseRotations`      rotary positions (Su et al. 2021)

A node costs some microseconds beside its arithmetic, which a decode step of one row feels: SmolLM2-135M has 1,512 nodes
without these passes and 540 with them (docs/decisions/fused-operators.md). The passes need the shapes of values as they
were traced, and leave what has another form.

B texts, T tokens, H heads, K head width, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult
from onnx_ir.tape import Tape

from headway_export.rewriting import record_constant, replace_node

OPSET: Final = 23
"""The first that has both operators."""
_TURNED: Final = (0, 2, 1, 3)
"""The permutation between (B, T, H, K) and (B, H, T, K)."""


class FuseNormalizations(InPlacePass):
    """Puts `RMSNormalization` in the place of x / sqrt(mean(x^2) + epsilon) * weight."""

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        found = [one for node in list(model.graph) if (one := _Normalization.of(node)) is not None]
        for each in found:
            tape = Tape()
            attributes = {"axis": -1, "epsilon": each.epsilon}
            replace_node(each.last, tape, [tape.op("RMSNormalization", [each.source, each.weight], attributes)])
        return _result(model, has_changed=bool(found))


class _Normalization(NamedTuple):
    """A root mean square normalization as it was traced."""

    last: ir.Node
    """The multiplication by the weight."""
    source: ir.Value
    """(..., D)"""
    weight: ir.Value
    """(D,)"""
    epsilon: float

    @classmethod
    def of(cls, node: ir.Node) -> _Normalization | None:
        """Returns the normalization that ends in a node; None if none does."""
        for scaled, weight in _factors(node):
            if weight.shape is None or len(weight.shape) != 1 or not _is_float(weight):
                continue
            for source, reciprocal in _factors(scaled.producer()):
                epsilon = _epsilon_of(reciprocal, source)
                is_whole = source.shape is not None and source.shape[-1:] == weight.shape[-1:]
                if epsilon is not None and is_whole and _is_float(source):
                    return cls(node, source, weight, epsilon)
        return None


def _epsilon_of(reciprocal: ir.Value, source: ir.Value) -> float | None:
    """Returns epsilon if a value is 1 / sqrt(mean(source^2) + epsilon) over the last axis; None if it is not."""
    total = _only_input(_only_input(reciprocal, "Reciprocal"), "Sqrt")
    added = None if total is None else total.producer()
    if added is None or added.op_type != "Add":
        return None
    for mean, other in _pairs(added):
        epsilon, reduced = _number(other), mean.producer()
        if epsilon is None or reduced is None or reduced.op_type != "ReduceMean":
            continue
        axes = _numbers(reduced.inputs[1]) if len(reduced.inputs) > 1 else None
        squared = reduced.inputs[0]
        is_last = axes == [-1] or (source.shape is not None and axes == [len(source.shape) - 1])
        is_kept = reduced.attributes.get_int("keepdims", 1) == 1
        if is_last and is_kept and squared is not None and _is_square(squared, source):
            return epsilon
    return None


def _is_square(value: ir.Value, source: ir.Value) -> bool:
    node = value.producer()
    if node is None or source not in node.inputs[:1]:
        return False
    return (node.op_type == "Pow" and _number(node.inputs[1]) == 2) or (
        node.op_type == "Mul" and node.inputs[1] is source
    )


class FuseRotations(InPlacePass):
    """Puts `RotaryEmbedding` in the place of x * cos + concat(-second half of x, first half of x) * sin.

    The operator reads the first halves of the tables of cosines and sines, which have equal halves. It takes heads side
    by side, (B, T, H K), so that the transpositions around a rotation go where they undo each other.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        found = [one for node in list(model.graph) if (one := _Rotation.of(node)) is not None]
        halves: dict[ir.Value, ir.Value] = {}
        for each in found:
            for table in (each.cosines, each.sines):
                if table not in halves:
                    tape = Tape()
                    halves[table] = _first_half(tape, table, each.width)
                    producer = table.producer()
                    assert producer is not None, "a table is computed"
                    model.graph.insert_after(producer, tape.nodes)
            _rotate(each, halves[each.cosines], halves[each.sines])
        return _result(model, has_changed=bool(found))


class _Rotation(NamedTuple):
    """A rotation as it was traced."""

    last: ir.Node
    """The addition."""
    source: ir.Value
    """(B, H, T, K), or (B, T, H, K)"""
    token_axis: int
    """Of T in it: 2 or 1."""
    cosines: ir.Value
    """(B, T, K)"""
    sines: ir.Value
    """(B, T, K)"""
    width: int
    """K"""

    @classmethod
    def of(cls, node: ir.Node) -> _Rotation | None:
        """Returns the rotation that ends in a node; None if none does."""
        if node.op_type != "Add":
            return None
        for straight, crossed in _pairs(node):
            for source, cosines in _factors(straight.producer()):
                width = _width_of(source)
                if width is None:
                    continue
                for turned, sines in _factors(crossed.producer()):
                    for axis in (2, 1):
                        first, second = (_table_of(each, source, axis) for each in (cosines, sines))
                        if first is not None and second is not None and _is_turned(turned, source, width):
                            return cls(node, source, axis, first, second, width)
        return None


def _rotate(rotation: _Rotation, cosines: ir.Value, sines: ir.Value) -> None:
    """Replaces a rotation, and the transpositions around it if all its readers undo the one before it."""
    tape, source, output = Tape(), rotation.source, rotation.last.outputs[0]
    readers = [use.node for use in output.uses()]
    by_token: ir.Value | None = source  # (B, T, H, K)
    if rotation.token_axis == 2:
        before = source.producer()
        is_undone = before is not None and _is_transposition(before) and all(map(_is_transposition, readers))
        by_token = before.inputs[0] if before is not None and is_undone else None
    num_heads = None if by_token is None or by_token.shape is None else by_token.shape[2]
    if by_token is None or not isinstance(num_heads, int):
        if rotation.token_axis == 2:
            replace_node(rotation.last, tape, [tape.op("RotaryEmbedding", [source, cosines, sines])])
        return
    flat = _before_reshape(by_token, 3)
    if flat is None:
        flat = tape.op("Reshape", [by_token, record_constant(tape, np.array([0, 0, -1]))])
    rotated = tape.op("RotaryEmbedding", [flat, cosines, sines], {"num_heads": num_heads})
    heads = tape.op("Reshape", [rotated, record_constant(tape, np.array([0, 0, num_heads, rotation.width]))])
    heads.shape, heads.type, rotated.type = by_token.shape, by_token.type, by_token.type
    graph = rotation.last.graph
    assert graph is not None, "the node is one of a graph"
    graph.insert_before(rotation.last, tape.nodes)
    for value in [reader.outputs[0] for reader in readers] if rotation.token_axis == 2 else [output]:
        for use in list(value.uses()):
            after = use.node.outputs[0]
            # A reshape of (B, T, H, K) to (B, T, H K) gives what the operator gave.
            is_flat = after.shape is not None and len(after.shape) == 3 and after.shape[2] == num_heads * rotation.width
            if is_flat and _before_reshape(after, 4) is value and not after.is_graph_output():
                after.replace_all_uses_with(rotated)
        value.replace_all_uses_with(heads)


def _first_half(tape: Tape, table: ir.Value, width: int) -> ir.Value:
    return tape.op("Slice", [table, *(record_constant(tape, np.array([bound])) for bound in (0, width // 2, -1))])


def _table_of(value: ir.Value, heads: ir.Value, token_axis: int) -> ir.Value | None:
    """Returns cosines or sines, (B, T, K), if they are those of each text and have equal halves.

    They are read with an axis of one head, before that of the tokens or behind it.
    """
    node, head_axis = value.producer(), 3 - token_axis
    if node is None or node.op_type != "Unsqueeze" or _numbers(node.inputs[1]) not in ([head_axis], [head_axis - 4]):
        return None
    table = node.inputs[0]
    if table is None or table.shape is None or heads.shape is None or len(table.shape) != 3:
        return None
    is_of_each = _is_same(table.shape[0], heads.shape[0]) and _is_same(table.shape[1], heads.shape[token_axis])
    return table if is_of_each and table.shape[2] == heads.shape[3] and _has_equal_halves(table) else None


def _has_equal_halves(value: ir.Value) -> bool:
    """True if a value is made of one that was put behind itself."""
    node = value.producer()
    while node is not None and node.op_type in ("Cos", "Sin", "Mul", "Cast"):
        if node.op_type == "Mul" and _number(node.inputs[1]) is None:
            return False
        first = node.inputs[0]
        node = None if first is None else first.producer()
    return (
        node is not None
        and node.op_type == "Concat"
        and len(node.inputs) == 2
        and node.inputs[0] is node.inputs[1]
        and node.attributes.get_int("axis") in (-1, 2)
    )


def _is_turned(value: ir.Value, source: ir.Value, width: int) -> bool:
    """True if a value is the second half of another, negated, before its first half."""
    node = value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return False
    second = _only_input(node.inputs[0], "Neg")
    return _is_part(second, source, width // 2, width) and _is_part(node.inputs[1], source, 0, width // 2)


def _is_part(value: ir.Value | None, source: ir.Value, start: int, stop: int) -> bool:
    """True if a value is a half of the last axis of another, which has four axes."""
    node = None if value is None else value.producer()
    if node is None or source not in node.inputs[:1]:
        return False
    if node.op_type == "Split" and node.attributes.get_int("axis", 0) in (3, -1) and len(node.outputs) == 2:
        sizes = _numbers(node.inputs[1]) if len(node.inputs) > 1 else None
        return node.outputs[bool(start)] is value and (sizes is None or sizes[0] == sizes[1])
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    starts, stops, axes = (_numbers(one) for one in node.inputs[1:4])
    steps = _numbers(node.inputs[4]) if len(node.inputs) > 4 else [1]
    if not starts or not stops or axes not in ([3], [-1]) or steps != [1]:
        return False
    return starts[0] == start and (stops[0] == stop or (stop == 2 * start and stops[0] > stop))


def _is_transposition(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == _TURNED


def _width_of(value: ir.Value) -> int | None:
    """Returns K of (B, H, T, K), if it is even and fixed."""
    shape = value.shape
    width = shape[3] if shape is not None and len(shape) == 4 else None
    return width if isinstance(width, int) and width % 2 == 0 and _is_float(value) else None


def _before_reshape(value: ir.Value, rank: int) -> ir.Value | None:
    """Returns what was reshaped to a value with the same first axes, if it has so many axes; None if it has not."""
    node = value.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if source is None or source.shape is None or value.shape is None or len(source.shape) != rank:
        return None
    return source if all(map(_is_same, source.shape[:2], value.shape[:2])) else None


def _is_same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    """True if two axes are known to be equal."""
    return one == other and (isinstance(one, int) or one.value is not None)


def _is_float(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT


def _factors(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields the factors of a multiplication in either order."""
    if node is not None and node.op_type == "Mul":
        yield from _pairs(node)


def _pairs(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    first, second = node.inputs
    assert first is not None, "the operator has two inputs"
    assert second is not None, "the operator has two inputs"
    yield first, second
    yield second, first


def _only_input(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """Returns the input of the operator that makes a value; None if another makes it."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type else None


def _constant_of(value: ir.Value | None) -> NDArray[np.generic] | None:
    constant = None if value is None else ir.convenience.get_const_tensor(value)
    return None if constant is None else constant.numpy()


def _number(value: ir.Value | None) -> float | None:
    """Returns a constant number; None if a value is another tensor."""
    constant = _constant_of(value)
    return float(constant.reshape(())) if constant is not None and constant.size == 1 else None


def _numbers(value: ir.Value | None) -> list[int] | None:
    constant = _constant_of(value)
    return None if constant is None else [int(number) for number in constant.ravel()]


def _result(model: ir.Model, *, has_changed: bool) -> PassResult:
    if has_changed:
        model.graph.opset_imports[""] = max(model.graph.opset_imports[""], OPSET)
    return PassResult(model, modified=has_changed)
