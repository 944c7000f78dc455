"""What PyTorch's tracer is spared: decompositions, tables, comparisons and computations that change nothing.

All private names of PyTorch and ONNX Script stand in this module, and nothing needs it: it cannot be imported with a
release that lacks one of them, and `tracing` does without it then (docs/decisions/decompositions.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, cast
from unittest.mock import patch

import onnx_ir as ir
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher
from onnxscript.rewriter._rewrite_rule import RewriteRule
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._dynamo import config as dynamo_config
from torch._export import utils as export_utils
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_impls import get_fast_op_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter, get_type_promotion_rule


@contextmanager
def shortcuts() -> Iterator[None]:
    """Spares the tracer work as long as it is open."""
    with (
        _decomposing_if_needed(),
        _known_operators(),
        _composites_listed_once(),
        _rules_by_operator(),
        _promoting_known_values(),
        _results_by_shape(),
        _without_stack_traces(),
        _uncached(),
    ):
        yield


@contextmanager
def _decomposing_if_needed() -> Iterator[None]:
    """Lets the tracer decompose a program only where that changes more than what is written here.

    To decompose a program PyTorch traces it once more, which takes longer than the first time
    (docs/decisions/decompositions.md).
    """
    decompose: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def decompose_if_needed(program: ExportedProgram, decomp_table: Any = None, **options: Any) -> ExportedProgram:
        if decomp_table is None or options or not _is_translatable(program, decomp_table):
            return decompose(program, decomp_table, **options)
        _write_casts(program)
        _write_shapes(program.graph)
        _write_chunks(program.graph)
        for node in program.graph.nodes:
            node.target = _RENAMED.get(node.target, node.target)
            if node.target is _SQUARE:
                node.target, node.args = torch.ops.aten.mul.Tensor, node.args * 2
        return program

    with patch.object(ExportedProgram, "run_decompositions", decompose_if_needed):
        yield


_schema_of, _has_kernel = attrgetter("_schema"), OpOverload.has_kernel_for_dispatch_key
_matcher_of = attrgetter("_matcher")
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device)
_COPY = torch.ops.aten._to_copy.default  # noqa: SLF001 (the name of an operator)
_CHECK = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001 (the name of an operator)
_RESHAPES = (torch.ops.aten.flatten.using_ints, torch.ops.aten.unflatten.int)
_CHUNK, _SPLIT = torch.ops.aten.chunk.default, torch.ops.aten.split.Tensor
_OTHER_NAMES = {
    torch.ops.aten.min.other: torch.ops.aten.minimum.default,
    torch.ops.aten.max.other: torch.ops.aten.maximum.default,
    torch.ops.aten.__and__.Tensor: torch.ops.aten.bitwise_and.Tensor,
    torch.ops.aten.__or__.Tensor: torch.ops.aten.bitwise_or.Tensor,
}
_SQUARE = torch.ops.aten.square.default
_IN_PLACE = {
    torch.ops.aten.add_.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.mul_.Tensor: torch.ops.aten.mul.Tensor,
}
_RENAMED = _OTHER_NAMES | _IN_PLACE
_PRODUCTS = (torch.ops.aten.matmul.default, torch.ops.aten.linear.default)
"""Composite operators that return a tensor of their own."""
_UNCHANGED = (
    *(_CHECK, torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten.expand_as.default),
)
_WRITTEN = (*_CASTS, *_RESHAPES, _CHUNK, _SQUARE, *_OTHER_NAMES, *_UNCHANGED)
"""Operators that decomposing changes, into what is written here or into what has the same translation."""
_UNTRANSLATED = (torch.ops.aten.batch_norm.default,)
"""Composite operators that have no translation until they are decomposed."""


# What is missing is missed when this module is imported, and not within a trace.
_needed: tuple[object, ...] = (
    *(_schema_of(_CHECK).is_mutable, _schema_of(_CHECK).arguments[0].alias_info, DispatchKey.CompositeImplicitAutograd),
    *attrgetter("_set_current_node", "_maybe_promote_node")(_TypePromotionInterpreter),
    dynamo_config.fake_tensor_cache_enabled,
    fx_config.do_not_emit_stack_traces,
)


def _is_translatable(program: ExportedProgram, decompositions: Mapping[Any, Any]) -> bool:
    """True if decomposing a program would change nothing but the operators that are written here.

    It would change those of the table, those that change a tensor in place, and those made of others that may return a
    view; and it is needed for what is not a flat list of operators.
    """
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or node.target in _WRITTEN or _changes_its_own(node):
            continue
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            return False
        if node.target in decompositions or node.target in _UNTRANSLATED:
            return False
        if isinstance(node.target, OpOverload):
            schema = _schema_of(node.target)
            is_composite = _has_kernel(node.target, DispatchKey.CompositeImplicitAutograd)
            if schema.is_mutable or (is_composite and any(argument.alias_info for argument in schema.arguments)):
                return False
    sizes = _dynamic_sizes(program.graph)
    nodes = program.graph.nodes
    return all(
        sum(not isinstance(axis, int) and str(axis) not in sizes for axis in node.meta["val"].shape) < 2
        for node in nodes
        if node.target in _RESHAPES
    ) and all(isinstance(axis, int) for node in nodes if node.target is _CHUNK for axis in _chunked(node))


def _changes_its_own(node: torch.fx.Node) -> bool:
    """True of a change in place that may as well give another tensor: nothing shows or reads the first afterwards."""
    if node.target not in _IN_PLACE or node.kwargs:
        return False
    changed, other = node.args
    if not isinstance(changed, torch.fx.Node) or not isinstance(other, torch.fx.Node):
        return False
    is_made_here = changed.op == "call_function" and not _may_alias(changed)
    is_read_before = all(user is node or (user < node and not _may_alias(user, changed)) for user in changed.users)
    return is_made_here and is_read_before and changed.meta["val"].dtype == other.meta["val"].dtype


def _may_alias(node: torch.fx.Node, read: torch.fx.Node | None = None) -> bool:
    """True if what a node returns may be a view of what it reads, or that itself, as `dropout` returns it.

    With `read` it is asked of this argument alone.
    """
    if not isinstance(node.target, OpOverload):
        return True
    arguments = _schema_of(node.target).arguments
    aliased = [value for argument, value in zip(arguments, node.args, strict=False) if argument.alias_info]
    if aliased and (read is None or any(value is read for value in aliased)):
        return True
    is_composite = _has_kernel(node.target, DispatchKey.CompositeImplicitAutograd) and node.target not in _PRODUCTS
    return is_composite and not aliased


def _chunked(node: torch.fx.Node) -> list[Any]:
    """Returns how long each piece of a chunked axis is."""
    axis = cast("int", node.args[2] if len(node.args) > 2 else 0)
    return [piece.shape[axis] for piece in node.meta["val"]]


def _dynamic_sizes(graph: torch.fx.Graph) -> dict[str, tuple[torch.fx.Node, int]]:
    """Returns an input and its axis for each dynamic size, by its name in the program."""
    return {
        str(size): (node, axis)
        for node in graph.find_nodes(op="placeholder")
        for axis, size in enumerate(getattr(node.meta["val"], "shape", ()))
        if not isinstance(size, int)
    }


def _write_shapes(graph: torch.fx.Graph) -> None:
    """Writes what joins or splits axes as reshapes, whose shapes name the sizes of inputs that they keep.

    A size that no input has, and there is at most one in a shape, is -1, which follows from the others.
    """
    inputs = _dynamic_sizes(graph)
    sizes: dict[str, torch.fx.Node] = {}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in (node for target in _RESHAPES for node in graph.find_nodes(op="call_function", target=target)):
        shape: list[int | torch.fx.Node] = []
        for axis in node.meta["val"].shape:
            name = str(axis)
            if not isinstance(axis, int) and name in inputs and name not in sizes:
                with graph.inserting_before(first):
                    sizes[name] = graph.call_function(torch.ops.aten.sym_size.int, inputs[name])
                sizes[name].meta["val"] = axis
            shape.append(axis if isinstance(axis, int) else sizes.get(name, -1))
        node.target, node.args, node.kwargs = torch.ops.aten.reshape.default, (node.args[0], shape), {}


def _write_chunks(graph: torch.fx.Graph) -> None:
    """Writes chunks as the pieces of equal size, but for the last, that they are."""
    for node in graph.find_nodes(op="call_function", target=_CHUNK):
        axis = node.args[2:] or (0,)
        node.target, node.args, node.kwargs = _SPLIT, (node.args[0], _chunked(node)[0], *axis), {}


def _write_casts(program: ExportedProgram) -> None:
    """Writes casts with the operator that has a translation; one to the dtype that a tensor has is removed."""
    for node in (node for target in _CASTS for node in program.graph.find_nodes(op="call_function", target=target)):
        source, dtype = cast("torch.fx.Node", node.args[0]), node.meta["val"].dtype
        if source.meta["val"].dtype == dtype:
            node.replace_all_uses_with(source)
            program.graph_signature.replace_all_uses(node.name, source.name)
            program.graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = _COPY, (source,), {"dtype": dtype}


@contextmanager
def _known_operators() -> Iterator[None]:
    """Has PyTorch make the table of its operators' translations once in a process, and not for each trace."""
    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(_registry)):
        yield


