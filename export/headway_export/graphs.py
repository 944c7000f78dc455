"""Turns a module into the graphs of a bundle (docs/architecture.md gives their tensors).

Shapes: B rows, T tokens of a step, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import onnx_ir as ir
import torch
from torch import Tensor, nn

from headway_export.errors import SourceError, TraceError
from headway_export.fusion import fuse
from headway_export.graph_modules import (
    ClassifierGraph,
    CrossDecoderGraph,
    DecoderGraph,
    EncoderGraph,
    float_dtype,
)
from headway_server.bundles import StateTensor, Task, TensorSpec
from headway_training.models.parts.attention import Attend
from headway_training.models.protocols import Decoder, EncoderDecoder

OPSET = 21
Role: TypeAlias = Literal["model", "encoder", "decoder"]

_EXAMPLE_SIZES = {
    "batch": 2,
    "length": 5,
    "slots": 4,
    "cache_length": 16,
    "logits_length": 2,
    "sources": 2,
    "source_length": 7,
}
"""Sizes that a graph is traced at. Not 0 or 1, which PyTorch would take for fixed."""

_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_FLOAT_NAMES: dict[torch.dtype, Literal["float32", "float16"]] = {torch.float32: "float32", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph and the tensors it declares."""

    role: Role
    model: ir.Model
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """All graphs of one precision, with what a manifest says of them."""

    graphs: tuple[TracedGraph, ...]
    state: tuple[StateTensor, ...] = ()
    cross: tuple[str, ...] = ()


def trace(module: nn.Module, task: Task, *, image_size: tuple[int, int] | None = None) -> TracedModel:
    """Traces a module, in the dtype of its parameters.

    Args:
        module: Follows the protocol of the task (docs/bring-your-own.md); in evaluation mode.
        task: The task.
        image_size: Height and width, for image_classification.

    Raises:
        SourceError: The module does not follow the protocol.
        TraceError: PyTorch cannot trace it.
    """
    if task is Task.GENERATION:
        return _trace_decoder(module, task)
    if task is Task.TRANSLATION:
        return _trace_encoder_decoder(module, task)
    if task is Task.IMAGE_CLASSIFICATION:
        assert image_size is not None, "an image model has its preprocessing"
        return _trace_classifier(module, (_spec("pixel_values", "float32", "batch", 3, *image_size),))
    ids = _spec("input_ids", "int64", "batch", "length")
    return _trace_classifier(module, (ids, _spec("attention_mask", "int64", "batch", "length")))


