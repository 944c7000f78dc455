"""The graphs of a bundle as modules that can be traced: a model, with the attention of the graph injected.

Each returns its outputs by name; docs/architecture.md describes the tensors.

B rows of a batch, N sources, R rows of a step (slots), T tokens of a step, S source tokens, L positions whose logits
are asked for, D model width, H heads, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from headway_export.errors import SourceError
from headway_export.rewriting import MASKED_ATTENTION, MASKED_ATTENTION_DOMAIN
from headway_server.bundles import ALIGNMENT, IMAGE_EMBEDDINGS
from headway_training.models.parts.attention import (
    Kernel,
    RecordingKernel,
    Scoring,
    causal_attention,
    cross_attention,
    scaled_dot_product_attention,
)
from headway_training.models.protocols import (
    Decoder,
    EmbeddingClassifier,
    EncoderDecoder,
    HybridDecoder,
    ImageToText,
    RecurrentEncoderDecoder,
    SeeingDecoder,
    ShowsAttention,
    StatefulDecoder,
)

Outputs = dict[str, Tensor]


def float_dtype(module: nn.Module) -> torch.dtype:
    """Returns the dtype of a module's parameters."""
    return next(parameter.dtype for parameter in module.parameters())


def parameter_count(module: nn.Module) -> int:
    """Returns the number of parameters; one that is tied counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


# Models without state


def pooling_of(module: nn.Module) -> str | None:
    """Returns the pooling of a classifier that offers embeddings too (`EmbeddingClassifier`); None: it does not."""
    offers = callable(getattr(module, "logits_and_embedding", None))
    pooling = getattr(module, "pooling", None)
    return pooling if offers and isinstance(pooling, str) and pooling else None


def outputs_of(module: nn.Module, *inputs: Tensor) -> Outputs:
    """Runs a model without state and returns its outputs by name, floats as float32.

    A tensor is called `logits`; a mapping has names of its own. A module that offers embeddings gives `logits` and
    `embedding`.
    """
    if pooling_of(module) is not None:
        logits, embedding = cast("EmbeddingClassifier", module).logits_and_embedding(*inputs)
        found: Mapping[str, Tensor] = {"logits": logits, "embedding": embedding}
    else:
        returned = module(*inputs)
        found = returned if isinstance(returned, Mapping) else {"logits": returned}
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


class StatelessGraph(nn.Module):
    """Graph `model`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, first: Tensor, *rest: Tensor) -> Outputs:
        """Ids and mask (and types), int64 (B, T), or pixels, float32 (B, 3, height, width), to what the model gives."""
        if first.is_floating_point():
            first = first.to(float_dtype(self.module))
        return outputs_of(self.module, first, *rest)


# Attention of decoders


