"""Rewrites graphs, as passes of onnx-ir whose nodes are recorded on its tapes.

`Declare`            names the dynamic axes of a traced graph and drops the tracer's notes
`ChooseAttention`    lets whole texts attend by one operator where their mask is padding on the right
`ChunkAttention`     lets long texts attend in chunks of queries, whose scores take a bounded memory
`FuseAttention`      hands attention the product of query, key and value unsliced
`GatherAsked`        computes what follows the last attention for the positions alone whose logits are asked for
`ShortenCaches`      gives layers with a window a cache of that size
`KeepBlocks`         stores weights that came in 4 bits as they came
`QuantizeBlocks`     stores the weights of matrix products in 4 bits
`SeparateRows`       lets a decode step compute the experts of each row by itself
`ReplaceSoftplus`    gives softplus of a number the same bits in any place
`QuantizeExperts`    stores the weights of experts in 8 or 4 bits
`QuantizeProducts`   turns matrix products and embedding tables into int8
`QuantizeCache`      turns the key/value cache of a decoder into int8
`AddVerification`    lets a decoder read drafted tokens, bit for bit as it decodes them one by one
`RankLogits`         lets a decoder find the likeliest tokens of each row itself

Passes record a constant as a node wherever they need it; `rewrite` turns equal ones into one initializer.

R rows (1 in a chunk), T tokens of a step, L of them whose logits are asked for, S cached tokens, G key/value heads, K
head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray
from onnx_ir.passes import InPlacePass, PassResult, Sequential, common
from onnx_ir.tape import Tape

from headway_export.errors import ExportError, TraceError, reason_of
from headway_server.bundles import TensorSpec
from headway_server.bundles.chain import VERIFIES, link_name
from headway_server.bundles.manifest import (
    ATTENDS_AHEAD,
    EXPONENTIAL_MEANS,
    LIKELIEST_IDS,
    LIKELIEST_LOGITS,
    NUM_LIKELIEST,
)
from headway_server.decoding.runner.decoder import PREFILL_CHUNK

ATTENTION = "GroupQueryAttention"
"""The operator that attends to a cache. Inputs: query, key, value, past key, past value, lengths, longest length, and
optional ones. Outputs: context, present key, present value."""
_PAST_KEY, _PAST_VALUE, _LENGTHS, _LONGEST, _BIAS, _KEY_SCALE = 3, 4, 5, 6, 10, 12
_WINDOW, _IS_SHORT = "local_window_size", "sliding_window_cache"
"""Attributes of it: how many tokens a token sees, and 1 if the cache has the newest positions alone."""
EXPERTS: Final = frozenset(("MoE", "QMoE"))
"""The operators of experts. Inputs: hidden states, (N, D), scores, (N, E), and weights."""
LINEAR_ATTENTION: Final = "LinearAttention"
"""The operator of recurrences. Inputs: query, key, value, memory, decay, and optionally beta."""
MASKED_ATTENTION_DOMAIN, MASKED_ATTENTION = "headway", "MaskedAttention"
"""What stands for attention to masked keys until `ChooseAttention` has seen the mask. Inputs: query, key and value,
(B, T, .), the mask, bool (B, 1, 1, T), the length T, int32, and the context as plain operators compute it. Attributes
and output: those of `ATTENTION`, and its context."""

_INT8_MAX = 127
_SHARED_MAX = 63
"""Of weights that several products share: two products with 255 do not overflow 16 bits, on any processor
(docs/decisions/int8-without-vnni.md)."""
_MIN_WEIGHT_SIZE = 1 << 12
"""Elements of a weight below which it stays fp32: a small classifier head costs nothing and decides everything."""


def rewrite(model: ir.Model, *passes: InPlacePass) -> None:
    """Applies passes in turn, in place, and cleans up after each.

    Equal constants and equal computations become one, what is unused goes, and every name is unique.

    Raises:
        TraceError: A pass fails on the graph.
    """
    for rewriting in passes:
        with _of_this_form(type(rewriting).__name__):
            Sequential(
                rewriting,
                common.NameFixPass(),  # a new constant may have got the name of an initializer
                common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
                common.LiftSubgraphInitializersToMainGraphPass(),
                common.DeduplicateInitializersPass(),
                common.CommonSubexpressionEliminationPass(),
                common.RemoveUnusedNodesPass(),
                _NameBranches(),
                common.NameFixPass(),
            )(model)


def copy_graph(model: ir.Model) -> ir.Model:
    """Copies a graph; the copy has the same tensors.

    Raises:
        TraceError: The graph is not one that can be copied.
    """
    with _of_this_form("copy"):
        return model.clone()


@contextmanager
def _of_this_form(step: str) -> Iterator[None]:
    """Translates what a step raises on a graph that no one has seen before."""
    try:
        yield
    except (ExportError, MemoryError):
        raise
    except Exception as error:  # whatever a library of graphs raises
        first: BaseException = error
        while first.__cause__ is not None:  # the others tell whole graphs
            first = first.__cause__
        raise TraceError(
            f"its traced graph has a form that the exporter does not know ({step}: {reason_of(first)}); this model is "
            "not supported"
        ) from error


class _NameBranches(InPlacePass):
    """Gives the values within branches names that no value outside them has.

    `NameFixPass` looks at the values before a branch alone, and ONNX Runtime refuses some graphs in which one behind it
    has the same name.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Renames values in place."""
        outside = {output.name for node in model.graph for output in node.outputs}
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            for output in node.outputs if node.graph is not model.graph else ():
                if output.name in outside:
                    output.name = f"branch_{output.name}"
        return PassResult(model, modified=True)


def record_constant(tape: Tape, value: ArrayLike) -> ir.Value:
    """Records a constant on a tape."""
    return tape.op("Constant", [], {"value": ir.tensor(np.asarray(value))})


def replace_node(node: ir.Node, tape: Tape, outputs: Sequence[ir.Value]) -> None:
    """Puts the nodes of a tape in the place of a node; `outputs` take over names, types and readers of its outputs."""
    assert node.graph is not None, "the node is one of a graph"
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, node.outputs, outputs)


def _input(node: ir.Node, index: int) -> ir.Value:
    """Returns an input that the operator needs."""
    value = node.inputs[index]
    assert value is not None, f"{node.op_type} needs input {index}"
    return value


class Declare(InPlacePass):
    """Gives inputs and outputs the axes that are declared for them, and drops metadata such as stack traces.

    What the tracer found of the shapes within the graph goes too, since its names of axes are not the declared ones.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._shapes = {spec.name: spec.shape for spec in specs}

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        graph = model.graph
        common.ClearMetadataAndDocStringPass()(model)
        model.metadata_props.clear()
        model.doc_string = None
        model.producer_name, model.producer_version = "headway", None
        for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
            value.metadata_props.clear()
            if not value.is_initializer():
                value.shape = None
        for value in (*graph.inputs, *graph.outputs):
            value.shape = ir.Shape(self._shapes[str(value.name)])
        return PassResult(model, modified=True)


class ChooseAttention(InPlacePass):
    """Puts `GroupQueryAttention` in the place of a `MaskedAttention`, or what plain operators compute.

    The operator takes a length a row and no mask. That says the same of the graph's input `attention_mask`, which is
    padded on the right by contract (docs/graphs.md). A mask that the module has made may hide any key, whatever it was
    made of: then the plain operators stay.
    """

    _SAME_VALUES = frozenset(("Cast", "Identity", "Reshape", "Unsqueeze"))
    """Operators that give a mask of (B, T), if what they end in is bool (B, 1, 1, T), as it was."""

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        every = ir.traversal.RecursiveGraphIterator(model.graph)
        nodes = [node for node in every if node.op_type == MASKED_ATTENTION]
        for node in nodes:
            query, key, value, mask, length, plain = (_input(node, index) for index in range(6))
            tape = Tape()
            if (given := self._given_mask(mask)) is not None:
                counts = tape.op("ReduceSum", [given, record_constant(tape, np.array([1]))], {"keepdims": 0})  # (B,)
                lasts = tape.op("Cast", [tape.op("Sub", [counts, record_constant(tape, 1)])], {"to": ir.DataType.INT32})
                inputs = [query, key, value, None, None, lasts, length]
                plain, *_ = tape.op_multi_out(ATTENTION, inputs, node.attributes, num_outputs=3, domain="com.microsoft")
                model.graph.opset_imports["com.microsoft"] = 1
            replace_node(node, tape, [plain])
        model.graph.opset_imports.pop(MASKED_ATTENTION_DOMAIN, None)
        return PassResult(model, modified=bool(nodes))

    def _given_mask(self, mask: ir.Value) -> ir.Value | None:
        """Returns the graph's mask, (B, T), where the mask of an attention is nothing else."""
        while (producer := mask.producer()) is not None and producer.op_type in self._SAME_VALUES:
            mask = _input(producer, 0)
        return mask if mask.is_graph_input() and mask.name == "attention_mask" else None


