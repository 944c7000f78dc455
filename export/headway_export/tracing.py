"""Turns a module into the graphs of a bundle, with the tensors that a manifest declares for them.

The inputs of a graph follow from its task. Its outputs are declared by the graph itself, at two sets of sizes: an axis
that changes is named after the axis of the inputs that it changes with.

B rows, T tokens of a step, H heads, G key/value heads, K head width.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from types import MappingProxyType
from typing import Any, Final, TypeAlias, Unpack, cast

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.errors import SourceError, TraceError, reason_of
from headway_export.fusing import FuseNormalizations, FuseRotations
from headway_export.graphs import OperatorKernel, float_dtype, replaces_kernel, shows_attention, with_kernel
from headway_export.rewriting import (
    ChooseAttention,
    ChunkAttention,
    Declare,
    FuseAttention,
    GatherAsked,
    ShortenCaches,
    chunk_length,
    rewrite,
)
from headway_export.run_memory import run_bytes
from headway_export.tasks.table import task_of
from headway_export.tasks.task import ExportTask
from headway_server.bundles import (
    GraphRole,
    SoundPreprocessing,
    StateTensor,
    Task,
    TensorSpec,
    WordBoxes,
    attention_layers,
)
from headway_training.models.parts.attention import TextScoring
from headway_training.models.protocols import Decoder, EncoderDecoder, HybridDecoder, decoder_kind

OPSET = 21
Role: TypeAlias = GraphRole

_TRACED_SIZES = {
    "batch": 2,
    "length": 5,
    "slots": 4,
    "cache_length": 16,
    "logits_length": 2,
    "sources": 2,
    "source_length": 7,
    "prompts": 6,
    "points": 4,
    "masks": 3,
    "media": 9,
    "rows": 6,
    "columns": 5,
    "height": 224,
    "width": 448,
    "samples": 4400,
    "frames": 100,
}
"""Sizes that a graph is traced at. Not 0 or 1, which PyTorch would take for fixed. The samples make an odd number of
frames, which SEW fills up to pairs. Sides of images are whole patches of 14 and of 32 pixels."""
_OTHER_SIZES = {
    "batch": 3,
    "length": 4,
    "slots": 6,
    "cache_length": 24,
    "logits_length": 1,
    "sources": 3,
    "source_length": 6,
    "prompts": 7,
    "points": 2,
    "masks": 2,
    "media": 8,
    "rows": 4,
    "columns": 7,
    "height": 448,
    "width": 224,
    "samples": 5200,
    "frames": 120,
}
"""Sizes that it is run at besides, to find the axes of its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """A graph."""

    role: Role
    model: ir.Model
    run_bytes: int | None = None
    """Memory of a run with one text as long as the model reads, or with one window of sound; None for a model of short
    texts, and of other inputs."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it reads."""
        return tuple(_spec_of(value) for value in self.model.graph.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors it gives."""
        return tuple(_spec_of(value) for value in self.model.graph.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """All graphs of one precision, with what a manifest says of them."""

    graphs: tuple[TracedGraph, ...]
    """Those that serve."""
    attention: TracedGraph | None = None
    """What gives the attention weights, where it was asked for."""
    state: tuple[StateTensor, ...] = ()
    cross: tuple[str, ...] = ()
    alignment_layer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceable:
    """What is traced; the fields are the arguments of `trace`."""

    module: nn.Module
    served: nn.Module
    """The module, whose layers attend by an operator for the CPU where that was asked for."""
    image_size: tuple[int | str, int | str] | None
    audio_size: tuple[int, int] | None
    sound: SoundPreprocessing | None
    has_token_types: bool
    word_boxes: WordBoxes | None
    known: TracedModel | None

    @property
    def pixels(self) -> TensorSpec:
        """The images that it reads."""
        assert self.image_size is not None, "a model of images has its preprocessing"
        return make_spec("pixel_values", "float32", "batch", 3, *self.image_size)

    @property
    def heard(self) -> TensorSpec:
        """The sounds that it reads whole."""
        assert self.sound is not None, "a model of sounds has their preprocessing"
        return make_spec(self.sound.input_name, "float32", "batch", *self.sound.axes)


def trace(
    module: nn.Module,
    task: Task,
    *,
    image_size: tuple[int | str, int | str] | None = None,
    audio_size: tuple[int, int] | None = None,
    sound: SoundPreprocessing | None = None,
    has_token_types: bool = False,
    word_boxes: WordBoxes | None = None,
    attention: bool = False,
    for_cpu: bool = False,
    known: TracedModel | None = None,
) -> TracedModel:
    """Traces a module, in the dtype of its parameters.

    Args:
        module: Follows the protocol of the task (docs/bring-your-own.md); in evaluation mode.
        task: The task.
        image_size: Height and width, for images: numbers, or names of axes.
        audio_size: Mel bins and frames of a window, for audio that an encoder reads.
        sound: Preprocessing of audio that a model without a decoder reads.
        has_token_types: True if a text classifier reads which text of a pair each token belongs to.
        word_boxes: The boxes that a token classifier reads; None: it reads none.
        attention: True to trace what gives the attention weights too.
        for_cpu: True to have layers that attend to whole inputs do so by an operator that runs on the CPU alone.
        known: The same module traced without `for_cpu`: graphs that are the same with it are taken from there.

    Raises:
        SourceError: The module does not follow the protocol.
        TraceError: PyTorch cannot trace it.
    """
    exported = task_of(task)
    longest = exported.longest_text(module)
    for_cpu = for_cpu and chunk_length(longest) == longest  # the operator holds the scores of all queries
    if attention and exported.shows_no_attention is not None:
        raise SourceError(f"{task}: {exported.shows_no_attention}; leave out --attention")
    if attention:
        exported.check_attention(module)
    asked = Traceable(
        module=module,
        served=with_kernel(module, OperatorKernel()) if for_cpu else module,
        image_size=image_size,
        audio_size=audio_size,
        sound=sound,
        has_token_types=has_token_types,
        word_boxes=word_boxes,
        known=known,
    )
    traced = exported.trace(asked)
    if not attention:
        return traced
    shown = known.attention if known is not None else None
    return replace(traced, attention=shown or _trace_attention(exported, asked))


def _trace_attention(exported: ExportTask, asked: Traceable) -> TracedGraph:
    """Traces what gives the attention weights.

    Raises:
        SourceError: Its layers cannot be made to show them.
    """
    module = asked.module
    traced = trace_graph("attention", module, exported.attention_graph(module), exported.attention_inputs(asked))
    if not attention_layers(traced.outputs):
        name = type(module).__name__
        how = "its layers returned no attention weights"
        if shows_attention(module):
            how = "never called its kernel with (B, T, H, K)"
        raise SourceError(f"{name}: {how}, so there is no attention to show; leave out --attention")
    return traced


# Models with state

CACHED: Final = ("decoder", "coarse_decoder")
"""Roles of graphs that read a cache."""
STEP_INPUTS = (
    ("input_ids", "int64", "slots", "length"),
    ("position_ids", "int64", "slots", "length"),
    ("logits_positions", "int64", "slots", "logits_length"),
    ("seqlens_k", "int32", "slots"),
    ("total_sequence_length", "int32"),
)
SOURCE_MASK = ("source_mask", "int64", "sources", "source_length")


def alignment_layer(num_layers: int) -> int:
    """Returns the layer, from 0, whose attention to the source aligns best: the last but one.

    Garg et al. 2019 (arXiv 1909.02074, section 3 and table 1) measured all of them, averaged over heads.
    """
    return max(num_layers - 2, 0)


def past_specs(module: nn.Module, *, has_source: bool) -> list[TensorSpec]:
    """Declares the key and the value of each layer's cache; errors are those of `probe_attention`."""
    return cache_specs(module, probe_attention(module, has_source=has_source))


def cache_specs(module: nn.Module, shapes: Sequence[tuple[int, int]]) -> list[TensorSpec]:
    """Declares the key and the value of each layer's cache, with its key/value heads and head width."""
    dtype = str(float_dtype(module)).removeprefix("torch.")
    return [
        make_spec(f"past_{part}_{layer}", dtype, "slots", heads, "cache_length", width)
        for layer, (heads, width) in enumerate(shapes)
        for part in ("key", "value")
    ]


def read_sources(encoder: TracedGraph) -> list[TensorSpec]:
    """Declares what a decoder reads of encoded sources: their mask, and what the encoder gives of each layer.

    It reads sources of any length, those of an image or of audio too, which have always as many positions.
    """
    return [
        make_spec(*SOURCE_MASK),
        *(
            make_spec(spec.name, spec.dtype, "sources", spec.shape[1], "source_length", spec.shape[3])
            for spec in encoder.outputs
        ),
    ]


def in_place(past: Sequence[TensorSpec], windows: Mapping[str, int] = MappingProxyType({})) -> tuple[StateTensor, ...]:
    """Describes a state whose past and present share their memory; some have a window, by the name of the past."""
    return tuple(
        StateTensor(
            past=spec.name,
            present=spec.name.replace("past", "present"),
            update="in_place",
            window=windows.get(spec.name),
        )
        for spec in past
    )


def caches_of(decoder: TracedGraph, past: Sequence[TensorSpec], *, max_length: int) -> tuple[StateTensor, ...]:
    """Gives layers with a window a cache of that size and describes the caches, of texts of `max_length` tokens."""
    shortening = ShortenCaches(max_length)
    rewrite(decoder.model, shortening)
    return in_place(past, shortening.windows)


def probe_attention(module: nn.Module, *, has_source: bool) -> list[tuple[int, int]]:
    """Runs a decoder once and returns the key/value heads and head width of every layer.

    Raises:
        SourceError: It does not follow the protocol, or a head width is not a multiple of 8.
    """
    probe = _Probe()
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2).unsqueeze(0)
    with following_the_protocol(module):
        if has_source:
            cast("EncoderDecoder", module).decode(ids, positions, probe, probe)
        elif decoder_kind(module) is HybridDecoder:
            hybrid = cast("HybridDecoder", module)
            hybrid.read_attending(ids, positions, probe, hybrid.first_states(1))
        else:
            cast("Decoder", module).hidden_states(ids, positions, probe)
    calls = {"attend": [layer for layer, _ in probe.layers]}
    if has_source:
        calls["attend_cross"] = probe.cross_layers
    for name, layers in calls.items():
        if not layers or sorted(layers) != list(range(len(layers))):
            raise SourceError(
                f"{type(module).__name__} called {name} for the layers {layers}; each layer of a decoder calls it once "
                "with its own number, from 0 (docs/bring-your-own.md)"
            )
    return [shape for _, shape in sorted(probe.layers)]