class CachedAttention:
    """Attention over a key/value cache, as one operator a layer: `com.microsoft::GroupQueryAttention`.

    The operator writes the keys and values of this step into the cache and attends over all of it, causally. In ONNX
    Runtime past and present may share memory. Only ONNX Runtime has this operator; the standard Attention of opset 24
    takes 2.79 ms a layer where this one takes 0.59 (32 rows, two cores).
    """

    def __init__(self, past: Sequence[Tensor], seqlens_k: Tensor, total_sequence_length: Tensor) -> None:
        """Takes the inputs of the step.

        Args:
            past: Key and value of each layer in turn, (R, G, cache_length, K).
            seqlens_k: (R,) int32, tokens of each row after this step, less one.
            total_sequence_length: () int32, the largest number of tokens of a row after this step.
        """
        self._past = past
        self._seqlens_k = seqlens_k
        self._total_sequence_length = total_sequence_length
        self._present: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: layers may share one, which is cut once

    @property
    def present(self) -> Outputs:
        """Key and value of each layer in turn, after the step."""
        return {
            f"present_{part}_{layer}": tensor
            for layer, pair in sorted(self._present.items())
            for part, tensor in zip(("key", "value"), pair, strict=True)
        }

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """(R, T, H, K), (R, T, G, K), (R, T, G, K) -> (R, T, H, K)."""
        past_key, past_value = self._past[2 * layer : 2 * layer + 2]
        inputs = (query.flatten(2), key.flatten(2), value.flatten(2), past_key, past_value)
        lengths: tuple[Tensor | None, ...] = (self._seqlens_k, self._total_sequence_length)
        if bias is not None or sinks is not None:
            lengths += (None, None, None, None if bias is None else self._of_keys(bias, query.shape[1]))
        if sinks is not None:
            lengths += (sinks,)
        attributes: dict[str, Any] = {"num_heads": query.shape[2], "kv_num_heads": key.shape[2]}
        given = {"scale": scale, "softcap": softcap, "local_window_size": window}
        attributes |= {name: value for name, value in given.items() if value is not None}
        context, *present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*inputs, *lengths),
            attributes,
            dtypes=(query.dtype, past_key.dtype, past_value.dtype),
            shapes=(inputs[0].shape, past_key.shape, past_value.shape),
            version=1,
        )
        self._present[layer] = (present[0], present[1])
        return context.reshape(query.shape)

    def _of_keys(self, bias: Tensor, length: int) -> Tensor:
        """Returns the part of a bias (., ., T or 1, S) that is for the keys that there are, for T queries.

        The operator takes no more, and no less.
        """
        if id(bias) not in self._biases:
            starts = torch.zeros(1, dtype=torch.int32)
            ends, axes = self._total_sequence_length.reshape(1), torch.full((1,), 3, dtype=torch.int32)
            cut = torch.onnx.ops.symbolic("Slice", (bias, starts, ends, axes), dtype=bias.dtype, shape=bias.shape)
            is_one = isinstance(bias.shape[2], int) and bias.shape[2] == 1
            self._biases[id(bias)] = (bias, cut.expand(-1, -1, length, -1) if is_one else cut)
        return self._biases[id(bias)][1]


