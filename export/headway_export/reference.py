"""What the module computes in PyTorch: every input whole and alone, without a cache or padding.

Exported graphs are held against it, and the scales of an int8 cache are taken from it.

T tokens, S source tokens, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.graphs import attention_graph, outputs_of
from headway_export.inputs import Inputs
from headway_export.rewriting import LayerRange
from headway_export.source import ExportSource
from headway_server.batching import Tensors
from headway_training.models.parts.attention import (
    Attend,
    Scoring,
    causal_attention,
    cross_attention,
    fused_attention,
)
from headway_training.models.protocols import (
    Decoder,
    EncoderDecoder,
    ImageToText,
    PromptSegmenter,
    RecurrentEncoderDecoder,
    StatefulDecoder,
    is_recurrent,
    is_stateful,
)
from headway_training.models.recurrent import recur_packed

CAUSAL: Attend = causal_attention(fused_attention)
_PIECE = 50


def generation_logits(
    module: nn.Module, token_ids: NDArray[np.int64], attend: Attend = CAUSAL, *, first: int = 0
) -> NDArray[np.float32]:
    """Logits after the tokens of a text from the `first` on: (T,) int64 -> (T - first, V) float32.

    `attend` must compute what `CAUSAL` does.
    """
    decoder = cast("Decoder", module)
    with torch.inference_mode():
        ids = torch.from_numpy(token_ids).unsqueeze(0)
        if is_stateful(module):
            return _stateful_logits(cast("StatefulDecoder", module), ids, first)
        hidden = decoder.hidden_states(ids, torch.arange(len(token_ids)).unsqueeze(0), attend)
        return decoder.logits(hidden[:, first:])[0].float().numpy()


def _stateful_logits(decoder: StatefulDecoder, ids: Tensor, first: int) -> NDArray[np.float32]:
    """The same of a decoder with a state, which reads (1, T) tokens in pieces of other lengths than a server's."""
    states, pieces = decoder.first_states(1), []
    for start in range(0, ids.shape[1], _PIECE):
        hidden, states = decoder.read(ids[:, start : start + _PIECE], states)
        if start + _PIECE > first:
            pieces.append(decoder.logits(hidden[:, max(0, first - start) :])[0].float().numpy())
    return np.concatenate(pieces)


def translation_logits(
    module: nn.Module, source_of: NDArray[Any], target_ids: NDArray[np.int64], attend: Attend = CAUSAL
) -> NDArray[np.float32]:
    """Logits after every token of a target: (S,), (T,) int64 -> (T, V) float32. `attend` as for a text.

    The source of a caption is an image, (3, height, width) float32; that of a transcript (mel bins, frames) float32.
    """
    model = cast("EncoderDecoder", module)
    with torch.inference_mode():
        source = torch.from_numpy(source_of).unsqueeze(0)
        if source.is_floating_point():
            memory = cast("ImageToText", module).encode(source)
            mask = torch.ones(memory.shape[:2], dtype=torch.int64)
        else:
            mask = torch.ones_like(source)
            if is_recurrent(module):
                return _recurrent_logits(cast("RecurrentEncoderDecoder", module), source, mask, target_ids)
            memory = model.encode(source, mask)
        keys_values = model.cross_keys_values(memory)
        attend_cross = cross_attention(keys_values, mask, fused_attention)
        target = torch.from_numpy(target_ids).unsqueeze(0)
        positions = torch.arange(len(target_ids)).unsqueeze(0)
        return model.logits(model.decode(target, positions, attend, attend_cross))[0].float().numpy()


def _recurrent_logits(
    model: RecurrentEncoderDecoder, source: Tensor, mask: Tensor, target_ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Logits after every token of a target, one token after another."""
    cross, first = model.encode_source(source, mask, recur_packed)
    states = tuple(state[:, None] for state in first)
    rows = []
    for token in torch.from_numpy(target_ids).reshape(-1, 1, 1):
        logits, states, _ = model.step(token, states, cross, mask)
        rows.append(logits[0, 0])
    return torch.stack(rows).float().numpy()


def outputs(module: nn.Module, *inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Outputs of a model without state by name, for one input.

    Args:
        module: The model.
        inputs: The ids of a text, (T,) int64, and the types of its tokens where the model reads them; or the pixels of
            an image, (3, height, width) float32.

    Returns:
        What the graph declares, without the batch.
    """
    tensors = [torch.from_numpy(array).unsqueeze(0) for array in inputs]
    if not tensors[0].is_floating_point():
        tensors.insert(1, torch.ones_like(tensors[0]))
    with torch.inference_mode():
        return {name: value[0].numpy() for name, value in outputs_of(module, *tensors).items()}


def prompt_outputs(module: nn.Module, item: Tensors) -> dict[str, NDArray[np.float32]]:
    """Masks (M, S S) and predicted IoU (M,) of one prompt of a segmentation model, as `tasks/segmentation` makes it.

    The prompt's image is given by its embedding, of whatever variant: encoder and decoder are compared by themselves.
    """
    tensors = {name: torch.from_numpy(np.asarray(array)).unsqueeze(0) for name, array in item.items()}
    with torch.inference_mode():
        found = cast("PromptSegmenter", module).decoder(
            image_index=torch.zeros(1, dtype=torch.int64), earlier_mask=tensors.pop("earlier_mask", None), **tensors
        )
        return {"masks": found["masks"][0].flatten(1).numpy(), "predicted_iou": found["predicted_iou"][0].numpy()}


def row_outputs(graph: nn.Module, item: Tensors) -> dict[str, NDArray[np.float32]]:
    """Outputs of one of the graphs of a model that draws images or speaks, for one item, by name."""
    tensors = [torch.from_numpy(np.asarray(array)).unsqueeze(0) for array in item.values()]
    with torch.inference_mode():
        return {name: value[0].numpy() for name, value in graph(*tensors).items()}


def attention_weights(source: ExportSource, inputs: Tensors) -> dict[str, NDArray[np.float32]]:
    """Attention weights of every layer, by the names of the graph `attention`: (H, T, S) float32 each.

    Args:
        source: A model that this graph was traced of.
        inputs: What the graph reads, without the batch.
    """
    tensors = {name: torch.from_numpy(array).unsqueeze(0) for name, array in inputs.items()}
    with torch.inference_mode():
        found = attention_graph(source.module, source.task)(*tensors.values())
        return {name: weights[0].numpy() for name, weights in found.items()}


def cache_ranges(source: ExportSource, inputs: Inputs) -> list[LayerRange]:
    """Lets the fp32 module of a model with a decoder read texts and returns what each layer writes into its cache."""
    recorder, module = _Recorder(), cast("nn.Module", _WithoutLogits(source.module))
    for text in inputs.texts:
        if text.source is None:
            generation_logits(module, text.token_ids, recorder)
        else:
            translation_logits(module, text.source, text.token_ids, recorder)
    return [recorder.ranges[layer] for layer in sorted(recorder.ranges)]


class _WithoutLogits:
    """A module whose logits nobody looks at: those of a long text and a large vocabulary may be gigabytes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, 1)."""
        return hidden_states[..., :1]


class _Recorder:
    """Causal attention that widens the range of each layer to the keys and values it is given."""

    def __init__(self) -> None:
        self.ranges: defaultdict[int, LayerRange] = defaultdict(LayerRange)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        """(1, T, ., K), (1, T, G, K), (1, T, G, K) -> (1, T, ., K)."""
        found = self.ranges[layer]
        found.key = max(found.key, float(key.abs().max()))
        found.value = max(found.value, float(value.abs().max()))
        return CAUSAL(query, key, value, layer=layer, **scoring)
