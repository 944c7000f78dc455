"""Turns a module into the graphs of a bundle (docs/architecture.md gives their tensors).

Shapes: B rows, T tokens of a step, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from headway_export.errors import SourceError
from headway_export.graph_modules import (
    ClassifierGraph,
    CrossDecoderGraph,
    DecoderGraph,
    EncoderGraph,
)
from headway_export.recurrent import trace_recurrent
from headway_export.tracing import TracedModel, example_of, float_name, make_spec, trace_graph
from headway_server.bundles import ALIGNMENT, StateTensor, Task, TensorSpec
from headway_training.models.parts.attention import Attend, AttendCross
from headway_training.models.protocols import Decoder, EncoderDecoder, is_recurrent


def trace(
    module: nn.Module, task: Task, *, image_size: tuple[int, int] | None = None, has_token_types: bool = False
) -> TracedModel:
    """Traces a module, in the dtype of its parameters.

    Args:
        module: Follows the protocol of the task (docs/bring-your-own.md); in evaluation mode.
        task: The task.
        image_size: Height and width, for image_classification.
        has_token_types: Whether a text classifier is told which text of a pair a token is of.

    Raises:
        SourceError: The module does not follow the protocol.
        TraceError: PyTorch cannot trace it.
    """
    if task is Task.GENERATION:
        return _trace_decoder(module, task)
    if task is Task.TRANSLATION:
        return trace_recurrent(module) if is_recurrent(module) else _trace_encoder_decoder(module, task)
    if task is Task.IMAGE_CLASSIFICATION:
        assert image_size is not None, "an image model has its preprocessing"
        return _trace_classifier(module, (make_spec("pixel_values", "float32", "batch", 3, *image_size),))
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if has_token_types else ()))
    return _trace_classifier(module, tuple(make_spec(name, "int64", "batch", "length") for name in names))


def _trace_classifier(module: nn.Module, inputs: tuple[TensorSpec, ...]) -> TracedModel:
    graph = ClassifierGraph(module)
    with torch.inference_mode():
        logits, *embedding = graph(*example_of(inputs))
    *tokens, classes = logits.shape[1:]  # (B, C), or (B, T, C) where tokens are classified
    outputs = [make_spec("logits", "float32", "batch", *(["length"] if tokens else []), classes)]
    outputs += [make_spec("embedding", "float32", "batch", pooled.shape[-1]) for pooled in embedding]
    return TracedModel(graphs=(trace_graph("model", graph, inputs, tuple(outputs)),))


def _trace_decoder(module: nn.Module, task: Task) -> TracedModel:
    layers = probe_attention(module, task)
    state, past, present = _state_specs(layers, float_name(module))
    inputs = (*_step_specs(), *past)
    outputs = (_logits_spec(vocabulary_size(module, task)), *present)
    graph = trace_graph("decoder", DecoderGraph(module), inputs, outputs)
    return TracedModel(graphs=(graph,), state=state)


def _trace_encoder_decoder(module: nn.Module, task: Task) -> TracedModel:
    layers = probe_attention(module, task)
    dtype = float_name(module)
    state, past, present = _state_specs(layers, dtype)
    ids = make_spec("input_ids", "int64", "batch", "length")
    encoder_inputs = (ids, make_spec("attention_mask", "int64", "batch", "length"))
    with torch.inference_mode():
        memory = cast("EncoderDecoder", module).encode(*example_of(encoder_inputs))
        pairs = cast("EncoderDecoder", module).cross_keys_values(memory)
    shapes = {
        f"cross_{part}_{layer}": (tensor.shape[2], tensor.shape[3])
        for layer, pair in enumerate(pairs)
        for part, tensor in zip(("key", "value"), pair, strict=True)
    }
    encoder_outputs = tuple(make_spec(n, dtype, "batch", h, "length", k) for n, (h, k) in shapes.items())
    cross = tuple(make_spec(n, dtype, "sources", h, "source_length", k) for n, (h, k) in shapes.items())
    decoder_inputs = (*_step_specs(), *past, make_spec("source_mask", "int64", "sources", "source_length"), *cross)
    alignment = make_spec(ALIGNMENT, "float32", "slots", "length", "source_length")
    decoder_outputs = (_logits_spec(vocabulary_size(module, task)), alignment, *present)
    aligned_layer = alignment_layer(len(pairs))
    decoder = CrossDecoderGraph(module, len(past), aligned_layer)
    return TracedModel(
        graphs=(
            trace_graph("encoder", EncoderGraph(module), encoder_inputs, encoder_outputs),
            trace_graph("decoder", decoder, decoder_inputs, decoder_outputs),
        ),
        state=state,
        cross=tuple(shapes),
        alignment_layer=aligned_layer,
    )


def alignment_layer(num_layers: int) -> int:
    """Returns the layer, from 0, whose attention to the source aligns best: the last but one.

    Garg et al. 2019 (arXiv 1909.02074, section 3 and table 1) measured all of them, averaged over heads.
    """
    return max(num_layers - 2, 0)


def probe_attention(module: nn.Module, task: Task) -> list[tuple[int, int]]:
    """Runs a decoder once and returns the key/value heads and head width of every layer.

    Raises:
        SourceError: It does not follow the protocol, or a head width is not a multiple of 8.
    """
    probe = _Probe()
    try:
        with torch.inference_mode():
            _run_once(module, task, probe.attend, probe.attend_cross)
    except (AttributeError, TypeError) as error:
        raise SourceError(f"{type(module).__name__} does not follow docs/bring-your-own.md: {error}") from error
    calls = {"attend": [layer for layer, _ in probe.layers]}
    if task is Task.TRANSLATION:
        calls["attend_cross"] = probe.cross_layers
    for name, layers in calls.items():
        if not layers or sorted(layers) != list(range(len(layers))):
            raise SourceError(
                f"{type(module).__name__} called {name} for the layers {layers}; each layer of a decoder calls it once "
                "with its own number, from 0 (docs/bring-your-own.md)"
            )
    return [shape for _, shape in sorted(probe.layers)]


class _Probe:
    """Attention functions that compute nothing and note how they are called."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, tuple[int, int]]] = []
        """Layer, and its key/value heads and head width, of each call of `attend`."""
        self.cross_layers: list[int] = []
        """Layer of each call of `attend_cross`."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        bias: Tensor | None = None,
        scale: float | None = None,  # noqa: ARG002 (any will do)
    ) -> Tensor:
        if query.ndim != 4 or key.shape != value.shape or query.shape[2] % key.shape[2]:
            raise SourceError(
                f"attend was called with query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)}; it takes (B, T, H, K) and a number of key/value heads that divides H "
                "(docs/bring-your-own.md)"
            )
        if query.shape[3] % 8:
            raise SourceError(f"head_dim is {query.shape[3]}; it must be a multiple of 8")
        _refuse_bias(bias)
        self.layers.append((layer, (key.shape[2], key.shape[3])))
        return query

    def attend_cross(
        self,
        query: Tensor,
        *,
        layer: int,
        bias: Tensor | None = None,
        scale: float | None = None,  # noqa: ARG002 (any will do)
    ) -> Tensor:
        _refuse_bias(bias)
        self.cross_layers.append(layer)
        return query


def _refuse_bias(bias: Tensor | None) -> None:
    if bias is not None:
        raise SourceError("attention was called with a bias; the exported graph of a decoder takes none")


def vocabulary_size(module: nn.Module, task: Task) -> int:
    """Returns V, by running a decoder on two tokens."""
    probe = _Probe()
    with torch.inference_mode():
        hidden_states = _run_once(module, task, probe.attend, probe.attend_cross)
        return int(cast("Decoder", module).logits(hidden_states).shape[-1])


def _run_once(module: nn.Module, task: Task, attend: Attend, attend_cross: AttendCross) -> Tensor:
    """Runs a decoder on two tokens: (1, 2, D)."""
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2).unsqueeze(0)
    if task is Task.GENERATION:
        return cast("Decoder", module).hidden_states(ids, positions, attend)
    return cast("EncoderDecoder", module).decode(ids, positions, attend, attend_cross)


def _step_specs() -> tuple[TensorSpec, ...]:
    return (
        make_spec("input_ids", "int64", "slots", "length"),
        make_spec("position_ids", "int64", "slots", "length"),
        make_spec("logits_positions", "int64", "slots", "logits_length"),
        make_spec("seqlens_k", "int32", "slots"),
        make_spec("total_sequence_length", "int32"),
    )


def _state_specs(
    layers: list[tuple[int, int]], dtype: str
) -> tuple[tuple[StateTensor, ...], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the state's tensors, the decoder's past inputs and its present outputs."""
    names = [(part, layer) for layer in range(len(layers)) for part in ("key", "value")]

    def specs(prefix: str) -> tuple[TensorSpec, ...]:
        return tuple(
            make_spec(f"{prefix}_{part}_{layer}", dtype, "slots", layers[layer][0], "cache_length", layers[layer][1])
            for part, layer in names
        )

    past, present = specs("past"), specs("present")
    state = tuple(
        StateTensor(past=before.name, present=after.name, update="in_place")
        for before, after in zip(past, present, strict=True)
    )
    return state, past, present


def _logits_spec(vocabulary: int) -> TensorSpec:
    return make_spec("logits", "float32", "slots", "logits_length", vocabulary)


def parameter_count(module: nn.Module) -> int:
    """Returns the number of trainable parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())
