"""Lets a decoder's graph read a few drafted tokens at once, bit for bit as it decodes them one by one.

Where a step reads several tokens of a sequence, attention multiplies matrices; in a decode step it multiplies a vector
and a matrix. The last bits differ, and quantized activations make more of that. All other operators give a row the same
bits whatever runs beside it. So for verifying, each attention operator has, in a branch beside it, as many operators of
one token. They form a chain: what is present for one is past for the next. The states between them are outputs of the
graph so that the runner can bind them all to one memory, and nothing is copied.

The branch is chosen by the length of an input of its own, `verifies`, which a session fixes as it loads the graph:
`headway_server/bundles/chain.py` has the convention.

Shapes: R rows, T tokens of a step, H heads, K head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from headway_export.tracing import TracedGraph
from headway_server.bundles import TensorSpec
from headway_server.bundles.chain import VERIFIES, link_name

WIDTH = 6
"""Tokens of a verifying step: the newest one and five drafted ones (docs/speculation.md)."""

_OPERATOR = "GroupQueryAttention"
_PAST_KEY, _PAST_VALUE, _LENGTHS, _LONGEST = 3, 4, 5, 6
"""Inputs of `GroupQueryAttention`; before them stand query, key and value, or one tensor that holds all three."""


def add_verification(traced: TracedGraph, width: int = WIDTH) -> TracedGraph:
    """Returns a decoder's graph that can verify drafts.

    Args:
        traced: The graph, in any precision of the CPU; it stays as it is.
        width: Tokens of a verifying step, at least two.

    Returns:
        A copy, sharing its weights, with a new input and new outputs: `verifies`, and each state after every token but
        the last.
    """
    assert width > 1, "a step of one token is a decode step"
    specs = {spec.name: spec for spec in traced.outputs}
    verifies = TensorSpec(name=VERIFIES, dtype="int64", shape=(VERIFIES,))
    model = traced.model.clone()
    rewriter = _Rewriter(model.graph, specs, width)
    links = [link for node in list(model.graph) if _one_token_operator(node) for link in rewriter.rewrite(node)]
    return dataclasses.replace(
        traced, model=model, inputs=(*traced.inputs, verifies), outputs=(*traced.outputs, *links)
    )


def _one_token_operator(node: ir.Node) -> ir.Node | None:
    """Returns what attends in a decode step if the node is a layer's attention, which may read chunks another way."""
    if node.op_type == _OPERATOR:
        return node
    if node.op_type != "If":
        return None
    operators = [inner for inner in node.attributes["else_branch"].as_graph() if inner.op_type == _OPERATOR]
    return operators[0] if len(operators) == 1 else None