_registry = functools.cache(ONNXRegistry.from_torchlib)


@contextmanager
def _composites_listed_once() -> Iterator[None]:
    """Has PyTorch look for all composite operators once in a trace, and not for each namespace of operators."""
    with patch.object(export_utils, "_materialize_cpp_cia_ops", functools.cache(_list_composites)):
        yield


_list_composites = attrgetter("_materialize_cpp_cia_ops")(export_utils)


@contextmanager
def _rules_by_operator() -> Iterator[None]:
    """Has a rule of rewriting tried on nodes of its own operator alone.

    Of each node and each rule of several outputs ONNX Script lists the whole graph before it compares operators: a
    third of the trace of a GPT-2.
    """
    rewrite = RewriteRule.try_rewrite

    @functools.cache
    def operator_of(rule: RewriteRule) -> str | None:
        matcher = _matcher_of(rule)
        named = matcher.pattern.output_nodes[0].op_identifier() if isinstance(matcher, SimplePatternMatcher) else None
        return None if named is None else named[1]

    def rewrite_operator(
        self: RewriteRule, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any
    ) -> Any:
        operator = operator_of(self)
        if operator is not None and operator != node.op_type:
            return None
        return rewrite(self, model, graph, node, **options)

    with patch.object(RewriteRule, "try_rewrite", rewrite_operator):
        yield


