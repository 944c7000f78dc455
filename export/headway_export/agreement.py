"""Measures how far a variant's answers are from fp32's, where nobody knows the right ones.

The inputs are texts that are given, or drawn: a decoder's are what its fp32 variant writes at a temperature of 1, those
of other models of texts are random words of its vocabulary, and images are random patches of colour. What an
encoder-decoder makes of its texts is written by fp32 at a temperature of 1. All of them go through the runners that
serve.

N inputs, T tokens, V vocabulary, C labels, E width of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_export.candidate import (
    Candidate,
    answer_prompts,
    embed_images,
    encode_sources,
    open_sources,
    pixel_values_of,
    prefill,
    run_batch,
    sample_features,
)
from headway_export.errors import ParityError
from headway_export.source import ExportSource
from headway_server.batching import Tensors
from headway_server.bundles import ENCODER_DECODER_TASKS, AgreementFigures, ClassificationScheme, Precision, Task
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.tasks.outputs import log_softmax, sigmoid
from headway_server.tasks.segmentation.decoder import INSIDE, MASKS, as_item
from headway_server.tasks.text.model import text_tensors
from headway_training.tokenizers import encode_pairs

LIMITS: Final = {
    "mean_kl_divergence": 0.05,
    "top_agreement": 0.95,
    "mean_cosine": 0.99,
    "least_cosine": 0.95,
    "correlation": 0.99,
    "mean_mask_iou": 0.95,
}
"""The most nats a prediction, of fp32's distribution against the variant's; of all others the least."""
LIMITS_OF_INT4: Final = {"mean_kl_divergence": 0.1, "top_agreement": 0.9}
"""In place of these: 15 steps to a block round more than 254 to a column (docs/decisions/int4-weights.md)."""
GENERATED: Final = "generated"

_NUM_ROWS: Final = 64
_NUM_GENERATED: Final = (8, 48)
"""Texts that a decoder writes, and tokens of each."""
_MOST_LOGITS: Final = 2**25
"""That are kept of fp32: 128 MiB."""
_SEED: Final = 0

Answers = list[NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Inputs without right answers, and what fp32 answers."""

    dataset: str
    """Name of the file they come from, or `GENERATED`."""
    tokens: tuple[NDArray[np.int64], ...] = ()
    """What a decoder reads, (T,) each."""
    sources: tuple[NDArray[Any], ...] = ()
    """What the encoder reads for each of them, if there is one: tokens, (S,), pixels, (3, height, width), or a window
    of audio, (mel bins, frames)."""
    items: tuple[Tensors, ...] = ()
    """Inputs of a model without state."""
    answers: tuple[NDArray[Any], ...] = ()
    """Of fp32, of each input."""


def draw(candidate: Candidate) -> Sample:
    """Draws inputs for a source without evaluation data, and notes what fp32, the candidate, answers."""
    source, generator = candidate.source, np.random.default_rng(_SEED)
    dataset = source.texts_name if source.texts or source.images is not None else GENERATED
    if source.task is Task.GENERATION:
        tokens = tuple(_given_tokens(candidate) if source.texts else _written_tokens(candidate, generator))
        answers = tuple(_distributions(candidate, tokens, ()))
        return Sample(dataset=dataset, tokens=tokens, answers=answers)
    if source.task in ENCODER_DECODER_TASKS:
        sources, tokens = _rewritten_tokens(candidate, generator)
        answers = tuple(_distributions(candidate, tokens, sources))
        return Sample(dataset=dataset, tokens=tokens, sources=sources, answers=answers)
    items = tuple(_images(source, generator) if source.image_preprocessing is not None else _texts(source, generator))
    return Sample(dataset=dataset, items=items, answers=tuple(_outputs(candidate, items)))


