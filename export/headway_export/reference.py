"""What the module computes in PyTorch: every input whole and alone, without a cache or padding.

Exported graphs are held against it, and the scales of an int8 cache are taken from it.

T tokens, S source tokens, G key/value heads, K head width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.agreement import Sample
from headway_export.candidate import features_of, pixel_values_of
from headway_export.graphs import attention_graph, outputs_of
from headway_export.rewriting import LayerRange
from headway_export.source import ExportSource
from headway_server.batching import Tensors
from headway_server.bundles import Task
from headway_training.evaluation import evaluation_windows
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
NUM_RANGE_TEXTS = 32
"""Texts, or windows of longer ones, that the ranges of an int8 cache are taken from."""


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


def cache_ranges(source: ExportSource, sample: Sample | None = None) -> list[LayerRange]:
    """Lets the fp32 module read the first evaluation texts and returns what each layer writes into its cache.

    Args:
        source: A model with a decoder.
        sample: Texts in place of evaluation data that it does not carry.
    """
    recorder = _Recorder()
    if source.task in (Task.GENERATION, Task.SPEECH_SYNTHESIS):
        for window in islice(windows_of(source, sample), NUM_RANGE_TEXTS):
            generation_logits(source.module, window, recorder)
    else:
        for text, translation in pairs_of(source, sample):
            translation_logits(source.module, text, translation, recorder)
    return [recorder.ranges[layer] for layer in sorted(recorder.ranges)]


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


def windows_of(source: ExportSource, sample: Sample | None) -> Iterator[NDArray[np.int64]]:
    """Yields token ids of the texts that a generation model is judged by, (T,) each, at most the model's length."""
    if sample is not None:
        yield from sample.tokens
        return
    assert source.evaluation is not None, "a model is judged by one or the other"
    assert source.limits.max_total_tokens is not None, "a decoder has a length"
    yield from source.evaluation.sequences
    for text in source.evaluation.texts:
        (ids,) = source.encode([text], frame=False)
        for start, end, _ in evaluation_windows(len(ids), source.limits.max_total_tokens):
            yield ids[start:end]


def pairs_of(source: ExportSource, sample: Sample | None) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Yields what encoder and decoder read of the first inputs of an encoder-decoder's evaluation.

    For the encoder tokens, pixels or features.
    """
    if sample is not None:
        yield from zip(sample.sources, sample.tokens, strict=True)
        return
    data = source.evaluation
    assert data is not None, "a model is judged by one or the other"
    first = slice(NUM_RANGE_TEXTS)
    if data.captions:
        for language, captions in data.captions.items():
            start = source.caption_start(language)
            written = source.encode([several[0] for several in captions[first]])
            for pixels, caption in zip(pixel_values_of(source, data.images[first]), written, strict=True):
                yield pixels, np.concatenate([start, caption])[: source.limits.max_total_tokens]
        return
    if data.recordings:
        start = source.caption_start("")
        written = source.encode([f" {text}" for text in data.references[first]])
        for features, transcript in zip(features_of(source, data, first), written, strict=True):
            yield features, np.concatenate([start, transcript])[: source.limits.max_total_tokens]
        return
    pairs = source.encode_sources(data.texts[first], data.languages[first])
    for (ids, start), reference in zip(pairs, source.encode(data.references[first]), strict=True):
        yield ids, np.concatenate([start, reference])[: source.limits.max_total_tokens]