class CrossAttention:
    """Attention of target tokens to encoded sources, several neighbouring rows a source.

    The rows of a source (its beams) attend together, as so many query positions, so that its keys and values are held
    and read once.
    """

    def __init__(self, cross: Sequence[Tensor], source_mask: Tensor, alignment_layer: int) -> None:
        """Takes what the encoder gave.

        Args:
            cross: Key and value of each layer in turn, (N, H, S, K).
            source_mask: (N, S), 1 at tokens.
            alignment_layer: The layer whose weights are kept.
        """
        self._cross = cross
        self._source_mask = source_mask
        self._alignment_layer = alignment_layer
        self.alignment = torch.empty(0)
        """(R, T, S) float32: the weights of one layer, averaged over its heads; 0 at padding."""

    def __call__(self, query: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        """(R, T, H, K) -> (R, T, H, K); an `AttendCross` that takes a scale alone."""
        scale = scoring.get("scale")
        key, value = self._cross[2 * layer : 2 * layer + 2]
        rows, length, heads, width = query.shape
        grouped = query.reshape(key.shape[0], -1, heads, width).transpose(1, 2)  # (N, H, R/N * T, K)
        scores = grouped @ key.transpose(2, 3) * (width**-0.5 if scale is None else scale)  # (N, H, R/N * T, S)
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(self._source_mask[:, None, None, :] == 0, lowest)
        weights = scores.softmax(dim=-1)  # (N, H, R/N * T, S)
        if layer == self._alignment_layer:
            self.alignment = weights.float().mean(dim=1).reshape(rows, length, -1)
        context: Tensor = (weights @ value).transpose(1, 2).reshape(query.shape)
        return context


class OperatorKernel:
    """`scaled_dot_product_attention` of whole texts or images as one operator, for the CPU.

    It is that of `CachedAttention`, without a cache and not causal, and takes a length a row in place of a mask. With
    fp32 numbers it runs on the CPU alone. Where keys are masked the graph gets both, the operator to be and what the
    plain operators compute; `ChooseAttention` keeps one of them, once the graph tells where the mask comes from.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        **scoring: Unpack[Scoring],
    ) -> Tensor:
        """The arguments and result are those of `scaled_dot_product_attention`, which computes what this cannot."""
        rows, length, num_heads, width = query.shape
        of_same_tokens = key.shape == value.shape and list(key.shape) == [rows, length, key.shape[2], width]
        masks_keys = mask is None or (mask.dtype is torch.bool and list(mask.shape) == [rows, 1, 1, length])
        is_plain = all(scoring.get(name) is None for name in ("bias", "softcap", "sinks"))
        if causal or not is_plain or width % 8 or not (of_same_tokens and masks_keys):
            return scaled_dot_product_attention(query, key, value, mask, causal=causal, **scoring)
        attributes: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": key.shape[2], "causal": 0}
        if (scale := scoring.get("scale")) is not None:
            attributes["scale"] = scale
        inputs = (query.flatten(2), key.flatten(2), value.flatten(2))
        if mask is not None:
            plain = scaled_dot_product_attention(query, key, value, mask, **scoring)
            of_graph = (mask, torch.full((), length, dtype=torch.int32), plain.flatten(2))
            context = torch.onnx.ops.symbolic(
                f"{MASKED_ATTENTION_DOMAIN}::{MASKED_ATTENTION}",
                (*inputs, *of_graph),
                attributes,
                dtype=query.dtype,
                shape=inputs[0].shape,
                version=1,
            )
            return context.reshape(query.shape)
        lasts = torch.full((rows,), length - 1, dtype=torch.int32)
        state = (rows, key.shape[2], length, width)
        context, *_ = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*inputs, None, None, lasts, torch.full((), length, dtype=torch.int32)),
            attributes,
            dtypes=(query.dtype,) * 3,
            shapes=(inputs[0].shape, state, state),
            version=1,
        )
        return context.reshape(query.shape)


# Decoders and encoders with attention


class DecoderGraph(nn.Module):
    """Graph `decoder` of a generation model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_positions: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        *past: Tensor,
    ) -> Outputs:
        """A step of (R, T) tokens: float32 logits (R, L, V), then the present state."""
        module = cast("Decoder", self.module)
        attend = CachedAttention(past, seqlens_k, total_sequence_length)
        hidden = module.hidden_states(input_ids, position_ids, attend)  # (R, T, D)
        return {"logits": _logits_at(module, hidden, logits_positions), **attend.present}


class SeeingDecoderGraph(nn.Module):
    """Graph `decoder` of a generation model whose prompts may have images."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_positions: Tensor, *further: Tensor) -> Outputs:
        """A step of (R, T) tokens, with the embeddings of M: float32 logits (R, L, V), then the present state."""
        module = cast("SeeingDecoder", self.module)
        seqlens_k, total_sequence_length, *rest = further
        count = 3 if module.has_grid_positions else 2
        attend = CachedAttention(rest[count:], seqlens_k, total_sequence_length)
        hidden = module.hidden_states_with_media(input_ids, position_ids, attend, rest[:count])  # (R, T, D)
        return {"logits": _logits_at(module, hidden, logits_positions), **attend.present}


class ImageEncoderGraph(nn.Module):
    """Graph `image_encoder` of such a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, pixel_values: Tensor) -> Outputs:
        """(B, 3, height, width) -> float32 embeddings (B, M, D)."""
        module = cast("SeeingDecoder", self.module)
        return {IMAGE_EMBEDDINGS: module.embed_images(pixel_values.to(float_dtype(self.module))).float()}


