"""Measures the task metric of a variant on the source's evaluation data, through the runners that serve.

docs/checkpoint.md defines the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import sacrebleu
from numpy.typing import NDArray

from headway_export import classifier_quality, weaknesses
from headway_export.candidate import NUM_SLOTS, Candidate, encode, open_sources, pixel_values_of
from headway_export.errors import ParityError
from headway_export.source import EvaluationData
from headway_export.span_quality import span_f1
from headway_server.bundles import CalibrationFigures, QualityFigure, Task
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_training.evaluation import evaluation_windows

ALLOWED_LOSS = {"accuracy": 0.5, "micro_f1": 0.5, "span_f1": 0.5, "sacrebleu": 0.5, "nats_per_character": 0.02}
"""How much worse than fp32 a variant may be: in points, or nats."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a measurement of the task metric gives."""

    value: float
    signature: str = ""
    """The metric's own description of its settings."""
    weak_points: tuple[str, ...] = ()
    """What the variant is bad at, with examples: Markdown, a line each."""
    calibration: CalibrationFigures | None = None
    """Of classifiers."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The figure of a variant for its manifest, and what its card says beside it."""

    figure: QualityFigure
    weak_points: tuple[str, ...]
    calibration: CalibrationFigures | None


def measure(candidate: Candidate) -> Quality | None:
    """Measures the task metric; None if the source carries no evaluation data."""
    data = candidate.source.evaluation
    if data is None:
        return None
    outcome = _MEASURES[data.metric](candidate, data)
    figure = QualityFigure(
        metric=data.metric,
        value=outcome.value,
        example_count=len(data),
        dataset=data.dataset,
        higher_is_better=data.higher_is_better,
        signature=outcome.signature,
    )
    return Quality(figure, outcome.weak_points, outcome.calibration)


def check(candidate: Candidate, figure: QualityFigure | None, fp32: QualityFigure | None) -> None:
    """Checks that a variant is not much worse than fp32.

    Raises:
        ParityError: It is, or there is no evaluation data to tell by.
    """
    if figure is None or fp32 is None:
        raise ParityError(
            f"{candidate.precision}: is judged by its task metric, and there is no evaluation data; "
            "pass --evaluation FILE, or export --precision fp32 alone"
        )
    loss = fp32.value - figure.value if figure.higher_is_better else figure.value - fp32.value
    allowed = ALLOWED_LOSS[figure.metric]
    if not loss <= allowed:
        raise ParityError(
            f"{candidate.precision}: {figure.metric} on {figure.dataset} ({figure.example_count} examples) is "
            f"{figure.value:.3f}, fp32 has {fp32.value:.3f}: worse by {loss:.3f}, bound {allowed}"
        )