class _Probe:
    """Attention that computes nothing and notes how it is called; without key and value it is attention to a source."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, tuple[int, int]]] = []
        """Layer, and its key/value heads and head width, of each call of `attend`."""
        self.cross_layers: list[int] = []
        """Layer of each call of `attend_cross`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        layer: int,
        **scoring: Unpack[TextScoring],
    ) -> Tensor:
        is_cross = key is None or value is None
        given = [name for name, value in scoring.items() if value is not None]
        bias = scoring.get("bias")
        if bias is not None and not is_cross and bias.ndim != 4:
            raise SourceError(
                f"attend was called with a bias of shape {tuple(bias.shape)}; it takes (B, H, T, S), whose axes may "
                "be 1 but the last, of all positions that there may be (docs/bring-your-own.md)"
            )
        if further := [name for name in given if name != "scale"] if is_cross else []:
            raise SourceError(
                f"attention to a source was called with {further[0]}; the exported graph of a decoder takes none"
            )
        if key is None or value is None:
            self.cross_layers.append(layer)
            return query
        if query.ndim != 4 or key.shape != value.shape or query.shape[2] % key.shape[2]:
            raise SourceError(
                f"attend was called with query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; it takes (B, T, H, K) and a number of key/value heads that divides H "
                "(docs/bring-your-own.md)"
            )
        if query.shape[3] % 8:
            raise SourceError(f"head_dim is {query.shape[3]}; it must be a multiple of 8")
        self.layers.append((layer, (key.shape[2], key.shape[3])))
        return query