class StatefulDecoderGraph(nn.Module):
    """Graph `decoder` of a generation model with a state of fixed size."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: Tensor, logits_positions: Tensor, *past: Tensor) -> Outputs:
        """A step of (R, T) tokens: float32 logits (R, L, V), then the present state."""
        module = cast("StatefulDecoder", self.module)
        hidden, present = module.read(input_ids, list(past))  # (R, T, D)
        return {"logits": _logits_at(module, hidden, logits_positions), **_named_states(present)}


class HybridDecoderGraph(nn.Module):
    """Graph `decoder` of a generation model with a cache in some layers and states of fixed size beside it."""

    def __init__(self, module: nn.Module, num_states: int) -> None:
        super().__init__()
        self.module = module
        self.num_states = num_states

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_positions: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        *past: Tensor,
    ) -> Outputs:
        """A step of (R, T) tokens: float32 logits (R, L, V), then the present cache and the states behind it."""
        module = cast("HybridDecoder", self.module)
        cached, states = past[: -self.num_states], list(past[-self.num_states :])
        attend = CachedAttention(cached, seqlens_k, total_sequence_length)
        hidden, present = module.read_attending(input_ids, position_ids, attend, states)  # (R, T, D)
        return {"logits": _logits_at(module, hidden, logits_positions), **attend.present, **_named_states(present)}


def _named_states(states: Sequence[Tensor]) -> Outputs:
    return {f"present_state_{number}": state for number, state in enumerate(states)}


class EncoderGraph(nn.Module):
    """Graph `encoder` of a model that translates, or that writes captions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, first: Tensor, *rest: Tensor) -> Outputs:
        """Gives the cross-attention key and value of each layer, each (N, H, S, K).

        Of ids and mask, int64 (N, S), or of pixels, float32 (N, 3, height, width).
        """
        module = cast("EncoderDecoder | ImageToText", self.module)
        if first.is_floating_point():
            first = first.to(float_dtype(self.module))
        pairs = module.cross_keys_values(module.encode(first, *rest))
        return {
            f"cross_{part}_{layer}": tensor.transpose(1, 2).contiguous()  # (N, H, S, K)
            for layer, pair in enumerate(pairs)
            for part, tensor in zip(("key", "value"), pair, strict=True)
        }


class CrossDecoderGraph(nn.Module):
    """Graph `decoder` of a translation model."""

    def __init__(self, module: nn.Module, num_states: int, alignment_layer: int) -> None:
        super().__init__()
        self.module = module
        self.num_states = num_states
        self.alignment_layer = alignment_layer

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_positions: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        *tensors: Tensor,
    ) -> Outputs:
        """A step of (R, T) tokens; the past state, the source mask and the cross tensors follow as `tensors`."""
        module = cast("EncoderDecoder", self.module)
        past, (source_mask, *cross) = tensors[: self.num_states], tensors[self.num_states :]
        attend = CachedAttention(past, seqlens_k, total_sequence_length)
        attend_cross = CrossAttention(cross, source_mask, self.alignment_layer)
        hidden = module.decode(input_ids, position_ids, attend, attend_cross)  # (R, T, D)
        logits = _logits_at(module, hidden, logits_positions)
        return {"logits": logits, ALIGNMENT: attend_cross.alignment, **attend.present}


def _logits_at(
    module: Decoder | EncoderDecoder | HybridDecoder | StatefulDecoder, hidden: Tensor, positions: Tensor
) -> Tensor:
    """Logits of some positions: (R, T, D), (R, L) -> (R, L, V). The output projection is the dearest part of a step."""
    index = positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return module.logits(hidden.gather(1, index)).float()


# Recurrent encoder-decoders