@contextmanager
def _promoting_known_values() -> Iterator[None]:
    """Has PyTorch cast the inputs of operators without computing the program's shapes once more.

    What a node gives is known from the capture, and is computed anew by PyTorch where inputs are cast.
    """
    run = _TypePromotionInterpreter.run_node

    def run_node(self: Any, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or "val" not in n.meta:
            return run(self, n)
        with self._set_current_node(n):
            if rule := get_type_promotion_rule(n, self.type_promotion_table):
                self._maybe_promote_node(n, rule)
        return n.meta["val"]

    with patch.object(_TypePromotionInterpreter, "run_node", run_node):
        yield


def _uncached() -> AbstractContextManager[None]:
    """Has PyTorch keep no results of operators on tensors without numbers: keeping takes longer than computing."""
    return cast("AbstractContextManager[None]", dynamo_config.patch(fake_tensor_cache_enabled=False))


@contextmanager
def _results_by_shape() -> Iterator[None]:
    """Has the shapes of results taken from the inputs' where PyTorch computes them by the parts of a formula."""
    with patch.dict(get_fast_op_impls(), _BY_SHAPE):
        yield


_NORM, _GELU = torch.ops.aten.native_layer_norm.default, torch.ops.aten.gelu.default
_norm_by_formula, _gelu_by_formula = decomposition_table[_NORM], decomposition_table[_GELU]


def _norm_by_shape(
    mode: FakeTensorMode, tensor: Tensor, normalized_shape: Sequence[int], *parameters: Any
) -> tuple[Tensor, ...]:
    """Returns tensors of the input's shape, and twice of that with its normalized axes 1."""
    with mode:
        if not _is_in_order(tensor):
            return cast("tuple[Tensor, ...]", _norm_by_formula(tensor, normalized_shape, *parameters))
        kept = len(normalized_shape)
        shape = (*tensor.shape[:-kept], *[1] * kept)
        return tensor.new_empty(tensor.shape), tensor.new_empty(shape), tensor.new_empty(shape)


def _gelu_by_shape(mode: FakeTensorMode, tensor: Tensor, **options: Any) -> Tensor:
    """Returns a tensor of the input's shape."""
    with mode:
        if not _is_in_order(tensor):
            return cast("Tensor", _gelu_by_formula(tensor, **options))
        return tensor.new_empty(tensor.shape)


def _is_in_order(tensor: Tensor) -> bool:
    """True if the strides are written as those of a contiguous tensor; comparing them would make conditions."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


_BY_SHAPE = {_NORM: _norm_by_shape, _GELU: _gelu_by_shape}


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Has PyTorch not look up the lines of code of every node, which a bundle's graph does not keep."""
    with patch.object(fx_config, "do_not_emit_stack_traces", new=True):
        yield