def _trace_classifier(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> TracedModel:
    graph = ClassifierGraph(module)
    with torch.inference_mode():
        classes = graph(*_example(inputs)).shape[-1]
    outputs = (_spec("logits", "float32", "batch", classes),)
    return TracedModel(graphs=(_trace_graph("model", graph, inputs, outputs),))


def _trace_decoder(module: nn.Module, task: Task) -> TracedModel:
    layers = probe_attention(module, task)
    state, past, present = _state_specs(layers, _float_name(module))
    inputs = (*_step_specs(), *past)
    outputs = (_logits_spec(vocabulary_size(module, task)), *present)
    graph = _trace_graph("decoder", DecoderGraph(module), inputs, outputs)
    return TracedModel(graphs=(graph,), state=state)


def _trace_encoder_decoder(module: nn.Module, task: Task) -> TracedModel:
    layers = probe_attention(module, task)
    float_name = _float_name(module)
    state, past, present = _state_specs(layers, float_name)
    ids = _spec("input_ids", "int64", "batch", "length")
    encoder_inputs = (ids, _spec("attention_mask", "int64", "batch", "length"))
    with torch.inference_mode():
        memory = cast("EncoderDecoder", module).encode(*_example(encoder_inputs))
        pairs = cast("EncoderDecoder", module).cross_keys_values(memory)
    shapes = {
        f"cross_{part}_{layer}": (tensor.shape[2], tensor.shape[3])
        for layer, pair in enumerate(pairs)
        for part, tensor in zip(("key", "value"), pair, strict=True)
    }
    encoder_outputs = tuple(_spec(n, float_name, "batch", h, "length", k) for n, (h, k) in shapes.items())
    cross = tuple(_spec(n, float_name, "sources", h, "source_length", k) for n, (h, k) in shapes.items())
    decoder_inputs = (*_step_specs(), *past, _spec("source_mask", "int64", "sources", "source_length"), *cross)
    decoder_outputs = (_logits_spec(vocabulary_size(module, task)), *present)
    return TracedModel(
        graphs=(
            _trace_graph("encoder", EncoderGraph(module), encoder_inputs, encoder_outputs),
            _trace_graph("decoder", CrossDecoderGraph(module, len(past)), decoder_inputs, decoder_outputs),
        ),
        state=state,
        cross=tuple(shapes),
    )


def probe_attention(module: nn.Module, task: Task) -> list[tuple[int, int]]:
    """Runs a decoder once and returns the key/value heads and head width of every layer.

    Raises:
        SourceError: It does not follow the protocol, or a head width is no multiple of 8.
    """
    layers: list[tuple[int, int]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.ndim != 4 or key.shape != value.shape or query.shape[2] % key.shape[2]:
            raise SourceError(
                f"attend was called with query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; it takes (B, T, H, K) and a number of key/value heads that divides H "
                "(docs/bring-your-own.md)"
            )
        if query.shape[3] % 8:
            raise SourceError(f"head_dim is {query.shape[3]}; it must be a multiple of 8")
        layers.append((key.shape[2], key.shape[3]))
        return query

    try:
        with torch.inference_mode():
            _run_once(module, task, attend)
    except (AttributeError, TypeError) as error:
        raise SourceError(f"{type(module).__name__} does not follow docs/bring-your-own.md: {error}") from error
    if not layers:
        raise SourceError(f"{type(module).__name__} never called attend; a decoder calls it once a layer")
    return layers


def vocabulary_size(module: nn.Module, task: Task) -> int:
    """Returns V, by running a decoder on two tokens."""
    with torch.inference_mode():
        return int(cast("Decoder", module).logits(_run_once(module, task, _no_attention)).shape[-1])


def _run_once(module: nn.Module, task: Task, attend: Attend) -> Tensor:
    """Runs a decoder on two tokens, without cross-attention: (1, 2, D)."""
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2).unsqueeze(0)
    if task is Task.GENERATION:
        return cast("Decoder", module).hidden_states(ids, positions, attend)
    return cast("EncoderDecoder", module).decode(ids, positions, attend, lambda query: query)


def _no_attention(query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
    return query


def _step_specs() -> tuple[TensorSpec, ...]:
    return (
        _spec("input_ids", "int64", "slots", "length"),
        _spec("position_ids", "int64", "slots", "length"),
        _spec("logits_positions", "int64", "slots", "logits_length"),
        _spec("seqlens_k", "int32", "slots"),
        _spec("total_sequence_length", "int32"),
    )


def _state_specs(
    layers: list[tuple[int, int]], float_name: str
) -> tuple[tuple[StateTensor, ...], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the state's tensors, the decoder's past inputs and its present outputs."""
    names = [(part, layer) for layer in range(len(layers)) for part in ("key", "value")]

    def specs(prefix: str) -> tuple[TensorSpec, ...]:
        return tuple(
            _spec(f"{prefix}_{part}_{layer}", float_name, "slots", layers[layer][0], "cache_length", layers[layer][1])
            for part, layer in names
        )

    past, present = specs("past"), specs("present")
    state = tuple(
        StateTensor(past=before.name, present=after.name, update="in_place")
        for before, after in zip(past, present, strict=True)
    )
    return state, past, present


def _logits_spec(vocabulary: int) -> TensorSpec:
    return _spec("logits", "float32", "slots", "logits_length", vocabulary)


def _spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})


def _float_name(module: nn.Module) -> str:
    return _FLOAT_NAMES[float_dtype(module)]


def _example(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Returns tensors that a graph can be traced with; masks are all ones, and everything else zeros."""
    return tuple(
        torch.full(
            [_EXAMPLE_SIZES[axis] if isinstance(axis, str) else axis for axis in spec.shape],
            int(spec.name.endswith("mask")),
            dtype=_TORCH_DTYPES[spec.dtype],
        )
        for spec in specs
    )


def _trace_graph(
    role: Role, graph: nn.Module, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> TracedGraph:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)
    named = graph.forward.__code__.co_argcount - 1  # the others come as one starred argument
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer warns of its own internals
            program = torch.onnx.export(
                graph.eval(),
                _example(inputs),
                dynamo=True,
                dynamic_shapes=(*shapes[:named], shapes[named:]) if len(shapes) > named else shapes,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        raise TraceError(f"{role}: PyTorch cannot trace {type(graph).__name__}: {error}") from error
    assert program is not None, "the tracer returns a program when it is given no file"
    model: ir.Model = program.model
    if role == "decoder":
        fuse(model)
    _tidy(model, inputs, outputs)
    return TracedGraph(role=role, model=model, inputs=inputs, outputs=outputs)


def _tidy(model: ir.Model, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Names the dynamic axes and drops what the tracer notes for its own debugging, such as stack traces."""
    by_name: dict[str | None, TensorSpec] = {spec.name: spec for spec in (*inputs, *outputs)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape(by_name[value.name].shape)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "headway"
    model.producer_version = None
    model.doc_string = model.graph.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def parameter_count(module: nn.Module) -> int:
    """Returns the number of trainable parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
