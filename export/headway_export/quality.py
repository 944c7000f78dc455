"""Measures the task metric of a variant on the source's evaluation data, through the runners that serve.

What the variant is bad at is found beside it, for the model card. docs/checkpoint.md defines the metrics.

N examples, C labels, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from headway_export.candidate import NUM_ROWS, Candidate, encode_sources, open_sources
from headway_export.errors import ParityError
from headway_export.source import EvaluationData, Readable
from headway_export.tasks.table import task_of
from headway_server.bundles import CalibrationFigures, QualityFigure
from headway_server.decoding.runner.decoder import DecoderRunner

NUM_EXAMPLES = 5
"""Examples, confusions or labels that a card names."""
MAX_CHARACTERS = 200
"""Of a text that a card quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The figure of a variant for its manifest, and what its card says beside it."""

    figure: QualityFigure
    weak_points: tuple[str, ...]
    """What the variant is bad at, with examples: Markdown, a line each."""
    calibration: CalibrationFigures | None = None
    """Of classifiers."""


def measure(candidate: Candidate) -> Quality | None:
    """Measures the task metric; None if the source carries no evaluation data."""
    data = candidate.source.evaluation
    return None if data is None else task_of(candidate.source.task).measure(candidate, data)


def check(candidate: Candidate, figure: QualityFigure, fp32: QualityFigure) -> None:
    """Checks that a variant is not much worse than fp32.

    Raises:
        ParityError: It is.
    """
    loss = fp32.value - figure.value if figure.higher_is_better else figure.value - fp32.value
    allowed = task_of(candidate.source.task).metric(figure.metric).allowed_loss
    if not loss <= allowed:
        raise ParityError(
            f"{candidate.precision}: {figure.metric} on {figure.dataset} ({figure.example_count} examples) is "
            f"{figure.value:.3f}, fp32 has {fp32.value:.3f}: worse by {loss:.3f}, bound {allowed}"
        )


def figure_of(data: EvaluationData, value: float, *, signature: str = "") -> QualityFigure:
    """Returns the figure of a value for the manifest."""
    return QualityFigure(
        metric=data.metric,
        value=value,
        example_count=len(data),
        dataset=data.dataset,
        higher_is_better=data.higher_is_better,
        signature=signature,
    )


def by_length(rows: Sequence[NDArray[np.int64]], count: int = NUM_ROWS) -> Iterator[list[int]]:
    """Yields batches of `count` indices at most, rows of similar length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), count):
        yield order[start : start + count]


# Classifiers


# Token classifiers


# Segmentation


# Translation


def decode_greedily(
    decoder: DecoderRunner, starts: NDArray[np.int64], eos: int | None, suppressed: Sequence[int]
) -> list[list[int]]:
    """Decodes until every row has ended, without suppressed tokens; returns the tokens before the end of each.

    Args:
        decoder: The decoder, with its sources.
        starts: (N, P) int64, what it reads before it writes.
        eos: What ends a row.
        suppressed: Tokens that are never taken.
    """
    rows, num_given = starts.shape
    tokens = starts[:, 0]
    targets: list[list[int]] = [[] for _ in range(rows)]
    running = np.ones(rows, bool)
    for position in range(decoder.max_length):
        logits = decoder.decode(tokens, np.full(rows, position))
        if position + 1 < num_given:
            tokens = starts[:, position + 1]
            continue
        logits[:, list(suppressed)] = -np.inf
        tokens = logits.argmax(axis=-1)
        running &= tokens != eos
        if not running.any():
            break
        for row in np.flatnonzero(running):
            targets[row].append(int(tokens[row]))
    return targets


# Captioning


def write_greedily(candidate: Candidate, batches: Iterable[Sequence[Readable]], start: NDArray[np.int64]) -> list[str]:
    """Writes a text of each image, (3, height, width), or window of audio, (mel bins, frames), greedily.

    Args:
        candidate: The variant.
        batches: At most `NUM_ROWS` each.
        start: What the decoder reads before it writes, (P,).
    """
    source = candidate.source
    assert source.tokenizer is not None, "a model that writes has its tokenizer"
    assert source.special_tokens is not None, "a model that writes has its special tokens"
    rows_at_a_time = candidate.affordable_rows(NUM_ROWS)
    decoder, encoder = candidate.open_decoder(rows_at_a_time), candidate.open_encoder()
    texts: list[str] = []
    for batch in (each[at : at + rows_at_a_time] for each in batches for at in range(0, len(each), rows_at_a_time)):
        open_sources(decoder, encode_sources(encoder, list(batch), candidate.bundle.path))
        starts = np.tile(start, (len(batch), 1))
        rows = decode_greedily(decoder, starts, source.special_tokens.eos, source.suppressed_tokens)
        texts += source.tokenizer.decode_batch(rows, skip_special_tokens=True)
    return texts


# Transcription


# Generation


def nats_of_window(runner: DecoderRunner, window: NDArray[np.int64], first: int) -> float:
    """Returns the negative log-likelihood of a window's tokens from its `first` on."""
    nats = 0.0
    for start in range(0, len(window), runner.prefill_chunk):  # logits of a whole window may be gigabytes
        logits = torch.from_numpy(runner.score(0, window[start : start + runner.prefill_chunk], start))  # (T, V)
        begin = max(first - 1, start)
        predicted = torch.from_numpy(window[begin + 1 : start + len(logits) + 1])
        before = logits[begin - start :][: len(predicted)].double()  # the logits before each new token
        nats += float(functional.cross_entropy(before, predicted, reduction="sum"))
    return nats


def quoted(text: str) -> str:
    """Puts a text on one line, in quotes, shortened where it is long, with Markdown's marks escaped."""
    line = " ".join(text.split())
    short = line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"
    for mark in "\\`*_[]<>|":
        short = short.replace(mark, "\\" + mark)
    return f"“{short}”"


# Latent diffusion


# Speech