class RecurrentEncoderGraph(nn.Module):
    """Graph `encoder` of a recurrent translation model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Others are the module's own affair, such as a decoder's.
        grus = [part for part in module.modules() if isinstance(part, nn.GRU) and GraphGRU.takes(part)]
        self.recurrences = nn.ModuleList(GraphGRU(gru) for gru in grus)
        self._places = {id(gru): place for place, gru in enumerate(grus)}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        """(N, S), (N, S) -> what every step reads, each (N, 1, S, .), and the first states, each (N, .).

        Raises:
            SourceError: The module recurs over another mask, which may have holes where the operator takes lengths, or
                by a GRU that the operator cannot be.
        """
        module = cast("RecurrentEncoderDecoder", self.module)

        def recur(gru: nn.GRU, inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            if mask is not attention_mask:
                raise SourceError(
                    f"{type(module).__name__}: encode_source called recur with a mask of its own; call it with the "
                    "attention_mask that it was given, as it is, since recur takes padding on the right alone"
                )
            if id(gru) not in self._places:
                raise SourceError("recur takes a bidirectional GRU of one layer, with biases and batch_first")
            states, last = self.recurrences[self._places[id(gru)]](inputs, mask)
            return states, last

        cross, states = module.encode_source(input_ids, attention_mask, recur)
        return {f"cross_{number}": tensor.unsqueeze(1) for number, tensor in enumerate(cross)} | {
            f"initial_state_{number}": state for number, state in enumerate(states)
        }


class GraphGRU(nn.Module):
    """A bidirectional GRU as one operator of ONNX, which takes each row's length: padding is not read.

    E is the width of the input, W that of the state.
    """

    def __init__(self, gru: nn.GRU) -> None:
        """Lays the weights of a GRU that it `takes` out as the operator has them: gates update, reset, candidate."""
        super().__init__()
        self.hidden_size = gru.hidden_size
        bias = torch.cat([self._of_both_directions(gru, name) for name in ("bias_ih", "bias_hh")], dim=1)
        self.register_buffer("input_weights", self._of_both_directions(gru, "weight_ih"))  # (2, 3W, E)
        self.register_buffer("state_weights", self._of_both_directions(gru, "weight_hh"))  # (2, 3W, W)
        self.register_buffer("biases", bias)  # (2, 6W)

    @staticmethod
    def takes(gru: nn.GRU) -> bool:
        """True of a bidirectional GRU of one layer with biases, rows first."""
        return gru.bidirectional and gru.num_layers == 1 and gru.bias and gru.batch_first

    @staticmethod
    def _of_both_directions(gru: nn.GRU, name: str) -> Tensor:
        """Returns a parameter of both directions, (2, 3W, ...)."""
        directions = []
        for suffix in ("_l0", "_l0_reverse"):
            reset, update, candidate = cast("Any", getattr(gru, name + suffix)).detach().chunk(3)
            directions.append(torch.cat((update, reset, candidate)))
        return torch.stack(directions)

    def forward(self, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(N, S, E), (N, S) -> (N, S, 2W), (2, N, W)."""
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
        return states.permute(2, 0, 1, 3).flatten(2), last  # (S, 2, N, W) -> (N, S, 2W)


class RecurrentDecoderGraph(nn.Module):
    """Graph `decoder` of a recurrent translation model."""

    def __init__(self, module: nn.Module, num_states: int) -> None:
        super().__init__()
        self.module = module
        self.num_states = num_states

    def forward(self, input_ids: Tensor, *tensors: Tensor) -> Outputs:
        """A step of (R, 1) tokens; the past states, the source mask and what the encoder gave follow as `tensors`."""
        module = cast("RecurrentEncoderDecoder", self.module)
        past, (source_mask, *cross) = tensors[: self.num_states], tensors[self.num_states :]
        sources = source_mask.shape[0]
        logits, present, weights = module.step(
            input_ids.reshape(sources, -1),  # (N, R/N)
            tuple(state.reshape(sources, -1, state.shape[-1]) for state in past),
            tuple(tensor.squeeze(1) for tensor in cross),
            source_mask,
        )
        return {
            "logits": logits.float().reshape(-1, 1, logits.shape[-1]),
            ALIGNMENT: weights.float().reshape(-1, 1, weights.shape[-1]),
            **{f"present_state_{number}": state.reshape(-1, state.shape[-1]) for number, state in enumerate(present)},
        }


# Attention weights


class AttentionGraph(nn.Module):
    """Graph `attention`: reads whole inputs, without a cache, and gives the attention weights of every layer.

    An output is a layer's weights, float32 (B, H, T, S). A stack of one kind gives `attention_<layer>`; an
    encoder-decoder gives `encoder_attention_<layer>`, `decoder_attention_<layer>` and `cross_attention_<layer>`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Takes a module whose encoder, where it has one, `shows_attention`."""
        super().__init__()
        self.recorder = RecordingKernel()
        self.module = with_kernel(module, self.recorder)

    def _recorded(self, name: str) -> Outputs:
        """Takes out what was recorded of a stack of layers, and names it."""
        weights, self.recorder.weights = self.recorder.weights, []
        return {f"{name}_{layer}": tensor.float() for layer, tensor in enumerate(weights)}