def measure(candidate: Candidate, sample: Sample) -> AgreementFigures:
    """Compares a variant with fp32.

    Raises:
        ParityError: A figure is past its limit.
    """
    source = candidate.source
    of_decoder = bool(sample.tokens)
    found = (
        _distributions(candidate, sample.tokens, sample.sources) if of_decoder else _outputs(candidate, sample.items)
    )
    figures = _compare(source, sample.answers, found)
    limits = limits_of(candidate.precision, figures)
    for name, value in figures.items():
        is_past = value > limits[name] if name == "mean_kl_divergence" else value < limits[name]
        if is_past or not np.isfinite(value):
            raise ParityError(
                f"{candidate.precision}: {name} with fp32 on {len(found)} inputs ({sample.dataset}) is {value:.4f}, "
                f"limit {limits[name]}; export --precision fp32 alone, or judge it on data of your own: --texts FILE, "
                "or --evaluation FILE"
            )
    return AgreementFigures(dataset=sample.dataset, example_count=len(found), figures=figures, limits=limits)


def limits_of(precision: Precision, names: Iterable[str]) -> dict[str, float]:
    """Returns the limits of some figures of a variant."""
    limits = LIMITS | LIMITS_OF_INT4 if precision is Precision.INT4 else LIMITS
    return {name: limits[name] for name in names}


# Inputs


def _given_tokens(candidate: Candidate) -> list[NDArray[np.int64]]:
    """Cuts the texts that are given into windows."""
    length, count = _size_of_sample(candidate)
    prefix = np.array(candidate.source.prompt_prefix, np.int64)
    texts = [np.concatenate([prefix, ids]) for ids in candidate.source.encode(candidate.source.texts, frame=False)]
    windows = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    return [window for window in windows if len(window) > 1][:count] or texts[:1]


def _written_tokens(candidate: Candidate, generator: np.random.Generator) -> list[NDArray[np.int64]]:
    """Lets the model write."""
    source = candidate.source
    length, count = _size_of_sample(candidate)
    runner = candidate.open_decoder(count, max_length=length)
    assert source.tokenizer is not None, "a text model has its tokenizer"
    last = min(source.tokenizer.get_vocab_size(), runner.vocab_size)
    texts = [np.array([*source.prompt_prefix, token]) for token in generator.integers(0, last, count)]
    logits = np.stack([prefill(runner, slot, text) for slot, text in enumerate(texts)])  # (N, V)
    return _continued(runner, texts, logits, length, generator)


def _rewritten_tokens(
    candidate: Candidate, generator: np.random.Generator
) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[np.int64], ...]]:
    """Lets an encoder-decoder read; returns tokens or pixels, and the tokens that its decoder reads as it writes."""
    source = candidate.source
    assert source.special_tokens is not None, "a text model has its special tokens"
    length, count = _size_of_sample(candidate)
    spoken: Sequence[str] = ("",) if source.languages is None else source.languages.sources or ("",)
    written: Sequence[str] = ("",) if source.languages is None else source.languages.targets
    codes = [(str(generator.choice(spoken)), str(generator.choice(written))) for _ in range(count)]
    pairs: list[tuple[NDArray[Any], NDArray[np.int64]]]
    if source.audio_preprocessing is not None:
        windows = sample_features(source, count)
        pairs = [(window, source.caption_start(code)) for window, (_, code) in zip(windows, codes, strict=True)]
    elif source.image_preprocessing is not None:
        images = (item["pixel_values"] for item in _images(source, generator))
        pairs = [(image, source.caption_start(code)) for image, (_, code) in zip(images, codes, strict=False)]
    else:
        texts = list(source.texts[:count]) or _drawn_texts(source, generator, count)
        pairs = list(source.encode_sources(texts, codes[: len(texts)]))
    runner, encoder = candidate.open_decoder(len(pairs), max_length=length), candidate.open_encoder()
    open_sources(runner, encode_sources(encoder, [ids for ids, _ in pairs]))
    starts = np.stack([start for _, start in pairs])  # (N, P)
    for position in range(starts.shape[1]):
        logits = runner.decode(starts[:, position], np.full(len(pairs), position))
    targets = _continued(runner, list(starts), logits, length, generator)
    ends = {source.special_tokens.eos, *source.special_tokens.more_eos}
    lengths = [next((at for at in range(starts.shape[1], length) if text[at] in ends), length) for text in targets]
    return tuple(ids for ids, _ in pairs), tuple(text[:end] for text, end in zip(targets, lengths, strict=True))


