"""The graphs of a recurrent encoder-decoder (docs/architecture.md gives their tensors).

Shapes: B rows, N sources, R slots, G rows of a source, S source tokens, E input width, H state width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from headway_export.errors import SourceError
from headway_export.tracing import TracedModel, example_of, float_name, make_spec, trace_graph
from headway_server.bundles import ALIGNMENT, StateTensor, TensorSpec
from headway_training.models.protocols import RecurrentEncoderDecoder
from headway_training.models.recurrent import recur_packed


def trace_recurrent(module: nn.Module) -> TracedModel:
    """Traces a model that follows `RecurrentEncoderDecoder`.

    Raises:
        SourceError: It does not.
        TraceError: PyTorch cannot trace it.
    """
    dtype = float_name(module)
    ids = make_spec("input_ids", "int64", "batch", "length")
    encoder_inputs = (ids, make_spec("attention_mask", "int64", "batch", "length"))
    cross_widths, state_widths, vocabulary = _probe(module, encoder_inputs)
    cross = [(f"cross_{number}", width) for number, width in enumerate(cross_widths)]
    state = tuple(
        StateTensor(
            past=f"past_state_{number}",
            present=f"present_state_{number}",
            update="replace",
            initial=f"initial_state_{number}",
        )
        for number in range(len(state_widths))
    )
    encoder_outputs = (
        *(make_spec(name, dtype, "batch", 1, "length", width) for name, width in cross),
        *(make_spec(str(s.initial), dtype, "batch", width) for s, width in zip(state, state_widths, strict=True)),
    )
    decoder_inputs = (
        make_spec("input_ids", "int64", "slots", 1),
        *(make_spec(s.past, dtype, "slots", width) for s, width in zip(state, state_widths, strict=True)),
        make_spec("source_mask", "int64", "sources", "source_length"),
        *(make_spec(name, dtype, "sources", 1, "source_length", width) for name, width in cross),
    )
    decoder_outputs = (
        make_spec("logits", "float32", "slots", 1, vocabulary),
        make_spec(ALIGNMENT, "float32", "slots", 1, "source_length"),
        *(make_spec(s.present, dtype, "slots", width) for s, width in zip(state, state_widths, strict=True)),
    )
    return TracedModel(
        graphs=(
            trace_graph("encoder", RecurrentEncoderGraph(module), encoder_inputs, encoder_outputs),
            trace_graph("decoder", RecurrentDecoderGraph(module, len(state)), decoder_inputs, decoder_outputs),
        ),
        state=state,
        cross=tuple(name for name, _ in cross),
        alignment_layer=0,
    )


def _probe(module: nn.Module, encoder_inputs: tuple[TensorSpec, ...]) -> tuple[list[int], list[int], int]:
    """Runs a model once: widths of what every step reads and of the states, and V.

    Raises:
        SourceError: It does not follow the protocol.
    """
    model = cast("RecurrentEncoderDecoder", module)
    input_ids, mask = example_of(encoder_inputs)
    try:
        with torch.inference_mode():
            cross, first = model.encode_source(input_ids, mask, recur_packed)
            states = tuple(state[:, None] for state in first)
            logits, following, weights = model.step(input_ids[:, :1], states, cross, mask)
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(f"{type(module).__name__} does not follow docs/bring-your-own.md: {error}") from error
    if not first or [state.shape for state in following] != [state.shape for state in states]:
        raise SourceError(
            f"{type(module).__name__}: step was given states {[tuple(s.shape) for s in states]} and returned "
            f"{[tuple(s.shape) for s in following]}; it returns at least one, each of the shape it was given"
        )
    if weights.shape != (*input_ids[:, :1].shape, mask.shape[1]):
        raise SourceError(
            f"{type(module).__name__}: step returned attention of {tuple(weights.shape)}; it returns "
            f"{(*input_ids[:, :1].shape, mask.shape[1])}, a weight a source token"
        )
    return [tensor.shape[-1] for tensor in cross], [state.shape[-1] for state in first], logits.shape[-1]


class RecurrentEncoderGraph(nn.Module):
    """Graph `encoder`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        grus = [part for part in module.modules() if isinstance(part, nn.GRU)]
        self.recurrences = nn.ModuleList(GraphGRU(gru) for gru in grus)
        self._places = {id(gru): place for place, gru in enumerate(grus)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """(N, S), (N, S) -> what every step reads, each (N, 1, S, .), and the first states, each (N, H)."""
        module = cast("RecurrentEncoderDecoder", self.module)
        cross, states = module.encode_source(input_ids, attention_mask, self._recur)
        return (*(tensor.unsqueeze(1) for tensor in cross), *states)

    def _recur(self, gru: nn.GRU, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.recurrences[self._places[id(gru)]](inputs, attention_mask)
        return states, last


class GraphGRU(nn.Module):
    """A bidirectional GRU as one operator of ONNX, which takes each row's length: padding is not read."""

    def __init__(self, gru: nn.GRU) -> None:
        """Lays the weights out as the operator takes them: gates in the order update, reset, candidate.

        Raises:
            SourceError: It is not a bidirectional GRU of one layer with biases, rows first.
        """
        super().__init__()
        if not (gru.bidirectional and gru.num_layers == 1 and gru.bias and gru.batch_first):
            raise SourceError("recur takes a bidirectional GRU of one layer, with biases and batch_first")
        self.hidden_size = gru.hidden_size
        weights = {name: self._of_both_directions(gru, name) for name in ("weight_ih", "weight_hh")}
        bias = torch.cat([self._of_both_directions(gru, name) for name in ("bias_ih", "bias_hh")], dim=1)
        self.register_buffer("input_weights", weights["weight_ih"])  # (2, 3H, E)
        self.register_buffer("state_weights", weights["weight_hh"])  # (2, 3H, H)
        self.register_buffer("biases", bias)  # (2, 6H)

    @staticmethod
    def _of_both_directions(gru: nn.GRU, name: str) -> Tensor:
        """Returns a parameter of both directions, (2, 3H, ...)."""
        directions = []
        for suffix in ("_l0", "_l0_reverse"):
            reset, update, candidate = cast("Any", getattr(gru, name + suffix)).detach().chunk(3)
            directions.append(torch.cat((update, reset, candidate)))
        return torch.stack(directions)

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(N, S, E), (N, S) -> (N, S, 2H), (2, N, H)."""
        rows, length, _ = inputs.shape
        lengths = attention_mask.sum(dim=1).to(torch.int32)
        weights = (self.input_weights, self.state_weights, self.biases)
        states, last = torch.onnx.ops.symbolic_multi_out(
            "GRU",
            (inputs.transpose(0, 1), *cast("tuple[Tensor, ...]", weights), lengths),
            {"hidden_size": self.hidden_size, "direction": "bidirectional", "linear_before_reset": 1},
            dtypes=(inputs.dtype, inputs.dtype),
            shapes=((length, 2, rows, self.hidden_size), (2, rows, self.hidden_size)),
        )
        return states.permute(2, 0, 1, 3).flatten(2), last  # (S, 2, N, H) -> (N, S, 2H)


class RecurrentDecoderGraph(nn.Module):
    """Graph `decoder`."""

    def __init__(self, module: nn.Module, num_states: int) -> None:
        super().__init__()
        self.module = module
        self.num_states = num_states

    def forward(self, input_ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """A step of (R, 1) tokens; the past states, the source mask and what the encoder gave follow as `tensors`."""
        module = cast("RecurrentEncoderDecoder", self.module)
        past, (source_mask, *cross) = tensors[: self.num_states], tensors[self.num_states :]
        sources = source_mask.shape[0]
        logits, present, weights = module.step(
            input_ids.reshape(sources, -1),  # (N, G)
            tuple(state.reshape(sources, -1, state.shape[-1]) for state in past),
            tuple(tensor.squeeze(1) for tensor in cross),
            source_mask,
        )
        return (
            logits.float().reshape(-1, 1, logits.shape[-1]),
            weights.float().reshape(-1, 1, weights.shape[-1]),
            *(state.reshape(-1, state.shape[-1]) for state in present),
        )