def shows_attention(module: nn.Module) -> bool:
    """True if a module follows `ShowsAttention`."""
    return kernel_problem(module) is None


def returns_attention(module: nn.Module) -> bool:
    """True if a module is made of layers of `transformers`, whose layers of attention return their weights."""
    return any(type(part).__module__.startswith("transformers.") for part in module.modules())


def kernel_problem(module: nn.Module) -> str | None:
    """Says why the attribute `kernel` of a module is no `Kernel`; None if it is one.

    Convolutions and many others have an attribute of that name.
    """
    if not hasattr(module, "kernel"):
        return "has no attribute kernel"
    kernel = module.kernel
    if isinstance(kernel, nn.Module) or not callable(kernel):
        return f"its attribute kernel is of the type {type(kernel).__name__}"
    try:
        parameters = list(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):  # a function of C
        return "its attribute kernel is a function that says nothing of its parameters"
    if parameters[:3] != ["query", "key", "value"]:
        return f"its attribute kernel is a function of {', '.join(parameters)}"
    return None


def with_kernel(module: nn.Module, kernel: Kernel) -> nn.Module:
    """Returns a module with the same weights and another kernel, its parts too, or the module itself if it has none."""
    if not shows_attention(module):
        return module
    other = copy.copy(module)
    other._modules = {  # noqa: SLF001 (the copy has those of the original)
        name: part if part is None else with_kernel(part, kernel)
        for name, part in module._modules.items()  # noqa: SLF001
    }
    cast("ShowsAttention", other).kernel = _Replacing(
        type(module).__name__, cast("ShowsAttention", module).kernel, kernel
    )
    return other


def replaces_kernel(graph: nn.Module) -> bool:
    """True if a kernel of a module's own is replaced, which a run of the graph holds against attention."""
    kernels = (vars(part).get("kernel") for part in graph.modules())
    return any(isinstance(kernel, _Replacing) and kernel.is_unknown for kernel in kernels)


class _Replacing:
    """A kernel in the place of a module's own, which is held against `scaled_dot_product_attention` where it is called.

    Not in a trace: a graph of one is run before it is traced (`replaces_kernel`).
    """

    def __init__(self, owner: str, own: Kernel, kernel: Kernel) -> None:
        self._owner, self._own, self._kernel = owner, own, kernel
        self.is_unknown = own is not scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **given: Any) -> Tensor:
        """The arguments and result are those of `scaled_dot_product_attention`.

        Raises:
            SourceError: The module's own kernel computes something else.
        """
        if self.is_unknown and not torch.compiler.is_exporting():
            generator = torch.Generator().manual_seed(0)
            q, k, v = (torch.randn(one.shape, generator=generator).to(one.dtype) for one in (query, key, value))
            found = self._own(q, k, v, mask, **given).float()
            expected = scaled_dot_product_attention(q, k, v, mask, **given).float()
            bound = _KERNEL_BOUND if query.dtype is torch.float32 else _HALF_KERNEL_BOUND
            if found.shape != expected.shape or not (found - expected).abs().max() <= bound:
                raise SourceError(
                    f"{self._owner}: its kernel computes something else than scaled_dot_product_attention, which takes "
                    "its place (docs/bring-your-own.md); give what it does besides as bias or scale, or give the "
                    "attribute another name"
                )
        return self._kernel(query, key, value, mask, **given)


_KERNEL_BOUND, _HALF_KERNEL_BOUND = 1e-4, 2e-2
"""Largest difference of numbers that are averages of standard normal ones, in fp32 and in fp16."""