def _logits_of_texts(candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
    """(N, C)."""
    texts, types = classifier_quality.encode_inputs(candidate.source, data)
    runner = candidate.open_classifier()
    logits = np.empty((len(texts), len(candidate.source.labels)), np.float32)  # (N, C)
    for batch in _by_length(texts):
        own = None if types is None else [types[index] for index in batch]
        logits[batch] = runner.run_texts([texts[index] for index in batch], own)["logits"]
    return logits


def _logits_of_images(candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
    """(N, C)."""
    runner = candidate.open_classifier()
    logits = [
        runner.classify_images(pixel_values_of(candidate.source, data.images[start : start + NUM_SLOTS]))
        for start in range(0, len(data), NUM_SLOTS)
    ]
    return np.concatenate(logits)


def _accuracy(candidate: Candidate, data: EvaluationData) -> Outcome:
    of_images = candidate.source.task is Task.IMAGE_CLASSIFICATION
    logits = (_logits_of_images if of_images else _logits_of_texts)(candidate, data)
    value, weak_points, calibration = classifier_quality.accuracy(logits, candidate.source, data)
    return Outcome(value, weak_points=weak_points, calibration=calibration)


def _micro_f1(candidate: Candidate, data: EvaluationData) -> Outcome:
    logits = _logits_of_texts(candidate, data)
    value, weak_points, calibration = classifier_quality.micro_f1(logits, candidate.source, data)
    return Outcome(value, weak_points=weak_points, calibration=calibration)


def _span_f1(candidate: Candidate, data: EvaluationData) -> Outcome:
    value, weak_points = span_f1(candidate, data)
    return Outcome(value, weak_points=weak_points)


def _sacrebleu(candidate: Candidate, data: EvaluationData) -> Outcome:
    metric = sacrebleu.BLEU()
    translations = translate(candidate, data.texts)
    score = metric.corpus_score(translations, [list(data.references)])
    weak_points = weaknesses.of_translations(data.texts, translations, data.references)
    return Outcome(float(score.score), str(metric.get_signature()), weak_points)


def translate(candidate: Candidate, texts: Sequence[str]) -> list[str]:
    """Translates greedily, in fixed batches of sentences of similar length."""
    source = candidate.source
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.special_tokens is not None, "a text model has its special tokens"
    limit = source.limits.max_input_tokens
    ids = [row[:limit] for row in encode(source.tokenizer, texts, add_special_tokens=True)]
    decoder, encoder = candidate.open_decoder(), candidate.open_encoder()
    bos, eos = source.special_tokens.bos, source.special_tokens.eos
    assert bos is not None, "the exporter has looked"
    translations = [""] * len(ids)
    for batch in _by_length(ids):
        open_sources(decoder, encoder.encode([EncoderInput.of_tokens(ids[index]) for index in batch]))
        for index, target in zip(batch, _decode_greedily(decoder, len(batch), bos, eos), strict=True):
            translations[index] = source.tokenizer.decode(target, skip_special_tokens=True)
    return translations


def _decode_greedily(decoder: DecoderRunner, rows: int, bos: int, eos: int | None) -> list[list[int]]:
    """Decodes until every row has ended; returns the tokens before the end of each."""
    tokens = np.full(rows, bos, np.int64)
    targets: list[list[int]] = [[] for _ in range(rows)]
    running = np.ones(rows, bool)
    for position in range(decoder.max_length):
        tokens = decoder.decode(tokens, np.full(rows, position)).argmax(axis=-1)
        running &= tokens != eos
        if not running.any():
            break
        for row in np.flatnonzero(running):
            targets[row].append(int(tokens[row]))
    return targets


def _nats_per_character(candidate: Candidate, data: EvaluationData) -> Outcome:
    """Reads each text in windows of the model's length with a stride of half of it, counting what is new in each."""
    tokenizer = candidate.source.tokenizer
    assert tokenizer is not None, "a text model has its tokenizer"
    runner = candidate.open_decoder()
    characters = 0
    stretches: list[tuple[str, float]] = []
    for text in data.texts:
        (ids,) = encode(tokenizer, [text], add_special_tokens=False)
        for start, end, predicted in evaluation_windows(len(ids), runner.max_length):
            stretch = tokenizer.decode(ids[predicted:end].tolist(), skip_special_tokens=False)
            stretches.append((stretch, _nats_of_window(runner, ids[start:end], predicted - start)))
        characters += len(text) - len(tokenizer.decode(ids[:1].tolist(), skip_special_tokens=False))
    nats = sum(nats for _, nats in stretches)
    return Outcome(nats / characters, weak_points=weaknesses.of_stretches(stretches))


def _nats_of_window(runner: DecoderRunner, window: NDArray[np.int64], first: int) -> float:
    """Returns the negative log-likelihood of a window's tokens from its `first` on."""
    logits = np.concatenate(
        [
            runner.score(0, window[at : at + runner.prefill_chunk], at)
            for at in range(0, len(window), runner.prefill_chunk)
        ]
    )[first - 1 : -1].astype(np.float64)  # (new, V): logits before each new token
    targets = window[first:]
    highest = logits.max(axis=-1, keepdims=True)
    log_total = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[:, 0]
    return float((log_total - logits[np.arange(len(targets)), targets]).sum())


def _by_length(rows: Sequence[NDArray[np.int64]]) -> Iterator[list[int]]:
    """Yields batches of indices, rows of similar length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), NUM_SLOTS):
        yield order[start : start + NUM_SLOTS]


_MEASURES: dict[str, Callable[[Candidate, EvaluationData], Outcome]] = {
    "accuracy": _accuracy,
    "micro_f1": _micro_f1,
    "span_f1": _span_f1,
    "sacrebleu": _sacrebleu,
    "nats_per_character": _nats_per_character,
}