class _Rewriter:
    def __init__(self, graph: ir.Graph, specs: dict[str, TensorSpec], width: int) -> None:
        self._graph = graph
        self._specs = specs
        self._width = width
        self._constants: dict[str, ir.Value] = {}
        self._is_verifying: ir.Value | None = None
        self._lengths: list[tuple[ir.Value, ir.Value]] = []

    def rewrite(self, attention: ir.Node) -> list[TensorSpec]:
        """Puts a layer's attention into a branch beside its chain; returns the outputs that this adds."""
        operator = _one_token_operator(attention)
        assert operator is not None, "the caller has looked"
        if self._is_verifying is None:
            self._prepare(attention, operator)
        assert self._is_verifying is not None, "it has just been prepared"
        key, value = (self._specs[str(output.name)] for output in attention.outputs[1:3])
        links = [
            spec.model_copy(update={"name": link_name(spec.name, number)})
            for number in range(1, self._width)
            for spec in (key, value)
        ]
        layer = str(key.name)
        branches = {
            "then_branch": self._chain(operator, f"{layer}.verify"),
            "else_branch": self._single(attention, links, f"{layer}.read"),
        }
        node = ir.node("If", [self._is_verifying], branches, num_outputs=3 + len(links))
        self._graph.insert_before(attention, node)
        self._take_over(attention, node, links)
        return links

    def _prepare(self, before: ir.Node, operator: ir.Node) -> None:
        """Computes what all layers need: whether the step verifies, and each row's tokens after each of its tokens."""
        verifies = ir.Value(name=VERIFIES, shape=ir.Shape([VERIFIES]), type=ir.TensorType(ir.DataType.INT64))
        self._graph.inputs.append(verifies)
        length = self._add(before, "Shape", [verifies])  # not Size: ONNX Runtime computes a shape as it loads the graph
        chosen = self._add(before, "Squeeze", [length, self._constant("first", np.array([0], np.int64))])
        self._is_verifying = self._add(before, "Cast", [chosen], {"to": int(ir.DataType.BOOL)})
        lengths, longest = operator.inputs[_LENGTHS], operator.inputs[_LONGEST]
        assert lengths is not None, "the operator needs it"
        assert longest is not None, "the operator needs it"
        for number in range(self._width):
            rest = self._constant(f"rest_{number}", np.array(self._width - 1 - number, np.int32))
            self._lengths.append((self._add(before, "Sub", [lengths, rest]), self._add(before, "Sub", [longest, rest])))

    def _chain(self, operator: ir.Node, name: str) -> ir.Graph:
        """One operator a token, the state of each handed to the next."""
        branch = _Branch(name)
        state = list(operator.inputs[_PAST_KEY : _PAST_VALUE + 1])
        axis = self._constant("axis", np.array([1], np.int64))
        contexts: list[ir.Value] = []
        links: list[ir.Value] = []
        for number, lengths in enumerate(self._lengths):
            bounds = [self._constant(f"token_{n}", np.array([n], np.int64)) for n in (number, number + 1)]
            token = [
                None if tokens is None else branch.add("Slice", [tokens, *bounds, axis])[0]
                for tokens in operator.inputs[:_PAST_KEY]
            ]
            rest = operator.inputs[_LONGEST + 1 :]
            context, key, value = branch.repeat(operator, [*token, *state, *lengths, *rest])
            contexts.append(context)
            links += [key, value]
            state = [key, value]
        whole = branch.add("Concat", contexts, {"axis": 1})[0]
        return branch.graph([whole, *links[-2:], *links[:-2]])

    def _single(self, attention: ir.Node, links: Sequence[TensorSpec], name: str) -> ir.Graph:
        """What was there, and nothing for the states between tokens."""
        branch = _Branch(name)
        outputs = branch.repeat(attention, list(attention.inputs))
        shape = [0 if isinstance(size, str) else size for size in links[0].shape]  # of keys, and so of values
        empty = self._constant(f"empty_{'_'.join(map(str, shape))}", np.zeros(shape, links[0].dtype))
        sizes = self._constant("nothing", np.zeros(len(links), np.int64))
        outputs += branch.add("Split", [empty, sizes], {"axis": 0}, num_outputs=len(links))  # one operator, for speed
        return branch.graph(outputs)

    def _take_over(self, attention: ir.Node, node: ir.Node, links: Sequence[TensorSpec]) -> None:
        """Puts the branches in the operator's place."""
        for old, new in zip(attention.outputs, node.outputs, strict=False):
            new.type, new.shape, name = old.type, old.shape, old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name, new.name = None, name
        state_types = [output.type for output in attention.outputs[1:3]]
        self._graph.remove(attention, safe=True)
        for number, (link, value) in enumerate(zip(links, node.outputs[3:], strict=True)):
            value.name, value.type, value.shape = link.name, state_types[number % 2], ir.Shape(link.shape)
            self._graph.outputs.append(value)

    def _add(
        self, before: ir.Node, op_type: str, inputs: list[ir.Value], attributes: dict[str, int] | None = None
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or {})
        self._graph.insert_before(before, node)
        return node.outputs[0]

    def _constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        name = f"headway.verify.{name}"
        if name not in self._constants:
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self._graph.register_initializer(value)
            self._constants[name] = value
        return self._constants[name]


class _Branch:
    """The nodes of a branch as they come, all named: a name must be its own in the whole graph."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[ir.Node] = []

    def add(
        self, op_type: str, inputs: list[ir.Value], attributes: dict[str, int] | None = None, *, num_outputs: int = 1
    ) -> list[ir.Value]:
        """Adds a node and returns its outputs."""
        return self._append(ir.node(op_type, inputs, attributes or {}, num_outputs=num_outputs))

    def repeat(self, node: ir.Node, inputs: list[ir.Value | None]) -> list[ir.Value]:
        """Adds a node like another, with other inputs."""
        outputs = self._append(
            ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
        )
        for output, model in zip(outputs, node.outputs, strict=True):
            output.type = model.type
        return outputs

    def graph(self, outputs: list[ir.Value]) -> ir.Graph:
        """Returns the branch."""
        return ir.Graph([], outputs, nodes=self._nodes, name=self._name)

    def _append(self, node: ir.Node) -> list[ir.Value]:
        node.name = f"{self._name}.{len(self._nodes)}"
        for number, output in enumerate(node.outputs):
            output.name = f"{node.name}.{number}"
        self._nodes.append(node)
        return list(node.outputs)