class StatelessAttentionGraph(AttentionGraph):
    """Graph `attention` of a model without state."""

    def forward(self, first: Tensor, *rest: Tensor) -> Outputs:
        """The inputs of `StatelessGraph`."""
        if first.is_floating_point():
            first = first.to(float_dtype(self.module))
        if not shows_attention(self.module):
            return self._noted(first, *rest)
        outputs_of(self.module, first, *rest)
        weights = self._recorded("attention")
        count = int(getattr(self.module, "num_trailing_registers", 0))
        return {name: _without_last(one, count) for name, one in weights.items()} if count else weights

    def _noted(self, *inputs: Tensor) -> Outputs:
        """The same of a model whose layers of attention return their weights, as those of `transformers` do."""
        with noting_attention(self.module) as weights:
            outputs_of(self.module, *inputs)
        if any(one.shape[0] != inputs[0].shape[0] for one in weights):
            raise SourceError(
                f"{type(self.module).__name__}: attends within windows, which are no maps of whole inputs; leave out "
                "--attention"
            )
        count = int(getattr(self.module, "num_leading_registers", 0))
        return {f"attention_{layer}": _without_second(one.float(), count) for layer, one in enumerate(weights)}


@contextmanager
def noting_attention(module: nn.Module) -> Iterator[list[Tensor]]:
    """Notes the attention weights that layers return beside what they compute, (B, H, T, T) each, in their order."""
    found: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple | list) else ():
            is_square = isinstance(part, Tensor) and part.ndim == 4 and part.shape[2] == part.shape[3]
            if is_square and not any(part is one for one in found):  # a layer hands on what its part returned
                found.append(part)

    hooks = [part.register_forward_hook(note) for part in module.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _without_second(weights: Tensor, count: int) -> Tensor:
    """Leaves out `count` tokens behind the first, as `_without_last` does."""
    if not count:
        return weights
    for axis in (2, 3):
        first, rest = weights.narrow(axis, 0, 1), weights.narrow(axis, 1 + count, weights.shape[axis] - 1 - count)
        weights = torch.cat([first, rest], dim=axis)
    return weights / weights.sum(dim=-1, keepdim=True)


def _without_last(weights: Tensor, count: int) -> Tensor:
    """Leaves out the last `count` tokens of weights (B, H, T, T), and scales what is left of a row to a sum of 1."""
    left = weights[..., :-count, :-count]
    return left / left.sum(dim=-1, keepdim=True)


class DecoderAttentionGraph(AttentionGraph):
    """Graph `attention` of a generation model."""

    def forward(self, input_ids: Tensor) -> Outputs:
        """Texts, int64 (B, T)."""
        position_ids = _positions_of(input_ids)
        attend = _in_order(causal_attention(self.recorder), self.recorder)
        cast("Decoder", self.module).hidden_states(input_ids, position_ids, attend)
        return self._recorded("attention")


class EncoderDecoderAttentionGraph(AttentionGraph):
    """Graph `attention` of a translation model."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target_ids: Tensor) -> Outputs:
        """Sources and their mask, int64 (B, S), and translations from their first token on, int64 (B, T)."""
        module = cast("EncoderDecoder", self.module)
        memory = module.encode(input_ids, attention_mask)
        found = self._recorded("encoder_attention")
        cross = RecordingKernel()
        attend = _in_order(causal_attention(self.recorder), self.recorder)
        attend_cross = _in_order(cross_attention(module.cross_keys_values(memory), attention_mask, cross), cross)
        module.decode(target_ids, _positions_of(target_ids), attend, attend_cross)
        found |= self._recorded("decoder_attention")
        self.recorder.weights = cross.weights
        return found | self._recorded("cross_attention")


def _positions_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)  # (B, T)


def _in_order(attend: Any, recorder: RecordingKernel) -> Any:
    """Returns an `Attend` or `AttendCross` whose layers are called in order, as they are recorded.

    Raises:
        SourceError: When called, if they are not.
    """

    def attend_in_order(*tensors: Tensor, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        if layer != len(recorder.weights):
            raise SourceError(f"layer {layer} attends after {len(recorder.weights)} others; call layers in order")
        context: Tensor = attend(*tensors, layer=layer, **scoring)
        return context

    return attend_in_order
