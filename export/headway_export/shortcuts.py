"""What PyTorch's tracer is spared: decompositions, tables, comparisons and computations that change nothing.

All private names of PyTorch and ONNX Script stand in this module, `decomposing` and `shaping`. Nothing needs them: they
cannot be imported with a release that lacks a name, and `tracing` does without them then
(docs/decisions/decompositions.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, cast
from unittest.mock import patch

import onnx
import onnx_ir as ir
import torch
from onnx_ir.schemas import OpSignature
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter._matcher import SimplePatternMatcher
from onnxscript.rewriter._rewrite_rule import RewriteRule
from torch._dynamo import config as dynamo_config
from torch._export import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter, get_type_promotion_rule

from headway_export import decomposing
from headway_export.shaping import shaping


@contextmanager
def shortcuts() -> Iterator[None]:
    """Spares the tracer work as long as it is open."""
    with (
        _decomposing_by_operator(),
        _known_operators(),
        _composites_listed_once(),
        _rules_by_operator(),
        _signatures_read_once(),
        _shapes_inferred_once(),
        _promoting_known_values(),
        shaping(),
        _without_stack_traces(),
        _uncached(),
    ):
        yield


def without_values() -> AbstractContextManager[object]:
    """Has PyTorch compute types and shapes alone, of tensors that have no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _decomposing_by_operator() -> Iterator[None]:
    """Has operators decomposed one by one, and the whole program only where that cannot be."""
    decompose_program: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def decompose(program: ExportedProgram, decomp_table: Any = None, **options: Any) -> ExportedProgram:
        if decomp_table is None or options or not decomposing.decompose(program, decomp_table):
            return decompose_program(program, decomp_table, **options)
        return program

    with patch.object(ExportedProgram, "run_decompositions", decompose):
        yield


_matcher_of = attrgetter("_matcher")
# What is missing is missed when this module is imported, and not within a trace.
_needed: tuple[object, ...] = (
    *attrgetter("_set_current_node", "_maybe_promote_node")(_TypePromotionInterpreter),
    dynamo_config.fake_tensor_cache_enabled,
    fx_config.do_not_emit_stack_traces,
)


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


_read_signature = OpSignature.from_op_schema


@functools.cache
def _signature(name: str, version: int) -> OpSignature:
    return _read_signature(onnx.defs.get_schema(name, version))


@contextmanager
def _signatures_read_once() -> Iterator[None]:
    """Has ONNX Script read the signature of an operator once in a process, and not for each node."""

    def read(schema: onnx.defs.OpSchema) -> OpSignature:
        return _read_signature(schema) if schema.domain else _signature(schema.name, schema.since_version)

    with patch.object(OpSignature, "from_op_schema", staticmethod(read)):
        yield


@contextmanager
def _shapes_inferred_once() -> Iterator[None]:
    """Has ONNX Script infer the shapes of a node's outputs only where that may tell more than is known.

    It infers them for each node twice, and hands over values of constants each time. Nothing is learnt where all are
    numbers, nor if the inputs are known as well as they were the first time.
    """
    seen: dict[ir.Node, list[object]] = {}

    def infer_unknown(self: FoldConstantsPass, node: ir.Node) -> None:
        if all(
            value.type is not None and value.shape is not None and value.shape.is_static() for value in node.outputs
        ):
            return
        inputs = [value for value in node.inputs if value is not None]
        known: list[object] = [(value.type, value.shape and value.shape.copy(), value.const_value) for value in inputs]
        if seen.get(node) != known:
            seen[node] = known
            _infer(self, node)

    with patch.object(FoldConstantsPass, "_do_inference", infer_unknown):
        yield


_infer: Callable[[FoldConstantsPass, ir.Node], None] = attrgetter("_do_inference")(FoldConstantsPass)


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
def _without_stack_traces() -> Iterator[None]:
    """Has PyTorch not look up the lines of code of every node, which a bundle's graph does not keep."""
    with patch.object(fx_config, "do_not_emit_stack_traces", new=True):
        yield
