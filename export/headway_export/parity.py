"""Holds an exported variant against PyTorch, through the runners that serve.

Every output of an fp32 variant must be PyTorch's within a relative error of 1e-4, over batch sizes and lengths up to
the limit, most of which the trace never saw. A decoder must choose PyTorch's tokens, except where PyTorch's own two
best are closer than 1e-4. For int8 and fp16 the same figures are recorded without a bound: they are judged by their
task metric. A decoder that ranks its logits must rank them as a sort does, in every precision.

The relative error of a row is the largest difference divided by the largest magnitude of PyTorch's. A score, which is a
row of one number and may be near 0, is held to the bound itself where it is below 1.

R rows, T tokens, V vocabulary, C ranked tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway_export import reference
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
from headway_export.graphs import CodecDecoderGraph, DenoiserGraph, LatentDecoderGraph, LatentEncoderGraph
from headway_export.source import ExportSource
from headway_server.batching import Tensors
from headway_server.bundles import (
    EMBEDDING_TASKS,
    ENCODER_DECODER_TASKS,
    AttentionFigures,
    ParityFigures,
    Precision,
    Task,
)
from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.tasks.segmentation.decoder import (
    BOTTOM_RIGHT,
    EMBEDDING,
    MASKS,
    PADDING,
    PREDICTED_IOU,
    as_item,
)
from headway_server.tasks.text.model import text_tensors
from headway_training.models import Codec, LatentDiffusion

LOGIT_BOUND = 1e-4
WEIGHT_BOUND = 1e-4
"""Of an attention weight, and of what rows of them sum to in fp32 and int8; both are from 0 to 1."""
_HALF_SUM_BOUND = 2e-3
"""Of what rows sum to in fp16."""
TIE_MARGIN = 1e-4

_BATCH_SIZES = (1, 3, 8)
_LENGTHS = (1, 2, 7, 16, 33, 64, 100, 128, 129, 200, 256, 500)
_DECODED_TOKENS = 16
_CODEC_RUNS = 6
_MAX_ATTENTION_BYTES = 64 << 20
"""Of the weights that are compared at a time."""
_NUM_LIKELIEST = 8
_NORMALIZER_BOUND = 1e-5
_SEED = 0


def check(candidate: Candidate) -> ParityFigures:
    """Compares a variant with PyTorch.

    Raises:
        ParityError: An fp32 variant is past its bound; the message gives output, shape, difference and bound.
    """
    recorded = {Task.SEGMENTATION: MASKS, Task.IMAGE_GENERATION: "velocity"}.get(candidate.source.task, "logits")
    comparison = _Comparison(
        bound=LOGIT_BOUND if candidate.precision is Precision.FP32 else None,
        recorded="embedding" if candidate.source.task in EMBEDDING_TASKS else recorded,
    )
    match candidate.source.task:
        case Task.GENERATION:
            _compare_generation(candidate, comparison)
        case Task.SPEECH_SYNTHESIS:
            _compare_generation(candidate, comparison)
            _compare_codec(candidate, comparison)
        case Task.TRANSLATION | Task.TEXT_TO_TEXT | Task.CAPTIONING | Task.TRANSCRIPTION:
            _compare_translation(candidate, comparison)
        case Task.IMAGE_CLASSIFICATION | Task.IMAGE_EMBEDDING:
            _compare_images(candidate, comparison)
        case Task.SEGMENTATION:
            _compare_prompts(candidate, comparison)
        case Task.IMAGE_GENERATION:
            _compare_diffusion(candidate, comparison)
        case _:
            _compare_texts(candidate, comparison)
    return ParityFigures(
        max_relative_logit_error=comparison.max_error,
        bound=comparison.bound,
        checked_shape_count=comparison.num_shapes,
        greedy_token_count=comparison.num_tokens,
        greedy_mismatch_count=comparison.num_mismatches,
        provider="CUDAExecutionProvider" if candidate.runtime.device == "cuda" else "CPUExecutionProvider",
    )


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Figures so far."""

    bound: float | None
    recorded: str = "logits"
    """The output whose error is kept."""
    max_error: float = 0.0
    num_shapes: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0

    def add(self, name: str, found: NDArray[Any], expected: NDArray[Any], where: str) -> None:
        """Compares rows of an output, (..., D).

        The error of `logits` is what the manifest records; of an embedder's output, the embedding's.
        """
        exact = np.atleast_1d(expected).astype(np.float64)
        difference = np.abs(np.atleast_1d(found) - exact).max(axis=-1)
        least = 1e-6 if exact.shape[-1] > 1 else 1.0
        error = float((difference / np.maximum(np.abs(exact).max(axis=-1), least)).max())
        error = error if np.isfinite(error) else float("inf")
        if name == self.recorded:
            self.max_error = max(self.max_error, error)
        if self.bound is not None and error > self.bound:
            raise ParityError(
                f"output {name} {found.shape} at {where}: relative difference {error:.2e} from PyTorch, "
                f"bound {self.bound:.0e}"
            )

    def add_outputs(self, found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], where: str) -> None:
        """Compares all outputs of one input."""
        for name, exact in expected.items():
            self.add(name, found[name], exact, where)

    def add_greedy(self, tokens: NDArray[np.int64], expected: NDArray[np.float32], where: str) -> None:
        """Compares chosen tokens, (T,), with PyTorch's logits for them, (T, V)."""
        best_two = np.partition(expected, -2, axis=-1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] >= TIE_MARGIN
        wrong = (expected.argmax(axis=-1) != tokens) & clear
        self.num_tokens += len(tokens)
        self.num_mismatches += int(wrong.sum())
        if self.bound is not None and wrong.any():
            step = int(wrong.argmax())
            raise ParityError(
                f"greedy decoding at {where}: token {step} is {tokens[step]}, PyTorch chooses "
                f"{expected[step].argmax()} by a margin of {best_two[step, 1] - best_two[step, 0]:.2e}, "
                f"bound for a tie {TIE_MARGIN:.0e}"
            )


