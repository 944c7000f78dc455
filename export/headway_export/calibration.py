"""How large keys and values are on real text: what the scales of an int8 cache are taken from.

T tokens, H key/value heads, K head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_export import reference
from headway_export.candidate import encode
from headway_export.source import ExportSource
from headway_server.bundles import Task
from headway_training.evaluation import evaluation_windows
from headway_training.models.parts.attention import Scoring

NUM_TEXTS = 32
"""Texts that are read, or windows of longer ones."""


@dataclass(slots=True)
class LayerRange:
    """The largest magnitudes of what a layer writes into its cache."""

    key: float = 0.0
    value: float = 0.0


def measure_ranges(source: ExportSource) -> list[LayerRange]:
    """Lets the fp32 module read the first evaluation texts and returns the range of each layer.

    Args:
        source: A generation or translation model that carries evaluation data.
    """
    recorder = _Recorder()
    if source.task is Task.GENERATION:
        for window in islice(_windows(source), NUM_TEXTS):
            reference.generation_logits(source.module, window, recorder)
    else:
        for text, translation in islice(_pairs(source), NUM_TEXTS):
            reference.translation_logits(source.module, text, translation, recorder)
    return [recorder.ranges[layer] for layer in sorted(recorder.ranges)]


class _Recorder:
    """Causal attention that widens the range of each layer to the keys and values it is given."""

    def __init__(self) -> None:
        self.ranges: defaultdict[int, LayerRange] = defaultdict(LayerRange)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[Scoring]) -> Tensor:
        """(1, T, ., K), (1, T, H, K), (1, T, H, K) -> (1, T, ., K)."""
        found = self.ranges[layer]
        found.key = max(found.key, float(key.abs().max()))
        found.value = max(found.value, float(value.abs().max()))
        return reference.CAUSAL(query, key, value, layer=layer, **scoring)


def _windows(source: ExportSource) -> Iterator[NDArray[np.int64]]:
    """Yields token ids, of at most the model's length."""
    assert source.evaluation is not None, "the caller has looked"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.limits.max_total_tokens is not None, "a decoder has a length"
    for text in source.evaluation.texts:
        (ids,) = encode(source.tokenizer, [text], add_special_tokens=False)
        for start, end, _ in evaluation_windows(len(ids), source.limits.max_total_tokens):
            yield ids[start:end]


def _pairs(source: ExportSource) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields token ids of source sentences and of their translations, of at most the model's lengths."""
    assert source.evaluation is not None, "the caller has looked"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    texts, translations = (
        encode(source.tokenizer, texts[:NUM_TEXTS], add_special_tokens=True)
        for texts in (source.evaluation.texts, source.evaluation.references)
    )
    limits = source.limits
    for text, translation in zip(texts, translations, strict=True):
        yield text[: limits.max_input_tokens], translation[: limits.max_total_tokens]