# Any graph


def make_spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    """Declares a tensor; a number is a fixed axis, a name a dynamic one."""
    return TensorSpec.model_validate({"name": name, "dtype": dtype, "shape": shape})


def _spec_of(value: ir.Value) -> TensorSpec:
    assert value.dtype is not None, "the tracer gives inputs and outputs types"
    assert value.shape is not None, "inputs and outputs are declared"
    shape = (axis if isinstance(axis, int) else str(axis.value) for axis in value.shape)
    dtype = "string" if value.dtype == ir.DataType.STRING else value.dtype.numpy().name
    return make_spec(str(value.name), dtype, *shape)


@contextmanager
def following_the_protocol(module: nn.Module) -> Iterator[None]:
    """Runs a module without gradients.

    Raises:
        SourceError: The module raised something: it does not follow the protocol of its task.
    """
    try:
        with torch.inference_mode():
            yield
    except SourceError:
        raise
    except Exception as error:  # whatever the module raises
        raise SourceError(
            f"{type(module).__name__} does not follow docs/bring-your-own.md: {reason_of(error)}"
        ) from error


def example_of(specs: Sequence[TensorSpec], sizes: Mapping[str, int] = _TRACED_SIZES) -> tuple[Tensor, ...]:
    """Returns inputs of a graph, at the sizes of a trace by default; masks are all ones, and everything else zeros."""
    return tuple(
        torch.full(
            [sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape],
            int(spec.name.endswith("mask")),
            dtype=getattr(torch, spec.dtype),
        )
        for spec in specs
    )