def check_ranking(ranking: Ranking | None, logits: NDArray[np.float32], where: str) -> None:
    """Compares what a decoder's graph ranked, if it ranks, with a sort of its logits (R, V).

    Raises:
        ParityError: A token, its logit or a normalizer is another.
    """
    if ranking is None:
        return
    count = ranking.token_ids.shape[1]
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :count]  # (R, C), the lower id first among equals
    exact = logits.astype(np.float64)
    largest = exact.max(axis=1)
    normalizers = largest + np.log(np.exp(exact - largest[:, np.newaxis]).sum(axis=1))
    error = np.abs(ranking.normalizers - normalizers).max()
    if not (
        np.array_equal(ranking.token_ids, expected)
        and np.array_equal(ranking.logits, np.take_along_axis(logits, expected, axis=1))
        and error <= _NORMALIZER_BOUND
    ):
        raise ParityError(
            f"ranking at {where}: the graph gives tokens {ranking.token_ids.tolist()}, a sort of its logits "
            f"{expected.tolist()}; log sum exp differs by {error:.2e}, bound {_NORMALIZER_BOUND:.0e}"
        )


def _compare_generation(candidate: Candidate, comparison: _Comparison) -> None:
    max_length = candidate.source.limits.max_total_tokens
    assert max_length is not None, "the source has read the module's length"
    runner: DecoderRunner | None = None
    num_steps = min(_DECODED_TOKENS, max_length - 1)
    texts: Sequence[NDArray[np.int64]] = ()
    for rows in _batches(max_length - num_steps):
        runner = candidate.open_decoder(len(rows), max_length=max(rows) + num_steps, beside=runner)
        texts = texts or _sample_tokens(candidate.source, runner.vocab_size, max_length, frame=False)
        prompts = [texts[row % len(texts)][:length] for row, length in enumerate(rows)]
        logits = np.stack([prefill(runner, slot, prompt) for slot, prompt in enumerate(prompts)])  # (R, V)
        steps = [logits]
        positions = np.array([len(prompt) for prompt in prompts])
        for _ in range(num_steps):
            logits = runner.decode(steps[-1].argmax(axis=-1), positions).copy()
            steps.append(logits)
            positions = positions + 1
        where = f"batch {len(rows)}, prompt lengths {rows}"
        for row, prompt in enumerate(prompts):
            found = np.stack([step[row] for step in steps])  # (T, V)
            text = np.concatenate([prompt, found[:-1].argmax(axis=-1)])
            expected = reference.generation_logits(candidate.source.module, text, first=len(prompt) - 1)
            comparison.add("logits", found, expected, where)
            comparison.add_greedy(found.argmax(axis=-1), expected, where)
        comparison.num_shapes += len(set(rows))