def _continued(
    runner: DecoderRunner,
    texts: Sequence[NDArray[np.int64]],
    logits: NDArray[np.float32],
    length: int,
    generator: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Writes on at texts of one length, (T,) each, after which the decoder gave `logits`, (N, V)."""
    while len(texts[0]) < length:
        tokens = (logits + generator.gumbel(size=logits.shape)).argmax(axis=-1)
        texts = [np.append(text, token) for text, token in zip(texts, tokens, strict=True)]
        logits = runner.decode(tokens, np.full(len(texts), len(texts[0]) - 1))
    return list(texts)


def _size_of_sample(candidate: Candidate) -> tuple[int, int]:
    """Returns the tokens of a decoder's text, and how many texts there are."""
    limits, (count, length) = candidate.source.limits, _NUM_GENERATED
    assert limits.max_total_tokens is not None, "a decoder has a length"
    vocabulary = candidate.variant.graphs["decoder"].outputs[0].shape[-1]
    assert isinstance(vocabulary, int), "the vocabulary is a fixed axis"
    length = min(length, limits.max_total_tokens)
    return length, max(2, min(count, _MOST_LOGITS // (vocabulary * length)))


def _texts(source: ExportSource, generator: np.random.Generator) -> list[Tensors]:
    """Returns inputs of texts; of pairs, where the model reads such."""
    assert source.tokenizer is not None, "a text model has its tokenizer"
    limit = source.limits.max_input_tokens
    assert limit is not None, "the source has read the module's length"
    texts = list(source.texts[:_NUM_ROWS]) or _drawn_texts(source, generator, _NUM_ROWS)
    if source.text_pairs == "never":
        return [text_tensors(ids) for ids in source.encode(texts, limit)]
    encoded = zip(*encode_pairs(source.tokenizer, texts, texts[1:] + texts[:1], limit), strict=True)
    return [text_tensors(np.array(ids), np.array(types), has_types=source.has_token_types) for ids, types in encoded]


def _drawn_texts(source: ExportSource, generator: np.random.Generator, count: int) -> list[str]:
    """Returns texts of random words of the vocabulary."""
    assert source.tokenizer is not None, "a text model has its tokenizer"
    lengths = generator.integers(4, max(5, min(64, source.limits.max_input_tokens or 64)), count)
    drawn = [generator.integers(0, source.tokenizer.get_vocab_size(), length) for length in lengths]
    return [source.tokenizer.decode(ids.tolist()) or "a" for ids in drawn]


def _images(source: ExportSource, generator: np.random.Generator) -> list[Tensors]:
    """Returns inputs of the images that are given, or of patches of 1, 2, 4 ... pixels."""
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    if source.images is not None:
        return [{"pixel_values": pixels} for pixels in pixel_values_of(source, source.images[:_NUM_ROWS])]
    height, width = source.image_preprocessing.height, source.image_preprocessing.width
    images = np.empty((_NUM_ROWS, height, width, 3), np.uint8)
    for index, image in enumerate(images):
        side = 2 ** (index % max(1, min(height, width).bit_length() - 1))
        coarse = generator.integers(0, 256, (height // side + 1, width // side + 1, 3))
        image[:] = coarse.repeat(side, axis=0).repeat(side, axis=1)[:height, :width]
    return [{"pixel_values": pixels} for pixels in pixel_values_of(source, images)]


# Answers


def _distributions(
    candidate: Candidate, texts: Sequence[NDArray[np.int64]], sources: Sequence[NDArray[Any]]
) -> Answers:
    """Returns the log-probabilities after every token of each text, (T, V), which may be of a source or an image."""
    runner = candidate.open_decoder(1, max_length=max(map(len, texts)))
    encoder = candidate.open_encoder() if sources else None
    answers = []
    for number, text in enumerate(texts):
        if encoder is not None:
            open_sources(runner, encode_sources(encoder, [sources[number]]))
        chunks = range(0, len(text), runner.prefill_chunk)
        logits = [runner.score(0, text[at : at + runner.prefill_chunk], at) for at in chunks]
        answers.append(log_softmax(np.concatenate(logits)))
    return answers


def _outputs(candidate: Candidate, items: Sequence[Tensors]) -> Answers:
    """Returns the logits or the embedding of each input."""
    if candidate.source.task is Task.SEGMENTATION:
        return _masks(candidate, items)
    graph = candidate.open_stateless()
    name = "embedding" if not candidate.source.labels and candidate.source.scoring is None else "logits"
    return [run_batch(graph, [item])[0][name] for item in items]


def _masks(candidate: Candidate, items: Sequence[Tensors]) -> Answers:
    """Returns what a segmentation model cuts out at one place of each image: bool (M, S, S)."""
    encoder, decoder = candidate.open_segmenter()
    random, answers = np.random.default_rng(_SEED), []
    for item in items:
        [embedding] = embed_images(encoder, item["pixel_values"][np.newaxis])
        prompt = as_item(embedding, random.random((1, 2), np.float32), np.array([INSIDE]))
        answers.append(answer_prompts(decoder, [prompt])[0][MASKS] > 0)
    return answers


def _compare(source: ExportSource, expected: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> dict[str, float]:
    if source.task is Task.TEXT_SCORING:
        pairs = np.stack([np.concatenate(side) for side in (expected, found)])  # (2, N)
        has_sigmoid = source.scoring is not None and source.scoring.activation == "sigmoid"
        centred = (sigmoid(pairs) if has_sigmoid else pairs).astype(np.float64)
        centred -= centred.mean(axis=1, keepdims=True)
        return {"correlation": float(np.prod(centred, axis=0).sum() / np.linalg.norm(centred, axis=1).prod())}
    if source.task in (Task.TEXT_EMBEDDING, Task.IMAGE_EMBEDDING):
        vectors = [np.stack(side).astype(np.float64) for side in (expected, found)]  # (N, E) each
        norms = np.linalg.norm(vectors[0], axis=1) * np.linalg.norm(vectors[1], axis=1)
        cosines = (vectors[0] * vectors[1]).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)
        return {"mean_cosine": float(cosines.mean()), "least_cosine": float(cosines.min())}
    if source.task is Task.SEGMENTATION:
        masks = np.stack([np.concatenate(side) for side in (expected, found)])  # (2, N M, S, S)
        either = masks.any(axis=0).sum(axis=(-2, -1))
        shared = np.where(either, masks.all(axis=0).sum(axis=(-2, -1)) / np.maximum(either, 1), 1.0)
        return {"mean_mask_iou": float(shared.mean())}
    scheme = source.classification or ClassificationScheme()
    agree: list[NDArray[np.bool_]] = []
    divergences: list[NDArray[np.float64]] = []
    for pair in zip(expected, found, strict=True):  # one by one, since logits of a vocabulary take much memory
        first, second = (np.atleast_2d(rows).astype(np.float32) / np.float32(scheme.temperature) for rows in pair)
        if scheme.kind == "multi_label":
            limits = np.asarray(scheme.thresholds, np.float32)
            agree.append((sigmoid(first) >= limits) == (sigmoid(second) >= limits))  # (1, C)
            continue
        first, second = log_softmax(first), log_softmax(second)  # (1, C), or (T, C) or (T, V) of tokens
        divergences.append((np.exp(first) * (first - second)).sum(axis=-1, dtype=np.float64))
        agree.append(first.argmax(axis=-1) == second.argmax(axis=-1))
    figures = {"mean_kl_divergence": float(np.concatenate(divergences).mean())} if divergences else {}
    return figures | {"top_agreement": float(np.concatenate(agree).mean())}