class ChunkAttention(InPlacePass):
    """Computes the attention of long texts in chunks of queries: the scores of all would take H x T x T numbers a text.

    A loop takes the place of two matrix products and of what is between them: a scale, a mask, a bias, a softmax. A
    mask that follows from numbers of (B, T) is made a chunk at a time too. What has other operators stays.

    The pass needs the shapes of values as they were traced.
    """

    MOST_SCORES: Final = 1 << 20
    """Of a head and a chunk, over all texts of a batch; a text of 1,024 tokens is one chunk."""
    CHUNK: Final = "chunk"
    """Name of the axis of a chunk's queries."""

    _ELEMENTWISE = frozenset(("Add", "And", "Cast", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
    _ELEMENTWISE |= {"IsNaN", "Max", "Min", "Mul", "Neg", "Not", "Or", "Sub", "Tanh", "Where"}
    """Operators that compute a number from those at its place, with NumPy's broadcasting."""

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        changed = False
        for node in model.graph:
            self._find_axes(node)
        for product in [node for node in model.graph if node.op_type == "MatMul"]:
            nodes = self._nodes_of_weights(product)
            if nodes:
                tape = Tape()
                context = self._loop(tape, nodes, product)
                context.shape = product.outputs[0].shape
                replace_node(product, tape, [context])
                changed = True
        return PassResult(model, modified=changed)

    def _find_axes(self, node: ir.Node) -> None:
        """Gives an output the axes that follow from its inputs, where the tracer has noted none."""
        output, inputs = node.outputs[0], [axes_of(value) for value in node.inputs if value is not None]
        known = [axes for axes in inputs if axes is not None]
        if output.shape is not None or not inputs or len(known) < len(inputs):
            return
        found: Sequence[int | str | None] = ()
        if node.op_type == "Transpose":
            found = [known[0][axis] for axis in node.attributes.get_ints("perm", ())]
        elif node.op_type == "MatMul" and min(map(len, known)) > 1:
            found = [*_broadcast([axes[:-2] for axes in known]), known[0][-2], known[1][-1]]
        elif node.op_type in self._ELEMENTWISE or node.op_type == "Softmax":
            found = _broadcast(known)
        if found and None not in found:
            output.shape = ir.Shape(found)

    def _nodes_of_weights(self, product: ir.Node) -> list[ir.Node]:
        """Returns the nodes of the weights that a product takes, inputs first; none if it is no attention."""
        weights = _input(product, 0)
        axes = axes_of(weights)
        if axes is None or len(axes) != 4 or any(isinstance(axis, int) for axis in axes[2:]):
            return []
        found: dict[ir.Node, None] = {}
        if not self._collect(weights, axes, found):
            return []
        made = [node.op_type for node in found]
        known = [axes_of(node.outputs[0]) for node in found if node.op_type == "MatMul"]
        return [*found] if made.count("Softmax") == 1 and known == [axes] else []

    def _collect(self, value: ir.Value, scores: Sequence[Any], found: dict[ir.Node, None]) -> bool:
        """Notes the nodes that a value of all pairs of tokens is made by, inputs first; False if one is not known."""
        node, own = value.producer(), axes_of(value)
        if own is None or node is None or node in found or not self._is_of_pairs(own, scores):
            return own is not None
        if node.op_type == "Expand":  # what reads it broadcasts
            return self._collect(_input(node, 0), scores, found)
        is_softmax = node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, len(own) - 1)
        if is_softmax or node.op_type in self._ELEMENTWISE:
            if not all(self._collect(one, scores, found) for one in node.inputs if one is not None):
                return False
        elif node.op_type != "MatMul":
            return True
        found[node] = None
        return True

    @staticmethod
    def _is_of_pairs(axes: Sequence[Any], scores: Sequence[Any]) -> bool:
        """True if a value has a number for each query and key."""
        return list(axes[-2:]) == list(scores[2:])

    def _loop(self, tape: Tape, nodes: Sequence[ir.Node], product: ir.Node) -> ir.Value:
        """Records the loop of all chunks; returns the context, (B, H, T, K)."""
        [first] = [node for node in nodes if node.op_type == "MatMul"]
        query, value = _input(first, 0), _input(product, 1)
        rows, length, width = (
            tape.op("Gather", [tape.op("Shape", [of]), record_constant(tape, np.int64(axis))], {"axis": 0})
            for of, axis in ((query, 0), (query, 2), (value, 3))
        )
        one, most = record_constant(tape, np.int64(1)), record_constant(tape, np.int64(self.MOST_SCORES))
        cost = tape.op("Mul", [tape.op("Mul", [rows, length]), length])
        count = self._divided(tape, cost, most)
        size = self._divided(tape, length, count)
        places = tape.op("Range", [record_constant(tape, np.int64(0)), size, one])  # (C,)
        last = tape.op("Sub", [length, one])
        body = self._body(nodes, product, places=places, size=size, last=last, query=query, value=value)
        chunks = tape.op("Loop", [count, record_constant(tape, np.array(True))], {"body": body})  # (N, B, H, C, K)
        in_order = tape.op("Transpose", [chunks], {"perm": [1, 2, 0, 3, 4]})
        ends = [record_constant(tape, np.array([axis])) for axis in (0, 0, -1)]
        target = tape.op("Concat", [*ends, self._as_axis(tape, width)], {"axis": 0})
        whole = tape.op("Reshape", [in_order, target])  # (B, H, N C, K)
        bounds = [
            record_constant(tape, np.array([0])),
            self._as_axis(tape, length),
            record_constant(tape, np.array([2])),
        ]
        return tape.op("Slice", [whole, *bounds])

    @staticmethod
    def _divided(tape: Tape, value: ir.Value, by: ir.Value) -> ir.Value:
        """Divides integers, rounding up."""
        one = record_constant(tape, np.int64(1))
        return tape.op("Div", [tape.op("Add", [value, tape.op("Sub", [by, one])]), by])

    @staticmethod
    def _as_axis(tape: Tape, value: ir.Value) -> ir.Value:
        return tape.op("Unsqueeze", [value, record_constant(tape, np.array([0]))])

    def _body(
        self,
        nodes: Sequence[ir.Node],
        product: ir.Node,
        *,
        places: ir.Value,
        size: ir.Value,
        last: ir.Value,
        query: ir.Value,
        value: ir.Value,
    ) -> ir.Graph:
        """Returns the graph of a chunk of queries; those beyond the end are the last one again."""
        number, going_on = ir.val("number", ir.DataType.INT64, []), ir.val("going_on", ir.DataType.BOOL, [])
        tape = Tape()
        start = tape.op("Mul", [number, size])
        index = tape.op("Min", [tape.op("Add", [start, places]), last])  # (C,)
        [first] = [node for node in nodes if node.op_type == "MatMul"]
        axes = axes_of(first.outputs[0])
        assert axes is not None, "the pass has read it"
        made: dict[ir.Value, ir.Value] = {}

        def part(value: ir.Value) -> ir.Value:
            """Returns what a chunk reads of a value: the rows of its queries, or all of it."""
            if value in made:
                return made[value]
            node, own = value.producer(), axes_of(value)
            if node is not None and node.op_type == "Expand" and own is not None and self._is_of_pairs(own, axes):
                return part(_input(node, 0))
            is_of_queries = own is not None and len(own) > 1 and own[-2] == axes[2]
            if not is_of_queries:
                return value
            made[value] = tape.op("Gather", [value, index], {"axis": len(own or ()) - 2})
            return made[value]

        for node in nodes:
            if node is first:
                made[query] = tape.op("Gather", [query, index], {"axis": 2})
                inputs: list[ir.Value | None] = [made[query], _input(node, 1)]
            else:
                inputs = [None if one is None else part(one) for one in node.inputs]
            output = tape.op(node.op_type, inputs, dict(node.attributes), domain=node.domain)
            known = axes_of(node.outputs[0])
            if known is not None:
                output.shape = ir.Shape([*known[:-2], self.CHUNK, known[-1]])
            output.type = node.outputs[0].type
            made[node.outputs[0]] = output
        context = tape.op("MatMul", [made[nodes[-1].outputs[0]], value])
        context.type = product.outputs[0].type
        known = axes_of(product.outputs[0])
        context.shape = ir.Shape([*known[:-2], self.CHUNK, known[-1]]) if known is not None else None
        same = tape.op("Identity", [going_on])
        same.type = ir.TensorType(ir.DataType.BOOL)
        return ir.Graph([number, going_on], [same, context], nodes=tape.nodes, name="chunk_of_queries")


def chunk_length(length: int) -> int:
    """Returns how many queries of one text of `length` tokens attend together."""
    return math.ceil(length / max(1, math.ceil(length * length / ChunkAttention.MOST_SCORES)))


def _broadcast(shapes: Sequence[Sequence[int | str]]) -> list[int | str | None]:
    """Returns the axes that shapes broadcast to; None for one that is not known."""
    rank = max(map(len, shapes))
    one: int | str = 1
    padded = [[*[one] * (rank - len(shape)), *shape] for shape in shapes]
    sizes = [{size for size in column if size != 1} for column in zip(*padded, strict=True)]
    return [1 if not some else some.pop() if len(some) == 1 else None for some in sizes]


def axes_of(value: ir.Value) -> list[int | str] | None:
    """Returns the axes of a value as numbers and names; None where one is not known."""
    if value.shape is None:
        return None
    axes = [axis if isinstance(axis, int) else axis.value for axis in value.shape]
    return None if None in axes else [axis for axis in axes if axis is not None]


class FuseAttention(InPlacePass):
    """Removes nodes around `GroupQueryAttention` that the tracer writes and the operator does not need.

    - If query, key and value are the three slices of one product, one behind the other, attention reads the product
      unsliced.
    - A reshape to the shape that a tensor already has is removed.

    Each is a node to dispatch, and slicing is a pass over memory; at GPT-2-small size a decode step has 823 nodes with
    them. Normalisations are not fused with the additions before them: on the CPU `SkipLayerNormalization` takes 0.41 ms
    for 128 rows of 768, the normalisation and two additions 0.10.

    The pass needs the shapes of values as they were traced.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the model in place."""
        for node in model.graph:
            if node.op_type == ATTENTION:
                self._pack(node)
            elif node.op_type == "Reshape" and not (output := node.outputs[0]).is_graph_output():
                source = _before_reshapes(output)
                if _are_equal(source.shape, output.shape):
                    output.replace_all_uses_with(source)
        return PassResult(model, modified=True)

    @staticmethod
    def _pack(attention: ir.Node) -> None:
        """Hands attention the tensor whose consecutive slices are its query, key and value, where there is one."""
        slices = [_before_reshapes(_input(attention, index)) for index in range(3)]
        split = slices[0].producer()
        if split is None or split.op_type != "Split" or list(split.outputs) != slices:
            return
        parted = _input(split, 0)  # (R, T, H K + 2 G K), or (R, T, H + 2 G, K): numbers in the same order
        whole = _before_reshapes(parted)
        if parted.shape is None or split.attributes.get_int("axis", 0) not in (2, 2 - len(parted.shape)):
            return
        shapes = [one.shape for one in (whole, _input(attention, 0))]
        if all(shape is not None and len(shape) == 3 and _are_equal(shape[:2], parted.shape[:2]) for shape in shapes):
            for index, value in enumerate((whole, None, None)):
                attention.replace_input_with(index, value)


def _are_equal(one: Sequence[Any] | ir.Shape | None, other: Sequence[Any] | ir.Shape | None) -> bool:
    """True if two shapes are known to be the same; an axis of which the tracer knows nothing is no such."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(a == b and (isinstance(a, int) or a.value is not None) for a, b in zip(one, other, strict=True))


class GatherAsked(InPlacePass):
    """Gathers the positions whose logits are asked for as early as their values depend on no other position.

    The tracer gathers them after the last layer. What follows the last layer's attention, its feed-forward network
    above all, computes each position by itself, so it need not be computed for the others: a chunk of a prompt asks for
    one position at most.

    The pass needs the shapes of values as they were traced.
    """

    ROW_WISE = frozenset(("Add", "Cast", "Div", "Erf", "Gelu", "LayerNormalization", "MatMul", "Mul", "Neg", "Pow"))
    ROW_WISE |= {"Reciprocal", "ReduceMean", "Relu", "Sigmoid", "Split", "Sqrt", "Sub", "Tanh"}
    """Operators that compute a position from the same position alone, if their outputs are (R, T, .)."""

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites a decoder in place."""
        graph = model.graph
        gathers = [
            node for node in graph if node.op_type == "GatherElements" and node.attributes.get_int("axis", 0) == 1
        ]
        positions = next((value for value in graph.inputs if value.name == "logits_positions"), None)
        if positions is None or len(gathers) != 1:
            return PassResult(model, modified=False)
        (gather,) = gathers
        hidden = _input(gather, 0)
        assert hidden.shape is not None, "the tracer has found it"
        alone = self._of_one_position(graph, gather, hidden.shape[:2])
        later = [node for node in graph if node in alone]
        made = {output for node in later for output in node.outputs}
        read = dict.fromkeys(value for node in later for value in node.inputs if value is not None)
        whole = [  # what the first of them read of all positions
            value for value in read if value not in made and value.shape is not None and len(value.shape) > 2
        ]
        if any(value.shape is None or value.shape[:2] != hidden.shape[:2] for value in whole):
            return PassResult(model, modified=False)
        for value in whole:
            tape = Tape()
            index = tape.op("Unsqueeze", [positions, record_constant(tape, np.array([-1]))])  # (R, L, 1)
            asked = tape.op("GatherND", [value, index], {"batch_dims": 1})  # (R, L, .)
            readers = [node for node in later if value in node.inputs]
            graph.insert_before(readers[0], tape.nodes)  # others of `later` may stand before the value
            for node in readers:
                for place, known in enumerate(node.inputs):
                    if known is value:
                        node.replace_input_with(place, asked)
        if later:
            gather.outputs[0].replace_all_uses_with(hidden)
        return PassResult(model, modified=bool(later))

    def _of_one_position(self, graph: ir.Graph, gather: ir.Node, rows: Sequence[Any]) -> set[ir.Node]:
        """Returns the nodes before the gathering that nothing else needs and that compute each position by itself."""
        found = {gather}
        for node in reversed(graph):
            readers = [reader for output in node.outputs for reader in output.consumers()]
            is_row_wise = node.op_type in self.ROW_WISE and all(
                output.shape is not None and len(output.shape) == len(rows) + 1 and output.shape[:2] == rows
                for output in node.outputs
            )
            is_output = any(output.is_graph_output() for output in node.outputs)
            if is_row_wise and readers and not is_output and found.issuperset(readers):
                found.add(node)
        return found - {gather}


class ShortenCaches(InPlacePass):
    """Gives layers with a window a cache of that size, whose oldest positions a step drops.

    docs/decisions/window-caches.md has the figures. Such a cache has `SLACK` - 1 rows more than the window, so that
    positions are dropped that many at a time, and where chunks end as many are left as the window has, rounded up to
    whole chunks. A cache of all positions stays where it is not longer; in fp16, since the operator was tried on CPUs
    alone; and where heads are of a width that the operator does not read from int8.

    Attributes:
        windows: The windows of the caches that were shortened, by the name of the input.
    """

    SLACK: Final = PREFILL_CHUNK
    _WIDTHS: Final = 16
    """Heads are of multiples of it."""

    def __init__(self, max_length: int) -> None:
        """Takes the most tokens of a text."""
        self._max_length = max_length
        self.windows: dict[str, int] = {}

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites a decoder in place."""
        for node in (node for node in model.graph if node.op_type == ATTENTION):
            window = node.attributes.get_int(_WINDOW, 0)
            num_rows = window + self.SLACK - 1
            pasts = [_input(node, index) for index in (_PAST_KEY, _PAST_VALUE)]
            shape = pasts[0].shape
            assert shape is not None, "the tracer has declared the cache"
            is_tried = (
                pasts[0].dtype == ir.DataType.FLOAT and isinstance(shape[3], int) and shape[3] % self._WIDTHS == 0
            )
            if not window or num_rows >= self._max_length or not is_tried:
                continue
            node.attributes[_IS_SHORT] = ir.AttrInt64(_IS_SHORT, 1)
            for value in (*pasts, *node.outputs[1:3]):
                value.shape = ir.Shape([*shape[:2], num_rows, shape[3]])
            self.windows |= {str(past.name): window for past in pasts}
        return PassResult(model, modified=bool(self.windows))


def _before_reshapes(value: ir.Value) -> ir.Value:
    """Returns what a value was before it was reshaped, once or several times."""
    while (producer := value.producer()) is not None and producer.op_type == "Reshape":
        value = _input(producer, 0)
    return value


@dataclass(frozen=True, slots=True)
class _Levels:
    """How the 256 levels of a quantized activation are spread."""

    positive: int
    """Levels above zero: the largest value of a row has the highest."""
    zero_point: int
    """The level of zero, and so the number of levels below it."""
    least_maximum: float | None
    """Lower bound of a row's maximum, so that the levels below zero reach the function's minimum. None: the function
    has no minimum, and the largest magnitude of the row has the highest level."""


_SYMMETRIC = _Levels(positive=127, zero_point=128, least_maximum=None)
_ONE_SIDED = {
    "Relu": _Levels(positive=255, zero_point=0, least_maximum=0.0),
    "Gelu": _Levels(positive=215, zero_point=40, least_maximum=0.9375),  # 40 / 215 * 0.9375 > 0.17, its minimum
}
"""By the operator that gives the activation."""


@dataclass(frozen=True, slots=True)
class _WeightProduct:
    """A product of an activation, (..., K), with what may be a weight."""

    activation: ir.Value
    weight: ir.Value
    """(K, N), or (N, K) if it is `transposed`."""
    transposed: bool
    bias: ir.Value | None
    """Of the same node."""


def _weight_product(node: ir.Node) -> _WeightProduct | None:
    """Reads a node as a product; None if it is none, or has factors."""
    transposed, bias = False, None
    if node.op_type == "Gemm" and not node.attributes.get_int("transA", 0):
        if any(node.attributes.get_float(factor, 1.0) != 1.0 for factor in ("alpha", "beta")):
            return None
        transposed = bool(node.attributes.get_int("transB", 0))
        bias = node.inputs[2] if len(node.inputs) > 2 else None
    elif node.op_type != "MatMul":
        return None
    weight = _input(node, 1)
    producer = weight.producer()
    if producer is not None and producer.op_type == "Transpose":  # a tied projection
        weight, transposed = _input(producer, 0), not transposed
    return _WeightProduct(_input(node, 0), weight, transposed, bias)


def _matrix_of(weight: ir.Value) -> NDArray[np.float32] | None:
    """Returns the numbers of a weight; None if it is no fp32 matrix, or too small a one to be worth quantizing."""
    constant = weight.const_value
    if constant is None or weight.is_graph_input() or constant.dtype != ir.DataType.FLOAT:
        return None
    is_large = len(constant.shape) == 2 and constant.size >= _MIN_WEIGHT_SIZE
    return np.asarray(constant.numpy(), np.float32) if is_large else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A weight (N, K) in 4 bits, as `MatMulNBits` reads it: (code - zero) scale, one scale for J columns of a row."""

    BITS: ClassVar[int] = 4

    SIZE: ClassVar[int] = 32
    """J: with longer blocks of 4 bits, a row's bits depend on the batch (docs/decisions/int4-weights.md)."""

    codes: NDArray[np.uint8]
    """(N, K / J, J / 2), two to a byte, the first in its lower half."""
    scales: NDArray[np.float32]
    """(N, K / J)."""
    zeros: NDArray[np.uint8]
    """(N, K / J / 2 rounded up), packed alike."""
    order: NDArray[np.int64] | None = None
    """(K,): which column of the weight comes where; None: they come in order."""

    @classmethod
    def pack(
        cls,
        codes: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8],
        order: NDArray[np.int64] | None,
    ) -> Self:
        """Packs codes (N, K), a byte each, with scales and zeros (N, K / J)."""
        blocks = codes.reshape(len(codes), -1, cls.SIZE)
        zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
        packed = [(part[..., ::2] | part[..., 1::2] << 4).astype(np.uint8) for part in (blocks, zeros)]
        return cls(codes=packed[0], scales=np.ascontiguousarray(scales), zeros=packed[1], order=order)