def _compare_translation(candidate: Candidate, comparison: _Comparison) -> None:
    runner, encoder = candidate.open_decoder(max(_BATCH_SIZES)), candidate.open_encoder()
    limits, tokens = candidate.source.limits, candidate.source.special_tokens
    assert limits.max_input_tokens is not None, "the source has read the module's lengths"
    assert tokens is not None, "a text model has its special tokens"
    assert tokens.bos is not None, "the exporter has checked it"
    num_steps, count = min(2 * _DECODED_TOKENS, runner.max_length), min(_NUM_LIKELIEST, runner.vocab_size)
    for sources in _sources(candidate.source, runner.vocab_size, limits.max_input_tokens):
        rows = [source.shape for source in sources]
        where = f"batch {len(rows)}, sources {rows}"
        open_sources(runner, encode_sources(encoder, sources))
        chosen = [np.full(len(rows), tokens.bos, np.int64)]
        steps = []
        for position in range(num_steps):
            logits = runner.decode(chosen[-1], np.full(len(rows), position), num_likeliest=count)
            check_ranking(runner.ranking, logits, where)
            steps.append(logits.copy())
            chosen.append(steps[-1].argmax(axis=-1))
        for row, source in enumerate(sources):
            target = np.stack([step[row] for step in chosen])  # (T + 1,)
            expected = reference.translation_logits(candidate.source.module, source, target[:-1])
            comparison.add("logits", np.stack([step[row] for step in steps]), expected, where)
            comparison.add_greedy(target[1:], expected, where)
        comparison.num_shapes += len(set(rows))


def _sources(source: ExportSource, vocab_size: int, limit: int) -> Iterator[list[NDArray[Any]]]:
    """Yields batches of what the encoder reads: tokens of several lengths, pixels, or windows of audio."""
    if source.audio_preprocessing is not None:
        windows = sample_features(source, max(_BATCH_SIZES))
        yield from (list(windows[:batch_size]) for batch_size in _BATCH_SIZES)
        return
    if source.image_preprocessing is not None:
        images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
        yield from (list(images[:batch_size]) for batch_size in _BATCH_SIZES)
        return
    texts = _sample_tokens(source, vocab_size, limit, frame=True)
    for rows in _batches(limit):
        yield [texts[row % len(texts)][:length] for row, length in enumerate(rows)]


def _compare_texts(candidate: Candidate, comparison: _Comparison) -> None:
    source, graph = candidate.source, candidate.open_stateless()
    limit = source.limits.max_input_tokens
    assert limit is not None, "the source has read the module's length"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    texts = _sample_tokens(source, source.tokenizer.get_vocab_size(), limit, frame=True)
    for lengths in _batches(limit):
        batch = [texts[row % len(texts)][:length] for row, length in enumerate(lengths)]
        items = [text_tensors(text, _halved(text), has_types=source.has_token_types) for text in batch]
        for item, found in zip(items, run_batch(graph, items), strict=True):
            read = [item[name] for name in graph.input_names if name != "attention_mask"]
            expected = reference.outputs(source.module, *read)
            comparison.add_outputs(found, expected, f"batch {len(lengths)}, lengths {lengths}")
        comparison.num_shapes += len(set(lengths))


def _compare_images(candidate: Candidate, comparison: _Comparison) -> None:
    source, graph = candidate.source, candidate.open_stateless()
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    for batch_size in _BATCH_SIZES:
        items = [{"pixel_values": image} for image in images[:batch_size]]
        for image, found in zip(images, run_batch(graph, items), strict=False):
            comparison.add_outputs(found, reference.outputs(source.module, image), f"batch {batch_size}")
        comparison.num_shapes += 1