def declare_outputs(module: nn.Module, graph: nn.Module, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Runs a graph at two sets of sizes and declares what it gives.

    Raises:
        SourceError: The module does not follow its protocol, or an axis is neither fixed nor one of the inputs'.
    """
    with following_the_protocol(module):
        traced, other = (_shapes_of(graph, inputs, sizes) for sizes in (_TRACED_SIZES, _OTHER_SIZES))
    return _declare(module, inputs, traced, other)


_Shapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Types and shapes of outputs, by name."""


def _declare(module: nn.Module, inputs: Sequence[TensorSpec], traced: _Shapes, other: _Shapes) -> list[TensorSpec]:
    """Declares outputs whose shapes are known for the sizes of a trace and for others; the error is said above."""
    names = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    by_sizes = {(_TRACED_SIZES[name], _OTHER_SIZES[name]): name for name in names}
    specs = []
    for name, (dtype, axes) in traced.items():
        shape: list[int | str] = []
        for sizes in zip(axes, other[name][1], strict=True):
            if sizes[0] != sizes[1] and sizes not in by_sizes:
                raise SourceError(
                    f"{type(module).__name__}: an axis of output {name} is {sizes[0]} and {sizes[1]} for inputs of "
                    f"{ {name: (_TRACED_SIZES[name], _OTHER_SIZES[name]) for name in sorted(names)} }; an axis is "
                    "fixed, or as long as one of the inputs'"
                )
            shape.append(sizes[0] if sizes[0] == sizes[1] else by_sizes[sizes])
        specs.append(make_spec(name, dtype, *shape))
    return specs


def _shapes_of(graph: nn.Module, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> _Shapes:
    """Runs a graph and returns types and shapes of its outputs, by name; the outputs themselves may be large.

    It is run on tensors without values: with them, two runs of the denoiser of Stable Diffusion 1.5 take 90 s. Where a
    module reads values, to branch by them or by a library other than PyTorch, it is run with them.
    """
    found: Mapping[str, Tensor]
    try:
        from headway_export.shortcuts import without_values  # noqa: PLC0415 (it needs a private name)

        with torch.inference_mode(False), torch.no_grad(), without_values(), _kept(graph):
            found = graph(*example_of(inputs, sizes))
    except Exception:  # whatever needs values raises; what else is wrong shows itself again
        found = graph(*example_of(inputs, sizes))
    return {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in found.items()}


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Gives back to a module and its parts the attributes that they began with, and what was in mappings of them."""
    held = [own for part in module.modules() for own in (part.__dict__, *part.__dict__.values())]
    before = [(own, dict(own)) for own in held if isinstance(own, dict)]
    try:
        yield
    finally:
        for now, then in before:
            now.clear()
            now.update(then)


class _Positional(nn.Module):
    """A graph for the tracer, which wants outputs in order and not by name."""

    def __init__(self, graph: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.traced = graph  # not `graph`, which torch's own modules have
        self._names = names
        """Of the outputs, written as the graph runs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.traced(*inputs)
        self._names[:] = outputs
        return tuple(outputs.values())


def trace_graph(
    role: Role,
    module: nn.Module,
    graph: nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    outputs: Sequence[TensorSpec] | None = None,
    example: tuple[Tensor, ...] | None = None,
    longest: int = 0,
) -> TracedGraph:
    """Traces a graph of a module whose inputs are, in order, those that are declared.

    Args:
        role: Of the graph.
        module: What it is made from.
        graph: What is traced.
        inputs: What it reads.
        outputs: What it gives; None: found by the trace, or by runs where that leaves an axis open.
        example: Inputs to trace it at; None: ones and zeros.
        longest: Most tokens of a text; a model of long ones attends in chunks, and the memory of a run is counted.

    Raises:
        SourceError: The module does not follow its protocol.
        TraceError: PyTorch cannot trace it.
    """
    graph = graph.eval()
    if outputs is None and replaces_kernel(graph):
        outputs = declare_outputs(module, graph, inputs)
    names: list[str] = []
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple({axis: dynamic for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs)
    try:
        # Where gradients are kept, a module's own `torch.no_grad()` becomes a graph within the graph.
        with (
            _shortcuts(),
            torch.no_grad(),
            warnings.catch_warnings(),
            redirect_stderr(StringIO()),  # it prints graphs that it fails on
            _without_log(),
        ):
            warnings.simplefilter("ignore")  # the tracer warns of its own internals
            program = torch.onnx.export(
                _Positional(graph, names),
                example_of(inputs, _TRACED_SIZES) if example is None else example,
                dynamo=True,
                dynamic_shapes=(shapes,),
                input_names=[spec.name for spec in inputs],
                output_names=names,
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        if outputs is None:
            declare_outputs(module, graph, inputs)  # which says what is wrong with a module that does not run
        reason = reason_of(error.__cause__ or error)  # its own words are advice about its steps
        raise TraceError(f"{role}: PyTorch cannot trace {type(module).__name__}: {reason}") from error
    assert program is not None, "the tracer returns a program when it is given no file"
    model: ir.Model = program.model
    if outputs is None:
        outputs = _read_outputs(model, module, inputs) or declare_outputs(module, graph, inputs)
    _share_weights(model, module)
    rewrite(model, ChooseAttention(), FuseAttention())
    if role in CACHED:
        rewrite(model, GatherAsked())
    taken = None
    if chunk_length(longest) < longest:
        rewrite(model, ChunkAttention())
        batch, length = (str(axis) for axis in model.graph.inputs[0].shape or ())
        taken = run_bytes(model, {batch: 1, length: longest, ChunkAttention.CHUNK: chunk_length(longest)})
    rewrite(model, FuseNormalizations(), FuseRotations(), Declare((*inputs, *outputs)))
    return TracedGraph(role=role, model=model, run_bytes=taken)


def _read_outputs(model: ir.Model, module: nn.Module, inputs: Sequence[TensorSpec]) -> list[TensorSpec] | None:
    """Declares what a graph gives as the tracer has found it; None if an axis does not follow from those of the inputs.

    Raises:
        SourceError: An axis is neither fixed nor one of the inputs'.
    """
    traced, other = (_found_shapes(model, inputs, sizes) for sizes in (_TRACED_SIZES, _OTHER_SIZES))
    return None if traced is None or other is None else _declare(module, inputs, traced, other)


def _found_shapes(model: ir.Model, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> _Shapes | None:
    """Returns types and shapes of a graph's outputs for inputs of some sizes, by name; None if the tracer lacks one."""
    known = {
        axis.value: sizes[name]
        for value, spec in zip(model.graph.inputs, inputs, strict=True)
        for axis, name in zip(value.shape or (), spec.shape, strict=True)
        if isinstance(name, str) and isinstance(axis, ir.SymbolicDim) and axis.value is not None
    }
    found: _Shapes = {}
    for value in model.graph.outputs:
        if value.dtype is None or value.shape is None:
            return None
        axes = [axis if isinstance(axis, int) else axis.evaluate(known) for axis in value.shape]
        if not all(isinstance(axis, int) for axis in axes):
            return None
        found[str(value.name)] = value.dtype.numpy().name, cast("tuple[int, ...]", tuple(axes))
    return found


@contextmanager
def _without_log() -> Iterator[None]:
    """Leaves what PyTorch's exporter warns of its own parts out of the log."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shortcuts() -> AbstractContextManager[None]:
    """Returns what spares PyTorch's tracer work as long as it is open: nothing, where PyTorch has other inner parts."""
    try:
        from headway_export.shortcuts import shortcuts  # noqa: PLC0415 (it needs private names, and nothing needs it)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"torch {torch.__version__} has other inner parts than the exporter knows ({error}): models are traced "
            "without shortcuts, which takes up to three times as long",
            stacklevel=2,
        )
        return nullcontext()
    return shortcuts()


def _share_weights(model: ir.Model, module: nn.Module) -> None:
    """Makes the weights that the tracer has transposed views of the module's own, of which it makes copies."""
    weights: defaultdict[tuple[int, ...], list[NDArray[Any]]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.ndim == 2 and parameter.dtype is not torch.bfloat16:  # which NumPy does not have
            transposed = parameter.detach().numpy().T
            weights[transposed.shape].append(transposed)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or (shape := tuple(tensor.shape.numpy())) not in weights:
            continue
        array = tensor.numpy()
        for weight in weights[shape]:
            is_same = weight.dtype == array.dtype and np.array_equal(weight[0], array[0])
            if is_same and np.array_equal(weight, array):
                value.const_value = ir.tensor(weight, name=value.name)
                break
