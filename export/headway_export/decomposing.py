"""A captured program's operators written as those that have a translation to ONNX, each by itself.

PyTorch decomposes a program by tracing it once more, which takes longer than the first time
(docs/decisions/decompositions.md). As in `shortcuts`, the private names of PyTorch that this needs may be missing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

_schema_of: Callable[[Any], Any] = attrgetter("_schema")
_has_kernel: Callable[[OpOverload, DispatchKey], bool] = OpOverload.has_kernel_for_dispatch_key
_CHECK = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001 (the name of an operator)
_RESHAPES = (torch.ops.aten.flatten.using_ints, torch.ops.aten.unflatten.int)
_UNCHANGED = (_CHECK, torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default)
"""Operators that have a translation, though they are made of others and may return a view."""
_OF_THEIR_OWN = attrgetter(
    *("matmul", "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
    *("batch_norm", "layer_norm", "group_norm", "instance_norm"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"),
)(torch.ops.aten)
"""Operators made of others that return a tensor of their own."""
_UNTRANSLATED = (torch.ops.aten.batch_norm.default,)
"""Operators made of others, without views, that have no translation."""

# What is missing is missed when this module is imported, and not within a trace.
_needed: tuple[object, ...] = (
    *attrgetter("is_mutable", "name", "overload_name")(_schema_of(_CHECK)),
    *(_schema_of(_CHECK).arguments[0].alias_info, DispatchKey.CompositeImplicitAutograd),
)


def decompose(program: ExportedProgram, decompositions: Mapping[Any, Any]) -> bool:
    """Decomposes the operators of a table, and those made of others that may return a view; False if it cannot.

    It cannot where a tensor is changed in place that something else may read, nor in what is no flat list of
    operators. The program is unchanged then.
    """
    parts = _plan(program, decompositions)
    if parts is None:
        return False
    sizes = _Sizes(program.graph)
    for node, graph in parts.items():
        _write_parts(program, node, graph, sizes)
    _write_shapes(program.graph, sizes)
    return True


def _plan(program: ExportedProgram, decompositions: Mapping[Any, Any]) -> dict[Node, Graph] | None:
    """Returns what each operator is made of that has to be decomposed; None if one cannot be by itself."""
    if any(node.op not in ("placeholder", "call_function", "output") for node in program.graph.nodes):
        return None
    values = (node.meta.get("val") for node in program.graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    traced: dict[str, Graph | None] = {}
    parts: dict[Node, Graph] = {}
    sizes = _dynamic_sizes(program.graph)
    for node in (node for node in program.graph.nodes if node.op == "call_function"):
        if isinstance(node.target, HigherOrderOperator):
            return None
        if not isinstance(node.target, OpOverload) or node.target in _UNCHANGED or _is_reshape(node, sizes):
            continue
        target = _without_change(node, parts) if _is_mutable(node) else node.target
        if target is node.target and not (
            target in decompositions or target in _UNTRANSLATED or _may_give_view(target)
        ):
            continue
        key = _described(node, target)
        if key not in traced:
            traced[key] = None if target is None else _trace_parts(node, target, decompositions, mode)
        graph = traced[key]
        if graph is None or not _may_stand_for(graph, node):
            return None
        parts[node] = graph
    return parts


def _is_reshape(node: Node, sizes: Mapping[str, object]) -> bool:
    """True of what joins or splits axes, and gives at most one size that no input has."""
    if node.target not in _RESHAPES:
        return False
    return sum(not isinstance(axis, int) and str(axis) not in sizes for axis in node.meta["val"].shape) < 2


def _may_give_view(target: OpOverload) -> bool:
    """True of an operator that is made of others and may return a view of what it reads."""
    is_composite = _has_kernel(target, DispatchKey.CompositeImplicitAutograd)
    return is_composite and any(argument.alias_info for argument in _schema_of(target).arguments)


def _without_change(node: Node, written: Container[Node]) -> OpOverload | None:
    """Returns the operator that gives another tensor instead; None if something shows or reads the first afterwards.

    What changes a tensor that another change gives, which is written as such an operator, changes its own.
    """
    changed = node.args[0]
    if not isinstance(changed, Node) or changed.op != "call_function":
        return None
    if _may_alias(changed) and not (_is_mutable(changed) and changed in written):
        return None
    if not all(user is node or (user < node and not _may_alias(user, changed)) for user in changed.users):
        return None
    name, overload = _schema_of(node.target).name, _schema_of(node.target).overload_name
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, overload or "default", None)


def _may_alias(node: Node, read: Node | None = None) -> bool:
    """True if what a node returns may be a view of what it reads, or that itself, as `dropout` returns it.

    With `read` it is asked of this argument alone.
    """
    if not isinstance(node.target, OpOverload):
        return True
    arguments = _schema_of(node.target).arguments
    aliased = [value for argument, value in zip(arguments, node.args, strict=False) if argument.alias_info]
    if aliased and (read is None or any(value is read for value in aliased)):
        return True
    is_composite = _has_kernel(node.target, DispatchKey.CompositeImplicitAutograd)
    return is_composite and not aliased and node.target.overloadpacket not in _OF_THEIR_OWN


def _is_mutable(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(_schema_of(node.target).is_mutable)


def _described(node: Node, target: OpOverload | None) -> str:
    """Describes an operator with its arguments: the parts of two that are described alike are the same."""

    def describe(argument: Node) -> Any:
        value = argument.meta["val"]
        if isinstance(value, Tensor):
            value = (value.dtype, [*map(str, value.shape)], [*map(str, value.stride())])
        return f"{positions[argument]}: {value}"

    positions = {argument: position for position, argument in enumerate(node.all_input_nodes)}
    return f"{target}{map_arg(node.args, describe)}{map_arg(node.kwargs, describe)}"


def _trace_parts(
    node: Node, target: OpOverload, decompositions: Mapping[Any, Any], mode: FakeTensorMode
) -> Graph | None:
    """Traces an operator on tensors without data; None where its parts cannot be traced by themselves.

    The graph reads the operator's inputs, each once and in order.
    """
    inputs = node.all_input_nodes

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        return target(*map_arg(node.args, given.__getitem__), **map_arg(node.kwargs, given.__getitem__))

    trace: Callable[..., GraphModule] = make_fx(run, decomposition_table=decompositions)
    try:
        with mode:
            graph = trace(*[read.meta["val"] for read in inputs]).graph
    except Exception:  # PyTorch decomposes the whole program then, and says what is wrong
        return None
    for part in filter(_is_mutable, graph.nodes):
        changeless = _without_change(part, ())
        if changeless is None or changeless in decompositions:
            return None
        part.target = changeless
    is_whole = all(part.op != "get_attr" for part in graph.nodes)
    return graph if is_whole and len(graph.find_nodes(op="placeholder")) == len(inputs) else None


def _may_stand_for(parts: Graph, node: Node) -> bool:
    """True if parts return a node of the operator's dtype, which a change in place keeps, or a node for each user."""
    returned: Any = parts.output_node().args[0]
    if isinstance(returned, list | tuple):
        return all(isinstance(part, Node) for part in returned) and all(
            user.target is operator.getitem for user in node.users
        )
    return isinstance(returned, Node) and returned.meta["val"].dtype == node.meta["val"].dtype