def _compare_prompts(candidate: Candidate, comparison: _Comparison) -> None:
    """Holds embeddings against PyTorch's, and masks of prompts whose images, kinds and numbers of points are drawn."""
    source, (encoder, decoder) = candidate.source, candidate.open_segmenter()
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    random, side = np.random.default_rng(_SEED), decoder.mask_size
    for num_images in _BATCH_SIZES:
        bank = embed_images(encoder, images[:num_images])
        items = []
        for number in range(2 * num_images + 1):
            points = random.random((random.integers(1, 7), 2), np.float32)
            labels = random.integers(PADDING, BOTTOM_RIGHT + 1, len(points))
            earlier = random.normal(size=(side, side)).astype(np.float32) if number % 2 else None
            items.append(as_item(bank[random.integers(num_images)], points, labels, earlier))
        where = f"{num_images} images, {len(items)} prompts"
        for pixels, embedding in zip(images, bank, strict=False):
            expected = reference.outputs(source.module.encoder, pixels)[EMBEDDING]  # type: ignore[arg-type]
            comparison.add(EMBEDDING, embedding.ravel(), expected.ravel(), where)
        for item, found in zip(items, answer_prompts(decoder, items), strict=True):
            exact = reference.prompt_outputs(source.module, item)
            comparison.add(MASKS, found[MASKS].reshape(len(exact[MASKS]), -1), exact[MASKS], where)
            comparison.add(PREDICTED_IOU, found[PREDICTED_IOU], exact[PREDICTED_IOU], where)
        comparison.num_shapes += 1


def _compare_diffusion(candidate: Candidate, comparison: _Comparison) -> None:
    """Holds all three graphs against PyTorch's, rows at drawn times and of drawn labels."""
    source = candidate.source
    module = cast("LatentDiffusion", source.module)
    random, num_classes = np.random.default_rng(_SEED), len(source.labels)
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    latents = random.standard_normal((len(images), *module.configuration.latent_shape), np.float32)
    times = random.random(len(images), np.float32)
    labels = random.integers(0, num_classes + 1, len(images))  # the last one stands for none
    rows = [
        {"latent": latent, "timestep": time, "label": label}
        for latent, time, label in zip(latents, times, labels, strict=True)
    ]
    graphs = zip(
        candidate.open_diffusion(),
        (DenoiserGraph(module), LatentDecoderGraph(module), LatentEncoderGraph(module)),
        (rows, [{"latent": latent} for latent in latents], [{"pixel_values": image} for image in images]),
        strict=True,
    )
    for graph, exact, items in graphs:
        for batch_size in _BATCH_SIZES:
            some = items[:batch_size]
            for item, found in zip(some, run_batch(graph, some), strict=True):
                for name, expected in reference.row_outputs(exact, item).items():
                    comparison.add(name, found[name].ravel(), expected.ravel(), f"batch {batch_size}")
    comparison.num_shapes += len(_BATCH_SIZES)


def _compare_codec(candidate: Candidate, comparison: _Comparison) -> None:
    """Holds the samples of streams, run after run, against those that PyTorch makes of all their codes at once."""
    module, graph = cast("Codec", candidate.source.module), candidate.open_codec()
    shape, random = module.configuration, np.random.default_rng(_SEED)
    frames = graph.session.graph.inputs[0].shape[1]
    assert isinstance(frames, int), "the exporter fixes it"
    for batch_size in _BATCH_SIZES:
        codes = random.integers(0, shape.codebook_size, (batch_size, _CODEC_RUNS * frames, shape.num_books))
        states = [np.zeros(module.decoder.state_size, np.float32)] * batch_size
        parts = []
        for start in range(0, codes.shape[1], frames):
            items = [
                {"codes": row[start : start + frames], "state": state} for row, state in zip(codes, states, strict=True)
            ]
            found = run_batch(graph, items)
            states = [one["present_state"] for one in found]
            parts.append(np.stack([one["samples"] for one in found]))
        samples = np.concatenate(parts, axis=1)
        exact = CodecDecoderGraph(module)
        for row, expected_codes in enumerate(codes):
            item = {"codes": expected_codes, "state": np.zeros_like(states[row])}
            outputs = {"samples": samples[row], "present_state": states[row]}
            comparison.add_outputs(outputs, reference.row_outputs(exact, item), f"batch {batch_size}")
    comparison.num_shapes += len(_BATCH_SIZES)