def digest_of(weight: NDArray[np.float32]) -> bytes:
    """Returns what a weight (N, K) is known by."""
    return hashlib.sha256(np.ascontiguousarray(weight).data).digest()


class KeepBlocks(InPlacePass):
    """Stores weights that came in 4 bits as they came: `MatMulNBits` with their own codes, scales and zeros.

    A weight is known by its numbers, so that no name needs to lead from the graph back to the file. Columns whose
    groups lie apart (act-order) are brought together, and the activation is put into the same order.
    """

    def __init__(self, kept: Mapping[bytes, Callable[[], Blocks]]) -> None:
        """Takes what reads the blocks of weights, by `digest_of`."""
        self._kept = kept
        self._stored: dict[bytes, Sequence[ir.Value]] = {}

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the matrix products of a model in place."""
        modified = False
        for node in list(model.graph) if self._kept else ():
            product = _weight_product(node)
            matrix = None if product is None else _matrix_of(product.weight)
            if product is None or matrix is None:
                continue
            columns = matrix if product.transposed else matrix.T  # (N, K)
            digest = digest_of(columns)
            if (read := self._kept.get(digest)) is None:
                continue
            blocks = read()
            tape = Tape()
            activation = product.activation
            if blocks.order is not None:
                activation = tape.op("Gather", [activation, record_constant(tape, blocks.order)], {"axis": -1})
            if digest not in self._stored:
                inner = Tape(node.graph)
                self._stored[digest] = [
                    inner.initializer(ir.tensor(part, name=f"{product.weight.name}.kept_{name}"))
                    for name, part in (("codes", blocks.codes), ("scales", blocks.scales), ("zeros", blocks.zeros))
                ]
            inputs = [activation, *self._stored[digest], None, product.bias]
            attributes = {"K": columns.shape[1], "N": len(columns), "bits": Blocks.BITS, "block_size": Blocks.SIZE}
            attributes["accuracy_level"] = QuantizeBlocks.INT8_ARITHMETIC
            replace_node(node, tape, [tape.op("MatMulNBits", inputs, attributes, domain="com.microsoft")])
            model.graph.opset_imports["com.microsoft"] = 1
            modified = True
        return PassResult(model, modified)


class QuantizeBlocks(InPlacePass):
    """Stores the weights of matrix products in 4 bits: an eighth of the memory, and of what a decode step reads.

    Every product of an activation with a weight (K, N), the output projection excepted, becomes one `MatMulNBits` of
    ONNX Runtime. A block of a weight is 32 numbers of a column:

        scale = (max - min) / 15, over the block and 0      zero = round(-min / scale)
        q_w = round(w / scale) + zero, 0 .. 15

    The operator quantizes activations to int8, with a scale for 32 numbers of a row, and sums in integers within a
    block. In AVX-512 with VNNI a row has the same bits in any batch with blocks of 16 and 32, and other bits with
    longer ones (docs/decisions/int4-weights.md).

    The output projection is left to `QuantizeProducts`, which stores a table that it is tied to once.
    """

    BLOCK_SIZE = Blocks.SIZE
    BITS = Blocks.BITS
    INT8_ARITHMETIC = 4
    """An `accuracy_level` of the operator."""

    def __init__(self) -> None:
        self._weights: dict[tuple[str | None, bool], Sequence[ir.Value]] = {}

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the matrix products of a decoder, or of the graph of its attention weights, in place."""
        shapes = {value.name: value.shape for value in model.graph.outputs}
        logits = shapes.get("logits")
        modified = False
        for node in list(model.graph):
            product = _weight_product(node)
            matrix = None if product is None else _matrix_of(product.weight)
            if product is None or matrix is None:
                continue
            columns = matrix if product.transposed else matrix.T  # (N, K)
            if logits is not None and len(columns) == logits[-1]:  # the output projection
                continue
            weight = self._quantize_weight(node, product, columns)
            attributes = {"K": columns.shape[1], "N": len(columns), "bits": self.BITS, "block_size": self.BLOCK_SIZE}
            attributes["accuracy_level"] = self.INT8_ARITHMETIC
            tape = Tape()
            inputs = [product.activation, *weight, None, product.bias]
            replace_node(node, tape, [tape.op("MatMulNBits", inputs, attributes, domain="com.microsoft")])
            modified = True
        model.graph.opset_imports["com.microsoft"] = 1
        return PassResult(model, modified)

    def _quantize_weight(
        self, reader: ir.Node, product: _WeightProduct, columns: NDArray[np.float32]
    ) -> Sequence[ir.Value]:
        """Stores a weight once for all its readers; returns its codes, scales and zeros."""
        key = (product.weight.name, product.transposed)
        if key not in self._weights:
            parts: Sequence[NDArray[Any]] = quantize_blocks(columns, self.BLOCK_SIZE)
            tape = Tape(reader.graph)
            self._weights[key] = [
                tape.initializer(ir.tensor(part, name=f"{product.weight.name}.int4_{name}"))
                for name, part in zip(("codes", "scales", "zeros"), parts, strict=True)
            ]
        return self._weights[key]