def _write_parts(program: ExportedProgram, node: Node, parts: Graph, sizes: _Sizes) -> None:
    """Writes an operator's parts in its place."""
    written: dict[Node, Node] = dict(zip(parts.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    for part in parts.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if (size := sizes.find(part.meta["val"])) is not None:
            written[part] = size
    with program.graph.inserting_before(node):
        returned = cast("Any", program.graph.graph_copy(parts, written))
    for part in written.values():
        part.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))
    if isinstance(returned, list | tuple):
        replaced = {user: returned[cast("int", user.args[1])] for user in node.users}
    else:
        replaced = {node: returned}
    for old, new in replaced.items():
        old.replace_all_uses_with(new)
        program.graph_signature.replace_all_uses(old.name, new.name)
        program.graph.erase_node(old)
    if node not in replaced:
        program.graph.erase_node(node)


def _dynamic_sizes(graph: Graph) -> dict[str, tuple[Node, int]]:
    """Returns an input and its axis for each dynamic size, by its name in the program."""
    return {
        str(size): (node, axis)
        for node in graph.find_nodes(op="placeholder")
        for axis, size in enumerate(getattr(node.meta["val"], "shape", ()))
        if not isinstance(size, int)
    }


class _Sizes:
    """Nodes of the dynamic sizes of a program's inputs, made where they are first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs = _dynamic_sizes(graph)
        self._first = next(node for node in graph.nodes if node.op != "placeholder")
        self._nodes: dict[str, Node] = {}

    def find(self, size: object) -> Node | None:
        """Returns the node of a size that an input has, or None."""
        name = str(size)
        if name in self._inputs and name not in self._nodes:
            with self._graph.inserting_before(self._first):
                self._nodes[name] = self._graph.call_function(torch.ops.aten.sym_size.int, self._inputs[name])
            self._nodes[name].meta["val"] = size
        return self._nodes.get(name)


def _write_shapes(graph: Graph, sizes: _Sizes) -> None:
    """Writes what joins or splits axes as reshapes, whose shapes name the sizes of inputs that they keep.

    A size that no input has, and there is at most one in a shape, is -1, which follows from the others.
    """
    for node in (node for target in _RESHAPES for node in graph.find_nodes(op="call_function", target=target)):
        shape: list[int | Node] = []
        for axis in node.meta["val"].shape:
            size = axis if isinstance(axis, int) else sizes.find(axis)
            shape.append(-1 if size is None else size)
        node.target, node.args, node.kwargs = torch.ops.aten.reshape.default, (node.args[0], shape), {}
