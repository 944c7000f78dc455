"""Encoders of texts, and decoders with a cache whose steps read and write numbers instead of one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.graphs import CachedAttention, CrossAttention, EncoderGraph, Outputs
from headway_export.tracing import (
    STEP_INPUTS,
    TracedModel,
    cache_specs,
    in_place,
    make_spec,
    read_sources,
    trace_graph,
)
from headway_server.bundles import TensorSpec
from headway_training.models.parts.attention import Attend, AttendCross


class StepWriter(Protocol):
    """A model that writes step by step. It encodes texts as an `EncoderDecoder` does."""

    def step(self, read: Sequence[Tensor], position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """Makes a step of R rows.

        Args:
            read: What it reads, (R, ...) each.
            position_ids: (R, 1).
            attend: Called once by each layer.
            attend_cross: Called once by each layer.

        Returns:
            (R, 1, V).
        """


def trace_steps(
    module: nn.Module, step: Sequence[TensorSpec], cache_shape: tuple[int, int, int], output: str
) -> TracedModel:
    """Traces a text encoder and a decoder.

    Args:
        module: An `EncoderDecoder` as far as texts are encoded, and a `StepWriter`.
        step: What a step reads.
        cache_shape: Layers, and heads and head width of a layer's cache.
        output: Name of what a step gives.
    """
    layers, heads, width = cache_shape
    encoder = trace_graph("encoder", module, EncoderGraph(module), [make_spec("input_ids", "int64", "batch", "length")])
    past = cache_specs(module, [(heads, width)] * layers)
    _, _, _, *lengths = STEP_INPUTS
    inputs = [*step, make_spec("position_ids", "int64", "slots", 1), *(make_spec(*spec) for spec in lengths)]
    inputs += [*past, *read_sources(encoder)]
    graph = StepGraph(module, num_read=len(step), num_states=len(past), output=output)
    decoder = trace_graph("decoder", module, graph, inputs)
    return TracedModel(
        graphs=(encoder, decoder), state=in_place(past), cross=tuple(spec.name for spec in encoder.outputs)
    )


def answer_of(name: str, compute: Callable[..., Tensor], *given: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Computes what a graph is compared with, by the name of its output."""
    with torch.inference_mode():
        return {name: compute(*(torch.from_numpy(np.ascontiguousarray(one)) for one in given)).numpy()}


class StepGraph(nn.Module):
    """Graph `decoder`."""

    def __init__(self, module: nn.Module, *, num_read: int, num_states: int, output: str) -> None:
        super().__init__()
        self.module = module
        self.num_read, self.num_states, self.output = num_read, num_states, output

    def forward(self, *inputs: Tensor) -> Outputs:
        """What a step reads, positions, lengths, the past state, the source mask and the cross tensors."""
        read, (position_ids, seqlens_k, total_sequence_length, *tensors) = (
            inputs[: self.num_read],
            inputs[self.num_read :],
        )
        past, (source_mask, *cross) = tensors[: self.num_states], tensors[self.num_states :]
        attend = CachedAttention(past, seqlens_k, total_sequence_length)
        attend_cross = CrossAttention(cross, source_mask, alignment_layer=-1)
        found = cast("StepWriter", self.module).step(read, position_ids, attend, attend_cross)
        return {self.output: found, **attend.present}