class SeparateRows(InPlacePass):
    """Lets a decode step compute the experts of each row by itself, so that no row changes another's last bits.

    The operator multiplies the rows of an expert together, and sums them in another order than one alone. A step of one
    token a row therefore scans its rows. With 8 of 64 experts of OLMoE's shape in int8, 8 rows take as long so
    (docs/decisions/experts.md). A chunk has one row, whose tokens are computed together: the cuts of a prompt are the
    same in any batch.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the experts of a decoder in place."""
        graph = model.graph
        if not (nodes := nodes_of_experts(model)):
            return PassResult(model, modified=False)
        tape = Tape()
        (input_ids,) = (value for value in graph.inputs if value.name == "input_ids")
        one = record_constant(tape, np.array([1]))
        is_chunk = tape.op("Greater", [tape.op("Shape", [input_ids], {"start": 1, "end": 2}), one])  # (1,)
        graph.insert_before(graph[0], tape.nodes)
        for node in nodes:
            tape = Tape()
            rows, rest = [_input(node, index) for index in range(2)], node.inputs[2:]
            count = tape.op("Shape", [rows[0]], {"start": 0, "end": 1})
            size = tape.op("Where", [is_chunk, count, one])  # of a part
            parted = []
            for value in rows:
                width = tape.op("Shape", [value], {"start": 1, "end": 2})
                shape = tape.op("Concat", [record_constant(tape, np.array([-1])), size, width], {"axis": 0})
                parted.append(tape.op("Reshape", [value, shape]))
            mixed = tape.op("Scan", parted, {"body": _experts_of_part(node, rest), "num_scan_inputs": 2})
            whole = tape.op("Reshape", [mixed, tape.op("Shape", [rows[0]])])
            replace_node(node, tape, [whole])
        return PassResult(model, modified=True)


class ReplaceSoftplus(InPlacePass):
    """Computes softplus by operators whose last bits do not depend on the place of a number, and so on no other row.

        softplus(x) = max(x, 0) + log(1 + e) = max(x, 0) + 2 artanh(e / (2 + e))      with e = exp(-|x|)

    ONNX Runtime's operator takes the logarithms of 16 numbers together, and of a remainder one by one. 24 numbers a row
    are a multiple of 16 for two rows, and none for one. The result is as near, and takes up to 1.8 times as long.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites a decoder in place."""
        nodes = [node for node in model.graph.all_nodes() if node.op_type == "Softplus"]
        for node in nodes:
            tape = Tape()
            value, two = _input(node, 0), record_constant(tape, np.float32(2.0))
            small = tape.op("Exp", [tape.op("Neg", [tape.op("Abs", [value])])])
            half = tape.op("Atanh", [tape.op("Div", [small, tape.op("Add", [small, two])])])
            replace_node(node, tape, [tape.op("Add", [tape.op("Relu", [value]), tape.op("Mul", [half, two])])])
        return PassResult(model, modified=bool(nodes))


def nodes_of_experts(model: ir.Model) -> list[ir.Node]:
    """Returns the operators of experts in a model."""
    return [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.op_type in EXPERTS]


def _experts_of_part(node: ir.Node, weights: Sequence[ir.Value | None]) -> ir.Graph:
    """Returns a graph that computes the experts of some rows."""
    inputs = [ir.val(f"part_{name}", ir.DataType.FLOAT) for name in ("hidden", "scores")]
    tape = Tape()
    output = tape.op(node.op_type, [*inputs, *weights], dict(node.attributes), domain=node.domain)
    output.type = ir.TensorType(ir.DataType.FLOAT)
    return ir.Graph(inputs, [output], nodes=tape.nodes, name="experts")


class QuantizeExperts(InPlacePass):
    """Stores the weights of experts in 8 or 4 bits: `com.microsoft::MoE` becomes `QMoE`.

    Blocks of 32 weights along the axis that is summed have a scale each, and the middle code is zero. Where a width is
    no multiple of 32, a row has one scale.
    """

    BLOCK_SIZE = 32

    def __init__(self, bits: Literal[4, 8]) -> None:
        """Takes the bits of a weight."""
        self._bits: Literal[4, 8] = bits

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the experts of the model in place."""
        nodes = [node for node in nodes_of_experts(model) if node.op_type == "MoE"]
        for node in nodes:
            hidden, scores, up, up_bias, down, down_bias = (*node.inputs, None, None)[:6]
            matrices = [_experts_of(up), _experts_of(down)]
            has_blocks = all(matrix.shape[-1] % self.BLOCK_SIZE == 0 for matrix in matrices)
            tape, stored = Tape(), list[ir.Value]()
            for matrix in matrices:
                size = self.BLOCK_SIZE if has_blocks else matrix.shape[-1]
                codes, scales = quantize_experts(matrix, bits=self._bits, block_size=size)
                stored += [
                    record_constant(tape, codes),
                    record_constant(tape, scales if has_blocks else scales[..., 0]),
                ]
            attributes: dict[str, Any] = {**node.attributes, "expert_weight_bits": self._bits}
            if has_blocks:
                attributes["block_size"] = self.BLOCK_SIZE
            inputs = [hidden, scores, stored[0], stored[1], up_bias, stored[2], stored[3], down_bias]
            while inputs[-1] is None:
                inputs.pop()
            replace_node(node, tape, [tape.op("QMoE", inputs, attributes, domain=node.domain)])
        return PassResult(model, modified=bool(nodes))


def _experts_of(weight: ir.Value | None) -> NDArray[np.float32]:
    assert weight is not None, "an operator of experts has weights"
    assert weight.const_value is not None, "weights of experts are constants"
    return np.asarray(weight.const_value.numpy(), np.float32)


class QuantizeProducts(InPlacePass):
    """Makes an fp32 graph int8: weights are stored in int8, activations are quantized as they come.

    Every product of an activation with a weight becomes

        m = max|x| over a row of x                       q_x = round(127 x / m) + 128, uint8
        scale_w = max|w| / 127 over a column of w        q_w = round(w / scale_w), int8
        y = (q_x - 128) q_w  (scale_w / 127)  m

    written with standard operators, as few as there can be: each is a pass over memory. ONNX Runtime's own dynamic
    quantization takes one scale for the whole tensor. With a scale a row, the answer for a row does not depend on its
    neighbours, bit for bit, and loses less. q_x is unsigned because the kernel for signed activations is slow: 768 x
    3072 at 32 rows takes 0.31 ms with uint8, 4.2 ms with int8 and 0.94 ms in fp32 (two AVX-512 cores with VNNI).

    The output of an activation function lies mostly on one side of zero, and so do its 256 levels (`_ONE_SIDED`). A row
    of zeros divides zero by zero; the byte that results is multiplied by m, which is 0.

    Embedding tables are stored in int8 with a scale a row. A table that is tied to the output projection is stored
    once.

    An activation whose value range is given has one scale for all rows, which is known when the graph is made. Of the
    nine passes over memory two are left:

        q_x = round(positive x / c) + zero, clipped to 0 .. 255       QuantizeLinear
        y = (q_x - zero) q_w  (scale_w / positive)  c + bias          MatMulIntegerToFloat, which ONNX Runtime alone has

    c is the end of the range. A row cannot depend on its neighbours. A row that reaches less than c has fewer levels,
    and what lies beyond c is clipped, so that answers are others than with a scale a row. Clipping at level 0 is what
    ReLU does, which goes where only products read it.
    """

    def __init__(self, *, many_rows: bool = False, ranges: Mapping[str, float] = MappingProxyType({})) -> None:
        """Takes what is known of a graph.

        Args:
            many_rows: Its runs have hundreds of rows, always. There `MatMulIntegerToFloat` casts and scales the sums,
                to the same bits and without two passes over them; for few rows it is as slow
                (docs/decisions/int8-products.md).
            ranges: The largest magnitude of activations by name. Other activations have a scale a row.
        """
        self._many_rows = many_rows
        self._ranges = ranges
        self._weights: dict[tuple[str | None, bool], tuple[ir.Value, NDArray[np.float32]]] = {}
        self._num_products: Counter[tuple[str | None, bool]] = Counter()

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the matrix products and embedding look-ups of the model in place."""
        modified = False
        products = map(_weight_product, model.graph)
        self._num_products = Counter((one.weight.name, one.transposed) for one in products if one is not None)
        for node in list(model.graph):
            tape = Tape()
            if (rewritten := self._rewritten(node, tape)) is not None:
                replaced, output = rewritten
                replace_node(replaced, tape, [output])
                modified = True
        if self._many_rows or self._ranges:
            model.graph.opset_imports["com.microsoft"] = 1
        return PassResult(model, modified)

    def _rewritten(self, node: ir.Node, tape: Tape) -> tuple[ir.Node, ir.Value] | None:
        """Records what stands for a product with a weight or a look-up in a table; None for any other node.

        Returns:
            The last of the nodes that go, and the value in place of its output.
        """
        if (product := _weight_product(node)) is not None:
            return self._product(node, product, tape)
        if node.op_type == "Gather" and not node.attributes.get_int("axis", 0):
            return self._look_up(node, tape)
        return None

    def _product(self, node: ir.Node, product: _WeightProduct, tape: Tape) -> tuple[ir.Node, ir.Value] | None:
        if (quantized := self._quantize_weight(node, product.weight, by_row=product.transposed)) is None:
            return None
        right, scale = quantized
        if product.transposed:  # folded by ONNX Runtime when it loads the graph, so that a tied table is stored once
            right = tape.op("Transpose", [right], {"perm": [1, 0]})
        levels = _levels_of(product.activation)
        zero_point = record_constant(tape, np.uint8(levels.zero_point))
        factors = record_constant(tape, scale / np.float32(levels.positive))
        if largest := self._ranges.get(str(product.activation.name)):  # 0 scales nothing
            last, bias = (node, product.bias) if product.bias is not None else _with_bias(node)
            rows = _quantize_by_range(tape, product.activation, np.float32(largest), levels)
            right_side = [right, record_constant(tape, np.float32(largest)), factors, zero_point, None, bias]
            return last, tape.op("MatMulIntegerToFloat", [rows, *right_side], domain="com.microsoft")
        rows, maximum = _quantize_rows(tape, product.activation, levels)
        if self._many_rows:
            scales = [record_constant(tape, np.float32(1)), factors]
            result = tape.op("MatMulIntegerToFloat", [rows, right, *scales, zero_point], domain="com.microsoft")
        else:
            sums = tape.op("MatMulInteger", [rows, right, zero_point])
            result = tape.op("Mul", [tape.op("Cast", [sums], {"to": ir.DataType.FLOAT}), factors])
        result = tape.op("Mul", [result, maximum])
        return node, result if product.bias is None else tape.op("Add", [result, product.bias])

    def _look_up(self, node: ir.Node, tape: Tape) -> tuple[ir.Node, ir.Value] | None:
        table, indices = _input(node, 0), _input(node, 1)
        if (quantized := self._quantize_weight(node, table, by_row=True)) is None:
            return None
        rows = tape.op("Gather", [quantized[0], indices], {"axis": 0})
        scales = tape.op("Gather", [record_constant(tape, quantized[1]), indices], {"axis": 0})
        scales = tape.op("Unsqueeze", [scales, record_constant(tape, np.array([-1]))])
        return node, tape.op("Mul", [tape.op("Cast", [rows], {"to": ir.DataType.FLOAT}), scales])

    def _quantize_weight(
        self, reader: ir.Node, weight: ir.Value, *, by_row: bool
    ) -> tuple[ir.Value, NDArray[np.float32]] | None:
        """Stores a weight in int8, once for all its readers; None if it is no weight, or too small a one.

        Returns:
            The int8 weight, and the scales of its rows or columns.
        """
        key = (weight.name, by_row)
        if key not in self._weights:
            if (matrix := _matrix_of(weight)) is None:
                return None
            most = {"most": _SHARED_MAX} if self._num_products[key] > 1 else {}
            values, scale = quantize_matrix(matrix, axis=1 if by_row else 0, **most)
            name = f"{weight.name}.int8_{'rows' if by_row else 'columns'}"
            self._weights[key] = Tape(reader.graph).initializer(ir.tensor(values, name=name)), scale
        return self._weights[key]