def check_attention(candidate: Candidate) -> AttentionFigures:
    """Compares the attention weights of a variant with PyTorch's, padded inputs among them.

    Raises:
        ParityError: Weights of fp32 are past their bound, or rows do not sum to 1.
    """
    graph = candidate.open_attention()
    bound = WEIGHT_BOUND if candidate.precision is Precision.FP32 else None
    sum_bound = _HALF_SUM_BOUND if candidate.precision is Precision.FP16 else WEIGHT_BOUND
    max_error = max_sum_error = 0.0
    num_shapes = 0
    for items in _attention_items(candidate):
        for item, found in zip(items, run_batch(graph, items), strict=True):
            sizes = {name: array.shape for name, array in item.items()}
            for name, expected in reference.attention_weights(candidate.source, item).items():
                rows = found[name].astype(np.float64)  # (H, T, S)
                error, sum_error = float(np.abs(rows - expected).max()), float(np.abs(rows.sum(-1) - 1).max())
                max_error, max_sum_error = np.fmax(max_error, error), np.fmax(max_sum_error, sum_error)
                if not (bound is None or error <= bound):
                    raise ParityError(f"{name} of {sizes}: {error:.2e} from PyTorch's weights, bound {bound:.0e}")
                if not sum_error <= sum_bound:
                    raise ParityError(f"{name} of {sizes}: a row sums to 1 ± {sum_error:.2e}, bound {sum_bound:.0e}")
        num_shapes += len({str([array.shape for array in item.values()]) for item in items})
    return AttentionFigures(
        max_weight_error=float(max_error),
        bound=bound,
        max_row_sum_error=float(max_sum_error),
        checked_shape_count=num_shapes,
    )


def _attention_items(candidate: Candidate) -> Iterator[list[Tensors]]:
    """Yields batches of inputs of the graph `attention`."""
    source, graph = candidate.source, candidate.variant.graphs["attention"]
    if source.image_preprocessing is not None:
        images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
        for batch_size in _BATCH_SIZES:
            yield [{"pixel_values": image} for image in images[:batch_size]]
        return
    limit = source.limits.max_input_tokens
    assert limit is not None, "the source has read the module's lengths"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    num_maps = sum(int(spec.shape[1]) for spec in graph.outputs) * max(_BATCH_SIZES)
    limit = min(limit, source.limits.max_total_tokens or limit, int((_MAX_ATTENTION_BYTES / 4 / num_maps) ** 0.5))
    vocabulary = source.tokenizer.get_vocab_size()
    texts = _sample_tokens(source, vocabulary, limit, frame=source.task is not Task.GENERATION)
    for lengths in _batches(limit):
        batch = [texts[row % len(texts)][:length] for row, length in enumerate(lengths)]
        if source.task is Task.GENERATION:
            yield [{"input_ids": text} for text in batch]
        elif source.task in ENCODER_DECODER_TASKS:
            targets = [texts[-row - 1][: 1 + length // 2] for row, length in enumerate(lengths)]
            yield [{**text_tensors(text), "target_ids": target} for text, target in zip(batch, targets, strict=True)]
        else:
            yield [text_tensors(text, _halved(text), has_types=source.has_token_types) for text in batch]


def _halved(text: NDArray[np.int64]) -> NDArray[np.int64]:
    """Types of a text's tokens, (T,), as if it were a pair of two halves."""
    return (np.arange(len(text)) >= len(text) // 2).astype(np.int64)


def _batches(limit: int) -> Iterator[list[int]]:
    """Yields the lengths of the rows of each batch, up to the limit."""
    lengths = [*(length for length in _LENGTHS if length < limit), limit]
    for batch_size, start in zip(_BATCH_SIZES, (len(lengths) - 1, 0, 3), strict=True):
        yield list(islice(cycle(lengths), start, start + batch_size))


def _sample_tokens(source: ExportSource, vocab_size: int, length: int, *, frame: bool) -> list[NDArray[np.int64]]:
    """Returns rows of `length` tokens: of the evaluation data, run together, or drawn at random where there is none."""
    rows = max(_BATCH_SIZES)
    if source.evaluation is None or source.tokenizer is None:
        generator = np.random.default_rng(_SEED)
        return list(generator.integers(0, vocab_size, (rows, length)))
    if source.evaluation.sequences:
        return list(np.resize(np.concatenate(source.evaluation.sequences), (rows, length)))
    texts = source.evaluation.texts[: rows * max(1, length)]
    if source.task is Task.GENERATION:
        texts = [text[: rows * length * 16] for text in texts]
    tokens = np.concatenate(source.encode(texts, frame=frame))
    return list(np.resize(tokens, (rows, length)))


def _sample_images(source: ExportSource, count: int) -> NDArray[np.uint8]:
    if source.evaluation is not None and len(source.evaluation) >= count:
        return source.evaluation.images[:count]
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    shape = (count, source.image_preprocessing.height, source.image_preprocessing.width, 3)
    return np.random.default_rng(_SEED).integers(0, 256, shape).astype(np.uint8)