class StoreFilters(InPlacePass):
    """Stores filters of convolutions in int8, with a scale for each channel of the output.

    ONNX Runtime multiplies them out when it loads the graph, so a run computes in fp32, in the same time.
    """

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the filters of the model in place."""
        stored: dict[str | None, ir.Value] = {}
        for node in list(model.graph):
            if node.op_type not in _CHANNEL_AXES:
                continue
            filters = _input(node, 1)
            constant = filters.const_value
            if constant is None or filters.is_graph_input() or constant.dtype != ir.DataType.FLOAT:
                continue
            if constant.size < _MIN_WEIGHT_SIZE:
                continue
            if filters.name not in stored:
                tape = Tape()
                stored[filters.name] = self._stored(node, np.asarray(constant.numpy(), np.float32), tape)
                model.graph.insert_before(node, tape.nodes)
            node.replace_input_with(1, stored[filters.name])
        return PassResult(model, bool(stored))

    @staticmethod
    def _stored(node: ir.Node, filters: NDArray[np.float32], tape: Tape) -> ir.Value:
        """Records what gives the filters of a convolution back, float32 (C, D, ...) or (D, C, ...), C of the output."""
        channels = _CHANNEL_AXES[node.op_type]
        rows = np.moveaxis(filters, channels, 0)
        values, scale = quantize_matrix(rows.reshape(len(rows), -1), axis=1)
        codes = np.ascontiguousarray(np.moveaxis(values.reshape(rows.shape), 0, channels))
        weight = Tape(node.graph).initializer(ir.tensor(codes, name=f"{_input(node, 1).name}.int8_filters"))
        scales = scale.reshape([-1 if axis == channels else 1 for axis in range(filters.ndim)])
        return tape.op("Mul", [tape.op("Cast", [weight], {"to": ir.DataType.FLOAT}), record_constant(tape, scales)])


def quantize_experts(
    experts: NDArray[np.float32], *, bits: Literal[4, 8], block_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantizes matrices symmetrically, a scale for each block of a row.

    Args:
        experts: (E, N, K), a matrix of each expert.
        bits: Of a code, whose middle is zero.
        block_size: Weights with one scale, a divisor of K.

    Returns:
        Codes (E, N, K), or two of 4 bits in a byte, (E, N, K / 2), the first in its lower half; scales (E, N, blocks).
    """
    num_experts, num_rows, width = experts.shape
    middle = 1 << (bits - 1)
    codes = np.empty((num_experts, num_rows, width * bits // 8), np.uint8)
    scales = np.empty((num_experts, num_rows, width // block_size), np.float32)
    for index, matrix in enumerate(experts):  # so that hardly any memory is needed beside the result
        blocks = matrix.reshape(num_rows, -1, block_size)
        scales[index] = np.maximum(np.abs(blocks).max(axis=-1) / (middle - 1), _LEAST_SCALE)
        code = np.round(blocks / scales[index][..., np.newaxis]) + middle
        code = np.clip(code, 0, 2 * middle - 1).astype(np.uint8).reshape(num_rows, width)
        codes[index] = code if bits == 8 else code[:, ::2] | code[:, 1::2] << 4
    return codes, scales


_MAXIMUM_OF = "headway.maximum_of"
"""Note of a node that gives the largest value of each row: the name of the activation. Copies of a graph keep it."""


def row_maxima_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Returns what the highest level stands for in each row, (..., 1), by the names of activations.

    Args:
        graph: As `QuantizeProducts` left it.
    """
    return {node.meta[_MAXIMUM_OF]: node.outputs[0] for node in graph if _MAXIMUM_OF in node.meta}


def _levels_of(activation: ir.Value) -> _Levels:
    producer = activation.producer()
    return _SYMMETRIC if producer is None else _ONE_SIDED.get(producer.op_type, _SYMMETRIC)


def _quantize_rows(tape: Tape, activation: ir.Value, levels: _Levels) -> tuple[ir.Value, ir.Value]:
    """Quantizes an activation (..., D): uint8 (..., D), and the value of the highest level (..., 1)."""
    bounded = tape.op("Abs", [activation]) if levels.least_maximum is None else activation
    maximum = tape.op("ReduceMax", [bounded, record_constant(tape, np.array([-1]))], {"keepdims": 1})
    if levels.least_maximum:
        maximum = tape.op("Max", [maximum, record_constant(tape, np.float32(levels.least_maximum))])
    tape.nodes[-1].meta[_MAXIMUM_OF] = str(activation.name)
    relative = tape.op("Div", [activation, maximum])
    step, zero_point = np.float32(1 / levels.positive), np.uint8(levels.zero_point)
    return tape.op(
        "QuantizeLinear", [relative, record_constant(tape, step), record_constant(tape, zero_point)]
    ), maximum


def _quantize_by_range(tape: Tape, activation: ir.Value, largest: np.float32, levels: _Levels) -> ir.Value:
    """Quantizes an activation (..., D) with one scale: uint8 (..., D)."""
    producer = activation.producer()
    source = _input(producer, 0) if producer is not None and producer.op_type == "Relu" else activation
    scale = record_constant(tape, largest * np.float32(1 / levels.positive))
    return tape.op("QuantizeLinear", [source, scale, record_constant(tape, np.uint8(levels.zero_point))])


def _with_bias(product: ir.Node) -> tuple[ir.Node, ir.Value | None]:
    """Returns the addition of a bias, (N,), that alone reads a product, and the bias; else the product and None."""
    output, readers = product.outputs[0], product.outputs[0].consumers()
    if len(readers) == 1 and readers[0].op_type == "Add" and not output.is_graph_output():
        other = next(value for value in readers[0].inputs if value is not output)
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1:
            return readers[0], other
    return product, None


_CHANNEL_AXES: Final = {"Conv": 0, "ConvTranspose": 1}
"""The axis of a convolution's filters that has the channels of its output, by operator."""
_LEAST_SCALE = np.float32(1e-12)
"""For weights that are all zeros."""
_ROWS_AT_A_TIME = 256
"""Of a weight that are quantized together, so that hardly any memory is needed beside the result."""


def quantize_matrix(
    matrix: NDArray[np.float32], *, axis: int, most: int = _INT8_MAX
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantizes a matrix symmetrically to -127 .. 127.

    Args:
        matrix: float32 (K, N).
        axis: The axis a scale is shared along: 0 for a scale a column, 1 for a scale a row.
        most: The largest code, 127 or less.

    Returns:
        int8 (K, N), and float32 scales, (N,) or (K,): the matrix is about their product.
    """
    largest = np.maximum(matrix.max(axis=axis), -matrix.min(axis=axis))
    scale = np.maximum(largest / most, _LEAST_SCALE).astype(np.float32)
    values = np.empty(matrix.shape, np.int8)
    for start in range(0, len(matrix), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        steps = scale[rows, np.newaxis] if axis else scale
        values[rows] = np.clip(np.round(matrix[rows] / steps), -most, most)
    return values, scale


def quantize_blocks(
    matrix: NDArray[np.float32], block_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantizes a matrix to 0 .. 15, with a scale and a zero for each block of a row, as `MatMulNBits` reads it.

    Args:
        matrix: float32 (N, K).
        block_size: Numbers of a block, J; a row is filled up with zeros to M whole ones.

    Returns:
        Codes, uint8 (N, M, J / 2), two to a byte, the first in its lower half; scales, float32 (N, M); and zeros,
        uint8 (N, M / 2 rounded up), packed alike. (code - zero) * scale is about the matrix.
    """
    num_rows, length = matrix.shape
    num_blocks = -(-length // block_size)
    codes = np.empty((num_rows, num_blocks, block_size // 2), np.uint8)
    scales = np.empty((num_rows, num_blocks), np.float32)
    zeros = np.zeros((num_rows, num_blocks + num_blocks % 2), np.uint8)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, num_rows))
        filled = np.zeros((rows.stop - start, num_blocks * block_size), np.float32)
        filled[:, :length] = matrix[rows]
        blocks = filled.reshape(-1, num_blocks, block_size)
        least, most = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
        scale = np.maximum((most - least) / 15, _LEAST_SCALE)
        zero = np.round(-least / scale)
        code = np.clip(np.round(blocks / scale[..., np.newaxis]) + zero[..., np.newaxis], 0, 15).astype(np.uint8)
        codes[rows], scales[rows], zeros[rows, :num_blocks] = code[..., ::2] | code[..., 1::2] << 4, scale, zero
    return codes, scales, zeros[:, ::2] | zeros[:, 1::2] << 4


@dataclass(slots=True)
class LayerRange:
    """The largest magnitudes of what a layer writes into its cache: of each number of a head, (G, K), or of all."""

    key: NDArray[np.float32] | float = 0.0
    value: NDArray[np.float32] | float = 0.0


_LEAST_SHARE = 1e-3
"""Of a number, in the largest of its layer: what was near 0 in the texts that were read may be larger in others."""


class QuantizeCache(InPlacePass):
    """Makes the key/value cache of a decoder int8: a quarter of the memory, and of what a decode step reads.

    Keys and values are stored as round(x / scale), int8, with a scale for each number of a layer's keys and values:
    constants, since what a slot holds was written at different steps. A scale reaches the largest magnitude of
    `LayerRange`, with some room above it; what lies beyond is clipped. Attention itself computes with keys and values
    that are divided by their scales, queries that are multiplied by those of the keys, and multiplies its result by
    those of the values (docs/decisions/cache-scales.md).

    `GroupQueryAttention` writes and reads such a cache by itself, and is faster with it as long as a row has one token:
    1.4 ms of one core instead of 2.2, for 32 rows, 12 heads of 64 and 190 cached tokens. For a chunk of 128 tokens it
    is slow: 1.6 ms instead of 0.5. So an `If` takes another way for chunks: quantize, write into the cache with
    `TensorScatter`, and give the operator without quantization what was written, as numbers. Both ways attend to what
    the cache holds and to nothing more exact, so that it does not matter which way a position was written.

    The chunk's way of a cache of a window is to give the operator without quantization the positions that the cache
    holds, as if the text began with them, and to write those into it that the operator would have left there.
    """

    OPSET = 24
    """The first that has TensorScatter."""
    HEADROOM = 1.1
    """How far past the largest magnitude seen the codes reach."""

    def __init__(self, ranges: Sequence[LayerRange]) -> None:
        """Takes what the keys and values of each layer reach, in the order of the layers."""
        self._ranges = ranges

    def call(self, model: ir.Model) -> PassResult:
        """Rewrites the decoder in place; its state becomes int8."""
        graph = model.graph
        order = {value: place for place, value in enumerate(graph.inputs)}  # the caches are inputs, layer by layer
        layers = [node for node in graph if node.op_type == ATTENTION]
        layers.sort(key=lambda node: order[_input(node, _PAST_KEY)])
        tape = Tape()
        (input_ids,) = (value for value in graph.inputs if value.name == "input_ids")
        one = record_constant(tape, np.array([1]))
        length = tape.op("Shape", [input_ids], {"start": 1, "end": 2})  # (1,): T
        is_chunk = tape.op("Squeeze", [tape.op("Greater", [length, one])])
        total = tape.op("Cast", [_input(layers[0], _LONGEST)], {"to": ir.DataType.INT64})
        start = tape.op("Sub", [tape.op("Reshape", [total, one]), length])  # (1,): tokens before a chunk
        graph.insert_before(graph[0], tape.nodes)
        for node, found in zip(layers, self._ranges, strict=True):
            context_scales = self._divide(node, found)
            for value in (*node.inputs[_PAST_KEY : _PAST_VALUE + 1], *node.outputs[1:]):
                assert value is not None, "the tracer gives attention a cache"
                value.type = ir.TensorType(ir.DataType.INT8)
            branches = {"then_branch": self._chunk(node, start), "else_branch": self._token(node)}
            tape = Tape()
            context, *presents = tape.op_multi_out("If", [is_chunk], branches, num_outputs=3)
            replace_node(node, tape, [tape.op("Mul", [context, record_constant(tape, context_scales)]), *presents])
        graph.opset_imports[""] = self.OPSET
        return PassResult(model, modified=True)

    @classmethod
    def _divide(cls, node: ir.Node, found: LayerRange) -> NDArray[np.float32]:
        """Divides the keys and values of a layer by their scales, and multiplies its queries by those of the keys.

        Returns:
            What its result is multiplied by, (H K,).
        """
        assert node.graph is not None, "the node is one of a graph"
        key_scales, value_scales = (cls._scales(node, magnitudes) for magnitudes in (found.key, found.value))
        num_readers = node.attributes.get_int("num_heads") // len(key_scales)  # heads that read one of the cache
        for_query: NDArray[np.float32] = np.repeat(key_scales, num_readers, axis=0).ravel()
        for_context: NDArray[np.float32] = np.repeat(value_scales, num_readers, axis=0).ravel()
        factors = [for_query, np.reciprocal(key_scales.ravel()), np.reciprocal(value_scales.ravel())]
        if node.inputs[1] is None:  # their product is not sliced
            factors = [np.concatenate(factors)]
        tape = Tape()
        for index, factor in enumerate(factors):
            scaled = tape.op("Mul", [_input(node, index), record_constant(tape, factor)])
            node.replace_input_with(index, scaled)
        node.graph.insert_before(node, tape.nodes)
        return for_context

    @classmethod
    def _scales(cls, node: ir.Node, magnitudes: NDArray[np.float32] | float) -> NDArray[np.float32]:
        """Returns the scale of each number that a layer writes, (G, K)."""
        shape = _input(node, _PAST_KEY).shape
        assert shape is not None, "the tracer has declared the cache"
        heads, width = shape[1], shape[3]
        assert isinstance(heads, int), "a cache has a fixed number of heads"
        assert isinstance(width, int), "a head's width is a fixed axis"
        scales: NDArray[np.float32] = np.asarray(magnitudes, np.float32) * np.float32(cls.HEADROOM / _INT8_MAX)
        least = np.float32(max(float(np.max(scales)) * _LEAST_SHARE, 1e-6))
        return np.broadcast_to(np.maximum(scales, least), (heads, width))

    @staticmethod
    def _token(node: ir.Node) -> ir.Graph:
        """One token a row: the operator does it all."""
        tape = Tape()
        scales = [record_constant(tape, np.ones(1, np.float32))] * 2
        inputs = [*node.inputs, *[None] * (_KEY_SCALE - len(node.inputs)), *scales]
        quantization = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        attributes: dict[str, Any] = {**node.attributes, **quantization}
        outputs = tape.op_multi_out(ATTENTION, inputs, attributes, num_outputs=3, domain=node.domain)
        return ir.Graph([], outputs, nodes=tape.nodes, name="token")

    @staticmethod
    def _chunk(node: ir.Node, start: ir.Value) -> ir.Graph:
        """Many tokens of one row: they are written as codes, and attended to as the numbers that these stand for."""
        tape = Tape()
        query, key, value = _query_key_value(node, tape)
        heads = node.attributes.get_int("kv_num_heads")
        positions = _CachedPositions.of(node, tape, start)
        presents, new, past = [], [], []
        caches = [_input(node, index) for index in (_PAST_KEY, _PAST_VALUE)]
        quantization = [record_constant(tape, np.ones(1, np.float32)), record_constant(tape, np.zeros(1, np.int8))]
        for tensor, cache in zip((key, value), caches, strict=True):
            codes = tape.op("QuantizeLinear", [tensor, *quantization])  # (1, T, G K)
            by_head = tape.op("Reshape", [codes, record_constant(tape, np.array([0, 0, heads, -1]))])  # (1, T, G, K)
            by_head = tape.op("Transpose", [by_head], {"perm": [0, 2, 1, 3]})  # (1, G, T, K)
            written = _slice(tape, cache, 2, stop=positions.num_held)
            # Past and present are the same memory.
            to_write, place = positions.to_write(tape, written, by_head)
            presents.append(tape.op("TensorScatter", [cache, to_write, place], {"axis": 2, "mode": "linear"}))
            new.append(tape.op("DequantizeLinear", [codes, *quantization]))
            past.append(tape.op("DequantizeLinear", [written, *quantization]))  # (1, G, S, K)
        attributes = {name: value for name, value in node.attributes.items() if name != _IS_SHORT}
        inputs = [query, *new, *past, *positions.lengths_and_rest(tape, node)]
        context, *_ = tape.op_multi_out(ATTENTION, inputs, attributes, num_outputs=3, domain=node.domain)
        return ir.Graph([], [context, *presents], nodes=tape.nodes, name="chunk")


@dataclass(frozen=True, slots=True)
class _CachedPositions:
    """Which positions the cache of one row holds before a chunk and after it; each (1,) int64."""

    num_held: ir.Value
    """Positions that it holds before."""
    first: ir.Value | None
    """The first of them; None for a cache of all positions."""
    num_dropped: ir.Value | None
    """Of those and the chunk's, how many are held no more after it."""

    @classmethod
    def of(cls, node: ir.Node, tape: Tape, start: ir.Value) -> Self:
        """Computes them in a branch for a layer's attention, of the tokens before the chunk, (1,)."""
        if not node.attributes.get_int(_IS_SHORT, 0):
            return cls(start, None, None)
        shape = _input(node, _PAST_KEY).shape
        assert shape is not None, "the tracer has declared the cache"
        num_rows = shape[2]
        assert isinstance(num_rows, int), "`ShortenCaches` has fixed it"
        step = num_rows - node.attributes.get_int(_WINDOW) + 1
        total = _as_length(tape, _input(node, _LONGEST))

        def first(length: ir.Value) -> ir.Value:
            """The position of row 0 after `length` tokens, as `Window.first` of the server has it."""
            over = tape.op("Add", [length, record_constant(tape, np.array([step - 1 - num_rows]))])
            times = tape.op(
                "Max",
                [tape.op("Div", [over, record_constant(tape, np.array([step]))]), record_constant(tape, np.array([0]))],
            )
            return tape.op("Mul", [times, record_constant(tape, np.array([step]))])

        before = first(start)
        return cls(tape.op("Sub", [start, before]), before, tape.op("Sub", [first(total), before]))

    def to_write(self, tape: Tape, written: ir.Value, new: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns what is written into the cache, (1, G, ., K), of what it holds and what is new, and the first row."""
        if self.num_dropped is None:
            return new, self.num_held
        held = tape.op("Concat", [written, new], {"axis": 2})
        return _slice(tape, held, 2, start=self.num_dropped), record_constant(tape, np.array([0]))

    def lengths_and_rest(self, tape: Tape, node: ir.Node) -> Sequence[ir.Value | None]:
        """Returns the inputs of attention after the cache, for a text that begins with the first held position."""
        if self.first is None:
            return node.inputs[_LENGTHS:]
        dropped = tape.op("Cast", [self.first], {"to": ir.DataType.INT32})
        lengths = tape.op("Sub", [_input(node, _LENGTHS), dropped])
        longest = tape.op("Sub", [_input(node, _LONGEST), tape.op("Squeeze", [dropped])])
        rest = list(node.inputs[_LONGEST + 1 :])
        place = _BIAS - _LONGEST - 1
        if len(rest) > place and (bias := rest[place]) is not None:
            rest[place] = _slice(tape, bias, 3, start=self.first)
        return [lengths, longest, *rest]


def _slice(
    tape: Tape, value: ir.Value, axis: int, *, start: ir.Value | None = None, stop: ir.Value | None = None
) -> ir.Value:
    """Slices an axis, from `start` to before `stop`, (1,) int64 each."""
    first = record_constant(tape, np.array([0])) if start is None else start
    last = record_constant(tape, np.array([np.iinfo(np.int64).max])) if stop is None else stop
    return tape.op("Slice", [value, first, last, record_constant(tape, np.array([axis]))])


def _query_key_value(node: ir.Node, tape: Tape) -> Sequence[ir.Value]:
    """Returns query (1, T, H K), key and value (1, T, G K), sliced if attention was handed their product."""
    if node.inputs[1] is not None:
        return [_input(node, index) for index in range(3)]
    shape = _input(node, _PAST_KEY).shape
    assert shape is not None, "the tracer has declared the cache"
    width = shape[3]
    assert isinstance(width, int), "a head's width is a fixed axis"
    sizes = [node.attributes.get_int(name) * width for name in ("num_heads", "kv_num_heads", "kv_num_heads")]
    return tape.op_multi_out(
        "Split", [_input(node, 0), record_constant(tape, np.array(sizes))], {"axis": 2}, num_outputs=3
    )


class AttendAhead(InPlacePass):
    """Lets the tokens of a step attend to each other, to later ones too, if an input says so.

    Attention is an `If` for each layer: the operator as it is, or without causality. It takes no window then, so that
    the keys before a window get a bias, and the positions of a cache of a window are read as if the text began with
    them, as `QuantizeCache` does for chunks.
    """

    OPSET = 24
    """The first that has TensorScatter."""

    def __init__(self, *, keeps_windows: bool) -> None:
        """Takes whether a token of a layer with a window sees no token before it, of those of the step too."""
        self._keeps_windows = keeps_windows

    def call(self, model: ir.Model) -> PassResult:
        """Adds the input and the branches to a decoder, in place."""
        ahead = ir.val(ATTENDS_AHEAD, ir.DataType.BOOL, [1])
        model.graph.inputs.append(ahead)
        for node in [*model.graph]:
            if node.op_type == ATTENTION:
                self._branch(node, ahead)
            elif node.op_type == "If" and _one_token_operator(node) is not None:
                for inner in [*node.attributes["then_branch"].as_graph()]:
                    if inner.op_type == ATTENTION:
                        self._branch(inner, ahead)
        model.graph.opset_imports[""] = self.OPSET
        return PassResult(model, modified=True)

    def _branch(self, node: ir.Node, ahead: ir.Value) -> None:
        """Puts both ways in the place of a layer's attention."""
        tape = Tape()
        outputs = _repeat(tape, node, node.inputs)
        as_it_is = ir.Graph([], outputs, nodes=tape.nodes, name="causal")
        branches = {"then_branch": self._ahead(node), "else_branch": as_it_is}
        tape = Tape()
        replace_node(node, tape, tape.op_multi_out("If", [ahead], branches, num_outputs=len(node.outputs)))

    def _ahead(self, node: ir.Node) -> ir.Graph:
        """Attention of one row, all of whose new tokens see each other."""
        tape = Tape()
        query, key, value = _query_key_value(node, tape)
        length = tape.op("Shape", [query], {"start": 1, "end": 2})  # (1,): T
        attributes = {name: value for name, value in node.attributes.items() if name not in (_WINDOW, _IS_SHORT)}
        attributes["causal"] = ir.AttrInt64("causal", 0)
        window = node.attributes.get_int(_WINDOW, 0)
        is_short = bool(node.attributes.get_int(_IS_SHORT, 0))
        caches = [_input(node, index) for index in (_PAST_KEY, _PAST_VALUE)]
        rest = list(node.inputs[_LENGTHS:])
        start = tape.op("Sub", [_as_length(tape, _input(node, _LONGEST)), length])  # (1,): tokens before the step
        presents: list[ir.Value] = []
        if is_short:
            heads = node.attributes.get_int("kv_num_heads")
            positions = _CachedPositions.of(node, tape, start)
            held = [_slice(tape, cache, 2, stop=positions.num_held) for cache in caches]
            for tensor, cache, written in zip((key, value), caches, held, strict=True):
                by_head = tape.op(
                    "Reshape", [tensor, record_constant(tape, np.array([0, 0, heads, -1]))]
                )  # (1, T, G, K)
                by_head = tape.op("Transpose", [by_head], {"perm": [0, 2, 1, 3]})  # (1, G, T, K)
                to_write, place = positions.to_write(tape, written, by_head)
                presents.append(tape.op("TensorScatter", [cache, to_write, place], {"axis": 2, "mode": "linear"}))
            caches, start, rest = held, positions.num_held, list(positions.lengths_and_rest(tape, node))
        if window and self._keeps_windows:
            rest += [None] * (_BIAS + 1 - _LENGTHS - len(rest))
            is_half = _input(node, _PAST_KEY).dtype == ir.DataType.FLOAT16
            seen = _in_window(tape, start, length, window, np.float16 if is_half else np.float32)
            given = rest[_BIAS - _LENGTHS]
            rest[_BIAS - _LENGTHS] = seen if given is None else tape.op("Add", [given, seen])
        inputs = [query, key, value, *caches, *rest]
        outputs = tape.op_multi_out(ATTENTION, inputs, attributes, num_outputs=len(node.outputs), domain=node.domain)
        return ir.Graph([], [outputs[0], *presents] if is_short else outputs, nodes=tape.nodes, name="ahead")


def _as_length(tape: Tape, value: ir.Value) -> ir.Value:
    """Returns a number of tokens, () int32, as (1,) int64."""
    return tape.op(
        "Cast", [tape.op("Reshape", [value, record_constant(tape, np.array([1]))])], {"to": ir.DataType.INT64}
    )


def _in_window(
    tape: Tape, start: ir.Value, length: ir.Value, window: int, kind: type[np.float16 | np.float32]
) -> ir.Value:
    """Returns a bias, (1, 1, T, S): 0 where a key is less than `window` tokens before the query, or behind it.

    Args:
        tape: Where operators are recorded.
        start: Keys before the first query, (1,) int64.
        length: T, (1,) int64; S is both together.
        window: Tokens that a token sees, itself included.
        kind: Of the numbers.
    """
    zero, one = (record_constant(tape, np.int64(value)) for value in (0, 1))
    total = tape.op("Squeeze", [tape.op("Add", [start, length])])
    keys = tape.op("Range", [zero, total, one])  # (S,)
    queries = tape.op("Range", [tape.op("Squeeze", [start]), total, one])  # (T,)
    column = tape.op("Unsqueeze", [queries, record_constant(tape, np.array([1]))])  # (T, 1)
    is_seen = tape.op("Less", [tape.op("Sub", [column, keys]), record_constant(tape, np.int64(window))])  # (T, S)
    numbers = [record_constant(tape, kind(value)) for value in (0.0, np.finfo(kind).min)]
    return tape.op("Unsqueeze", [tape.op("Where", [is_seen, *numbers]), record_constant(tape, np.array([0, 1]))])


class AddVerification(InPlacePass):
    """Lets a decoder's graph read a few drafted tokens at once, bit for bit as it decodes them one by one.

    Where a step reads several tokens of a sequence, attention multiplies matrices; in a decode step it multiplies a
    vector and a matrix. The last bits differ, and quantized activations make more of that. All other operators give a
    row the same bits whatever runs beside it. So for verifying, each attention operator has, in a branch beside it, as
    many operators of one token. They form a chain: what is present for one is past for the next. The states between
    them are outputs of the graph so that the runner can bind them all to one memory, and nothing is copied.

    The branch is chosen by the length of an input of its own, `verifies`, which a session fixes as it loads the graph:
    `headway_server/bundles/chain.py` has the convention.
    """

    WIDTH = 6
    """Tokens of a verifying step: the newest one and five drafted ones (docs/speculation.md)."""

    def __init__(self, width: int = WIDTH) -> None:
        """Takes the tokens of a verifying step, at least two."""
        assert width > 1, "a step of one token is a decode step"
        self._width = width

    def call(self, model: ir.Model) -> PassResult:
        """Adds to a decoder, in place, the input `verifies` and the states after all tokens but the last as outputs."""
        graph = model.graph
        layers = [(node, operator) for node in graph if (operator := _one_token_operator(node)) is not None]
        cached = {output for attention, _ in layers for output in attention.outputs}
        if not all(output in cached for output in graph.outputs[1:]):  # a wrong draft would be left in other states
            return PassResult(model, modified=False)
        if nodes_of_experts(model):  # which compute the drafted tokens of a row together
            return PassResult(model, modified=False)
        first, operator = layers[0]
        verifies = ir.val(VERIFIES, ir.DataType.INT64, [VERIFIES])
        graph.inputs.append(verifies)
        tape = Tape()
        length = tape.op("Shape", [verifies])  # not Size: ONNX Runtime computes a shape as it loads the graph
        chosen = tape.op("Squeeze", [length, record_constant(tape, np.array([0]))])
        is_verifying = tape.op("Cast", [chosen], {"to": ir.DataType.BOOL})
        lengths = [  # of the rows after each token, and the longest of them
            [tape.op("Sub", [operator.inputs[index], rest]) for index in (_LENGTHS, _LONGEST)]
            for rest in (record_constant(tape, np.int32(self._width - 1 - number)) for number in range(self._width))
        ]
        graph.insert_before(first, tape.nodes)
        for attention, operator in layers:
            states = attention.outputs[1:3]
            links = [
                ir.val(link_name(str(state.name), number), shape=state.shape, type=state.type)
                for number in range(1, self._width)
                for state in states
            ]
            branches = {
                "then_branch": self._chain(operator, lengths),
                "else_branch": self._single(attention, len(links)),
            }
            tape = Tape()
            outputs = [ir.Value() for _ in attention.outputs]
            tape.op_multi_out("If", [is_verifying], branches, outputs=[*outputs, *links])
            replace_node(attention, tape, outputs)
            graph.outputs.extend(links)
        return PassResult(model, modified=True)

    @staticmethod
    def _chain(operator: ir.Node, lengths: Sequence[Sequence[ir.Value]]) -> ir.Graph:
        """One operator a token, the state of each handed to the next."""
        tape = Tape()
        state: Sequence[ir.Value | None] = operator.inputs[_PAST_KEY:_LENGTHS]
        contexts: list[ir.Value] = []
        links: list[ir.Value] = []
        for number, after in enumerate(lengths):
            bounds = [
                record_constant(tape, np.array([bound])) for bound in (number, number + 1, 1)
            ]  # the last is the axis
            tokens = [
                None if value is None else tape.op("Slice", [value, *bounds]) for value in operator.inputs[:_PAST_KEY]
            ]
            further = list(operator.inputs[_LONGEST + 1 :])
            place = _BIAS - _LONGEST - 1
            if (
                len(further) > place and (bias := further[place]) is not None
            ):  # (., ., T, S), of as many keys as there are
                axes = [record_constant(tape, np.array(axis)) for axis in ([number], [number + 1], [2])]
                bias = tape.op("Slice", [bias, *axes])
                num_keys = tape.op("Reshape", [after[1], record_constant(tape, np.array([1]))])
                starts, axis = (record_constant(tape, np.array([value], np.int32)) for value in (0, 3))
                further[place] = tape.op("Slice", [bias, starts, num_keys, axis])
            context, *present = _repeat(tape, operator, [*tokens, *state, *after, *further])
            contexts.append(context)
            links += present
            state = present
        whole = tape.op("Concat", contexts, {"axis": 1})
        return ir.Graph([], [whole, *links[-2:], *links[:-2]], nodes=tape.nodes, name="verify")

    @staticmethod
    def _single(attention: ir.Node, num_links: int) -> ir.Graph:
        """The node as it was, and nothing for the states between tokens."""
        tape = Tape()
        outputs = _repeat(tape, attention, attention.inputs)
        state = attention.outputs[1]
        assert state.shape is not None, "the tracer has declared it"
        assert state.dtype is not None, "the tracer has declared it"
        shape = [size if isinstance(size, int) else 0 for size in state.shape]  # of keys, and so of values
        empty, sizes = np.zeros(shape, state.dtype.numpy()), np.zeros(num_links, np.int64)
        parts = [record_constant(tape, empty), record_constant(tape, sizes)]
        nothing = tape.op_multi_out("Split", parts, {"axis": 0}, num_outputs=num_links)  # one operator, for speed
        return ir.Graph([], [*outputs, *nothing], nodes=tape.nodes, name="read")


class RankLogits(InPlacePass):
    """Lets a decoder find the likeliest tokens of each row, and the mean of the exponentials of its logits.

    A step needs nothing else of its logits if it takes the likeliest token or ranks beams. In the graph this is part of
    a run that holds no lock of Python; in NumPy it is several passes, after each of which the engine may wait until
    the event loop gives the lock back (docs/decisions/ranking-in-the-graph.md).

    The C largest logits are found among the C groups of neighbouring tokens with the largest maxima. Operators put the
    lower index first among equals. So a group that is left out has C others before it, each with a token that is
    larger, or as large and of a lower id; and within the groups, whose order is that of their tokens, the same holds of
    the tokens. A vocabulary that does not come out even is filled up with minus infinity: by less than a group, and by
    the highest ids, so that they come last.

    The exponentials are those of the logits as they are, so that the mean is not finite where a logit is NaN or far
    above 0. `GlobalAveragePool` sums the numbers of a row in one order in any batch. `ReduceSum` does not: its order
    depends on the number of rows and on their addresses. Means of means round less than one long sum.

    A large vocabulary is ranked row by row: a row stays in the cache of a core, and all rows together do not.
    """

    GROUP_SIZES = range(8, 129)
    """Tokens of a group. A vocabulary that is a multiple of none of them is filled up."""
    USUAL_GROUP_SIZE = 32
    MOST_AT_ONCE = 1 << 15
    """Tokens of a vocabulary above which each row is ranked by itself."""

    def call(self, model: ir.Model) -> PassResult:
        """Adds an input and three outputs to a decoder, in place."""
        graph = model.graph
        (logits,) = (value for value in graph.outputs if value.name == "logits")
        assert logits.shape is not None, "the tracer has declared the output"
        vocab_size = logits.shape[2]
        assert isinstance(vocab_size, int), "the vocabulary is a fixed axis"
        count = ir.val(NUM_LIKELIEST, ir.DataType.INT64, [1])
        graph.inputs.append(count)
        tape = Tape()
        rank = self._rank_each if vocab_size > self.MOST_AT_ONCE else self._rank_all
        ranked = rank(tape, logits, vocab_size, count)
        graph.extend(tape.nodes)
        self._declare(ranked, logits.shape[:2])
        for value, name in zip(ranked, (LIKELIEST_IDS, LIKELIEST_LOGITS, EXPONENTIAL_MEANS), strict=True):
            value.name = name
            graph.outputs.append(value)
        return PassResult(model, modified=True)

    @staticmethod
    def _declare(ranked: Sequence[ir.Value], rows: Sequence[int | ir.SymbolicDim]) -> None:
        """Gives ids, logits and means types and shapes; `rows` are the axes that all have."""
        ids, logits, means = ranked
        ids.type = ir.TensorType(ir.DataType.INT64)
        logits.type = means.type = ir.TensorType(ir.DataType.FLOAT)
        ids.shape, logits.shape, means.shape = (
            ir.Shape(axes) for axes in ([*rows, "likeliest"], [*rows, "likeliest"], rows)
        )

    def _rank_each(self, tape: Tape, logits: ir.Value, vocab_size: int, count: ir.Value) -> Sequence[ir.Value]:
        """Does what `_rank_all` does for one row after another."""
        assert logits.shape is not None, "the tracer has declared the output"
        positions = logits.shape[1]
        row = ir.Value(
            name="ranked_row", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([positions, vocab_size])
        )
        inner = Tape()
        first = record_constant(inner, np.array([0]))
        ranked = self._rank_all(inner, inner.op("Unsqueeze", [row, first]), vocab_size, count)
        outputs = [inner.op("Squeeze", [value, first]) for value in ranked]
        self._declare(outputs, logits.shape[1:2])
        body = ir.Graph([row], outputs, nodes=inner.nodes, name="rank")
        return tape.op_multi_out("Scan", [logits], {"body": body, "num_scan_inputs": 1}, num_outputs=3)

    def _rank_all(self, tape: Tape, logits: ir.Value, vocab_size: int, count: ir.Value) -> Sequence[ir.Value]:
        """Returns ids and logits of the C likeliest tokens, (R, L, C), and means, (R, L), of logits (R, L, V)."""
        sizes = [size for size in self.GROUP_SIZES if vocab_size % size == 0] or [self.USUAL_GROUP_SIZE]
        size = min(sizes, key=lambda size: abs(size - self.USUAL_GROUP_SIZE))
        num_groups = -(-vocab_size // size)
        last = record_constant(tape, np.array([-1]))
        num_spare = num_groups * size - vocab_size
        if num_spare:
            pads, nothing = record_constant(tape, np.array([0, num_spare])), record_constant(tape, np.float32(-np.inf))
            logits = tape.op("Pad", [logits, pads, nothing, last])
        grouping = record_constant(tape, np.array([0, 0, num_groups, size]))
        token_ids, values = self._rank(tape, tape.op("Reshape", [logits, grouping]), num_groups, size, count)
        means = tape.op("Exp", [logits])
        for width in (size, num_groups):  # of the tokens of each group, and of the groups
            means = tape.op("Reshape", [means, record_constant(tape, np.array([0, -1, width]))])
            means = tape.op("GlobalAveragePool", [means])  # (R, L groups, 1), and (R, L, 1)
        if num_spare:
            means = tape.op("Mul", [means, record_constant(tape, np.float32(num_groups * size / vocab_size))])
        return token_ids, values, tape.op("Squeeze", [means, last])

    @staticmethod
    def _rank(tape: Tape, grouped: ir.Value, num_groups: int, size: int, count: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns ids and logits of the C likeliest tokens, (R, L, C) each, of logits (R, L, groups, size)."""
        last, flat = record_constant(tape, np.array([-1])), record_constant(tape, np.array([0, 0, -1]))
        maxima = tape.op("ReduceMax", [grouped, last], {"keepdims": 0})  # (R, L, groups)
        most = tape.op("Min", [count, record_constant(tape, np.array([num_groups]))])
        _, largest = tape.op_multi_out("TopK", [maxima, most], {"axis": -1}, num_outputs=2)
        groups, _ = tape.op_multi_out("TopK", [largest, most], {"axis": -1, "largest": 0}, num_outputs=2)  # rising
        groups = tape.op("Unsqueeze", [groups, last])  # (R, L, C, 1)
        members = tape.op("Reshape", [tape.op("GatherND", [grouped, groups], {"batch_dims": 2}), flat])
        values, places = tape.op_multi_out("TopK", [members, count], {"axis": -1}, num_outputs=2)
        firsts = tape.op("Mul", [groups, record_constant(tape, np.array(size))])
        ids = tape.op(
            "Reshape", [tape.op("Add", [firsts, record_constant(tape, np.arange(size))]), flat]
        )  # (R, L, C size)
        return tape.op("GatherElements", [ids, places], {"axis": -1}), values


def _one_token_operator(node: ir.Node) -> ir.Node | None:
    """Returns what attends in a decode step if the node is a layer's attention, which may read chunks another way."""
    if node.op_type == ATTENTION:
        return node
    if node.op_type != "If":
        return None
    operators = [inner for inner in node.attributes["else_branch"].as_graph() if inner.op_type == ATTENTION]
    return operators[0] if len(operators) == 1 else None


def _repeat(tape: Tape, node: ir.Node, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
    """Records a node like another, with other inputs."""
    return tape.op_multi_out(node.op_type, inputs, node.attributes, num_outputs=len(node.outputs), domain=node.domain)
