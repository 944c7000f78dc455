"""Holds an exported variant against a second model in PyTorch (`Reference`), through the runners that serve.

Every output of an fp32 variant must be PyTorch's within a relative error of 1e-4, over batch sizes and lengths from 1
up to the limit, most of which the trace never saw, long and short rows together. A decoder must choose PyTorch's
tokens, except where PyTorch's own two best are closer than 1e-4. For int8 and fp16 the same figures are recorded
without a bound: they are judged by their task metric. A number that is not finite is refused in every precision, and a
decoder that ranks its logits must rank them as a sort does.

R rows, T tokens, S source tokens, P asked positions, V vocabulary, C ranked tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export import synthetic
from headway_export.candidate import (
    Candidate,
    answer_prompts,
    drawing_conditions,
    drawing_texts,
    embed_images,
    encode_sources,
    open_verifier,
    pixel_values_of,
    run_batch,
)
from headway_export.differences import relative_errors
from headway_export.errors import ParityError
from headway_export.graphs import (
    CodecDecoderGraph,
    DenoiserGraph,
    DiffusionTextGraph,
    LatentDecoderGraph,
    LatentEncoderGraph,
)
from headway_export.reference import Reference, TargetAnswers
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
from headway_server.decoding.runner.encoder import CrossTensors
from headway_server.decoding.runner.state import SlotState
from headway_server.preprocessing.audio import LogMel
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
_LENGTHS = (2, 7, 16, 33, 64, 100, 129, 257)
_LONG = 500
_DECODED_TOKENS = 16
_NUM_BEAMS = 2
_MOST_LOGITS = 1 << 25
"""Of a text that are compared at a time: 128 MiB. Of a longer text or a larger vocabulary, so many evenly spread."""
_VERIFIED_BOUND = 1e-2
"""Relative difference of logits between verifying drafts and decoding; most variants have none at all."""
_CODEC_RUNS = 6
_MAX_ATTENTION_BYTES = 64 << 20
"""Of the weights that are compared at a time."""
_NUM_LIKELIEST = 8
_NORMALIZER_BOUND = 1e-5
_SEED = 0


def check(candidate: Candidate, reference: Reference) -> ParityFigures:
    """Compares a variant with PyTorch.

    Raises:
        ParityError: An fp32 variant is past its bound; the message gives output, shape, difference and bound. Or a
            variant gives a number that is not finite, ranks wrongly, or verifies drafts otherwise than it decodes.
    """
    source = candidate.source
    recorded = {Task.SEGMENTATION: MASKS, Task.IMAGE_GENERATION: "velocity"}.get(source.task, "logits")
    chooses = source.classification is None or source.classification.kind == "single_label"
    comparison = _Comparison(
        bound=LOGIT_BOUND if candidate.precision is Precision.FP32 else None,
        recorded="embedding" if source.task in EMBEDDING_TASKS else recorded,
        of_softmax="logits" if chooses and source.task is not Task.TEXT_SCORING else None,
    )
    match source.task:
        case Task.GENERATION:
            _compare_generation(candidate, reference, comparison)
        case Task.SPEECH_SYNTHESIS:
            _compare_generation(candidate, reference, comparison)
            _compare_codec(candidate, reference, comparison)
        case Task.TRANSLATION | Task.TEXT_TO_TEXT | Task.CAPTIONING | Task.TRANSCRIPTION:
            _compare_translation(candidate, reference, comparison)
        case Task.IMAGE_CLASSIFICATION | Task.IMAGE_EMBEDDING:
            _compare_images(candidate, reference, comparison)
        case Task.SEGMENTATION:
            _compare_prompts(candidate, reference, comparison)
        case Task.IMAGE_GENERATION:
            _compare_diffusion(candidate, reference, comparison)
        case _:
            _compare_texts(candidate, reference, comparison)
    if candidate.precision is Precision.FP32:
        reference.check_is_steady()
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
    of_softmax: str | None = "logits"
    """The output that a softmax makes probabilities of."""
    max_error: float = 0.0
    num_shapes: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0

    def add(self, name: str, found: NDArray[Any], expected: NDArray[Any], where: str) -> None:
        """Compares rows of an output, (..., D).

        The error of `logits` is what the manifest records; of an embedder's output, the embedding's.
        """
        found, exact = np.atleast_1d(found), np.atleast_1d(expected)
        error = float(relative_errors(found, exact, of_softmax=name == self.of_softmax).max(initial=0.0))
        if not np.isfinite(error):
            whose = "PyTorch gives" if np.isnan(exact).any() or (exact == np.inf).any() else "the variant gives"
            raise ParityError(f"output {name} {found.shape} at {where}: {whose} numbers that are not finite")
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


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Returns the tokens of the largest logits, (V,) -> (C,), in order; the lower id first among equals."""
    least = np.partition(logits, -count)[-count]
    (tokens,) = np.nonzero(~(logits < least))  # what is no number too
    return tokens[np.argsort(-logits[tokens], kind="stable")][:count]


def check_ranking(ranking: Ranking | None, logits: NDArray[np.float32], where: str) -> None:
    """Compares what a decoder's graph ranked, if it ranks, with a sort of its logits (R, V).

    Raises:
        ParityError: A token, its logit or a normalizer is another.
    """
    if ranking is None:
        return
    count = ranking.token_ids.shape[1]
    expected = np.stack([_largest(row, count) for row in logits])  # (R, C)
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


def _compare_generation(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    """Holds prompts, read in chunks, and what is decoded after them, against PyTorch; and drafts that are verified.

    The longest text, which is alone, is compared at all its positions; others from the end of the prompt on.
    """
    max_length = candidate.source.limits.max_total_tokens
    assert max_length is not None, "the source has read the module's length"
    runner: DecoderRunner | None = None
    num_steps = min(_DECODED_TOKENS, max_length - 1)
    texts: Sequence[NDArray[np.int64]] = ()
    for rows in _batches(max_length - num_steps):
        runner = candidate.open_decoder(len(rows), max_length=max(rows) + num_steps, beside=runner)
        texts = texts or _sample_tokens(candidate.source, runner.vocab_size, max_length, frame=False)
        prompts = [texts[row % len(texts)][:length] for row, length in enumerate(rows)]
        asked = [_asked(len(prompt), runner.vocab_size) if len(rows) == 1 else _last(prompt) for prompt in prompts]
        first = [_read(runner, slot, prompt, asked[slot]) for slot, prompt in enumerate(prompts)]
        steps = [np.stack([logits[-1] for logits in first])]  # (R, V)
        positions = np.array([len(prompt) for prompt in prompts])
        for _ in range(num_steps):
            logits = runner.decode(steps[-1].argmax(axis=-1), positions).copy()
            steps.append(logits)
            positions = positions + 1
        where = f"batch {len(rows)}, prompt lengths {rows}"
        written: list[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]] = []
        for row, prompt in enumerate(prompts):
            decoded = np.stack([step[row] for step in steps])  # (T, V), after the prompt and after each token
            text = np.concatenate([prompt, decoded[:-1].argmax(axis=-1)])
            found = np.concatenate([first[row][:-1], decoded])
            expected = reference.text_logits(
                text, np.concatenate([asked[row][:-1], np.arange(len(prompt) - 1, len(text))])
            )
            comparison.add("logits", found, expected, where)
            comparison.add_greedy(found.argmax(axis=-1), expected, where)
            written.append((text, decoded, expected[-len(decoded) :]))
        comparison.num_shapes += len(set(rows))
    assert runner is not None, "there is a batch"
    state = runner.state
    del runner  # and its session: that of the drafts holds the weights again
    _compare_drafts(candidate, state, written, comparison)


def _compare_drafts(
    candidate: Candidate,
    state: SlotState,
    written: Sequence[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]],
    comparison: _Comparison,
) -> None:
    """Verifies the last tokens of texts as drafts, if the graph can, against decoding them and against PyTorch.

    Args:
        candidate: The variant.
        state: Slots that hold the texts.
        written: Each text, (T,), what decoding gave for its end, and what PyTorch gives for the same, (., V) each.
        comparison: Where the figures go.

    Raises:
        ParityError: They differ.
    """
    verifier = open_verifier(candidate, state)
    if verifier is None or len(written[0][1]) <= verifier.width:
        return
    width = verifier.width
    drafts = np.stack([text[-width:] for text, _, _ in written])
    starts = np.array([len(text) - width for text, _, _ in written])
    verified = verifier.verify(drafts, starts)  # (R, width, V)
    for row, (text, decoded, expected) in enumerate(written):
        where = f"drafts of {width} tokens verified at position {len(text) - width} of a batch of {len(written)}"
        comparison.add("logits", verified[row], expected[-width:], where)
        error = relative_errors(verified[row], decoded[-width:], of_softmax=True).max()
        if not error <= _VERIFIED_BOUND:
            raise ParityError(
                f"{candidate.precision}: {where}: logits differ by {error:.2e} from those of decoding one by one, "
                f"bound {_VERIFIED_BOUND:.0e}"
            )


def _asked(length: int, vocab_size: int) -> NDArray[np.int64]:
    """Returns positions of a text that are compared: all, or as many as there is room for, and the last."""
    count = min(length, max(2, _MOST_LOGITS // vocab_size))
    return np.unique(np.linspace(0, length - 1, count).astype(np.int64))


def _last(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array([len(tokens) - 1])


def _read(
    runner: DecoderRunner,
    slot: int,
    token_ids: NDArray[np.int64],
    asked: NDArray[np.int64],
    source: CrossTensors | None = None,
) -> NDArray[np.float32]:
    """Reads a text into a slot, chunk by chunk, and returns the logits after the asked tokens: (T,), (P,) -> (P, V).

    A chunk none of whose logits but the last are asked for is read as a server reads a prompt.
    """
    rows = []
    for start in range(0, len(token_ids), runner.prefill_chunk):
        chunk = token_ids[start : start + runner.prefill_chunk]
        here = asked[(asked >= start) & (asked < start + len(chunk))] - start
        if (here < len(chunk) - 1).any():
            rows.append(runner.score(slot, chunk, start, source)[here])
        else:
            last = runner.prefill(slot, chunk, start, source)
            rows.append(last[np.newaxis][: len(here)].copy())
    return np.concatenate(rows)


def _compare_translation(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    runner, encoder = candidate.open_decoder(max(_BATCH_SIZES)), candidate.open_encoder()
    limits, tokens = candidate.source.limits, candidate.source.special_tokens
    assert limits.max_input_tokens is not None, "the source has read the module's lengths"
    assert tokens is not None, "a text model has its special tokens"
    assert tokens.bos is not None, "the exporter has checked it"
    # A decoder may place tokens by where there is no padding, which it never writes.
    forbidden = {*candidate.source.suppressed_tokens, *([] if tokens.pad is None else [tokens.pad])}
    never = sorted(forbidden - {tokens.bos})
    written = _sample_targets(candidate.source, runner, never)
    batches = _sources(candidate.source, runner.vocab_size, limits.max_input_tokens)
    for sources, lengths in zip(batches, _batches(runner.max_length), strict=True):
        batch = _SourceBatch(
            runner=runner,
            reference=reference,
            comparison=comparison,
            sources=sources,
            encoded=encode_sources(encoder, sources),
        )
        batch.compare_decoding(tokens.bos, never)
        targets = [np.append(tokens.bos, written[row][: length - 1]) for row, length in enumerate(lengths)]
        answers = batch.compare_given(targets)
        if runner.has_alignment:
            batch.compare_alignments(targets, [answer.alignment for answer in answers])
        comparison.num_shapes += len({source.shape for source in sources}) + len(set(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceBatch:
    """Encoded sources, and what a decoder makes of them."""

    runner: DecoderRunner
    reference: Reference
    comparison: _Comparison
    sources: Sequence[NDArray[Any]]
    encoded: Sequence[CrossTensors]

    def compare_decoding(self, bos: int, never: Sequence[int]) -> None:
        """Holds what is decoded greedily from the first token on; with beams that differ, where there is room.

        Args:
            bos: The first token.
            never: Tokens that are not taken.
        """
        runner, num_sources = self.runner, len(self.sources)
        num_beams = _NUM_BEAMS if 1 < num_sources <= runner.num_slots // _NUM_BEAMS else 1
        num_steps, count = min(2 * _DECODED_TOKENS, runner.max_length), min(_NUM_LIKELIEST, runner.vocab_size)
        num_rows = num_sources * num_beams
        where = f"batch {num_sources}, sources {[source.shape for source in self.sources]}, {num_beams} rows each"
        runner.set_sources(self.encoded)
        for slot in range(num_rows):
            runner.begin(slot, self.encoded[slot // num_beams])
        chosen, steps = [np.full(num_rows, bos, np.int64)], list[NDArray[np.float32]]()
        for position in range(num_steps):
            logits = runner.decode(chosen[-1], np.full(num_rows, position), num_likeliest=count)
            check_ranking(runner.ranking, logits, where)
            steps.append(logits.copy())
            logits[:, never] = -np.inf
            following = logits.argmax(axis=-1)
            if position == 0:  # the beams of a source go ways of their own
                best = np.argsort(-logits, axis=-1, kind="stable")
                following = best[np.arange(num_rows), np.arange(num_rows) % num_beams]
            chosen.append(following)
        for row in range(num_rows):
            target = np.stack([step[row] for step in chosen])[:-1]  # (T,)
            found = np.stack([step[row] for step in steps])
            self._compare(self.sources[row // num_beams], target, np.arange(num_steps), found, where)

    def compare_given(self, targets: Sequence[NDArray[np.int64]]) -> list[TargetAnswers]:
        """Holds targets that are given: read in chunks, as a given beginning is, with their ends decoded.

        Returns:
            What PyTorch answers to each.
        """
        runner = self.runner
        where = f"batch {len(self.sources)}, targets of {[len(target) for target in targets]} tokens"
        num_steps = np.array([min(_DECODED_TOKENS, len(target) - 1) for target in targets])
        firsts = np.array([len(target) for target in targets]) - num_steps
        asked = [_asked(first, runner.vocab_size) for first in firsts.tolist()]
        found = []
        for slot, (target, source) in enumerate(zip(targets, self.encoded, strict=True)):
            runner.begin(slot, source)
            found.append([_read(runner, slot, target[: firsts[slot]], asked[slot], source)])
        runner.set_sources(self.encoded)
        for step in range(int(num_steps.max())):
            # A row that has ended reads its last token once more, where it was.
            positions = np.minimum(firsts + step, firsts + num_steps - 1)
            tokens = np.array([target[at] for target, at in zip(targets, positions, strict=True)])
            logits = runner.decode(tokens, positions)
            for row in np.flatnonzero(step < num_steps).tolist():
                found[row].append(logits[row : row + 1].copy())
        answers = []
        for row, target in enumerate(targets):
            positions = np.concatenate([asked[row], np.arange(firsts[row], len(target))])
            answers.append(self._compare(self.sources[row], target, positions, np.concatenate(found[row]), where))
        return answers

    def compare_alignments(
        self, targets: Sequence[NDArray[np.int64]], alignments: Sequence[NDArray[np.float32]]
    ) -> None:
        """Holds alignments of targets against the attention of PyTorch's layer, (T, S) each."""
        for slot, (encoded, target, expected) in enumerate(zip(self.encoded, targets, alignments, strict=True)):
            found = self.runner.align(slot, encoded, target)
            error = float(np.abs(found - expected / expected.sum(axis=-1, keepdims=True)).max())
            if not (error <= WEIGHT_BOUND or (self.comparison.bound is None and np.isfinite(error))):
                raise ParityError(
                    f"alignment {found.shape} of a target of {len(target)} tokens: {error:.2e} from PyTorch's weights, "
                    f"bound {WEIGHT_BOUND:.0e}"
                )

    def _compare(
        self,
        source: NDArray[Any],
        target: NDArray[np.int64],
        positions: NDArray[np.int64],
        found: NDArray[np.float32],
        where: str,
    ) -> TargetAnswers:
        """Compares the logits (P, V) after some tokens of a target, (T,); returns what PyTorch answers."""
        answers = self.reference.target_answers(source, target, positions)
        self.comparison.add("logits", found, answers.logits, where)
        self.comparison.add_greedy(found.argmax(axis=-1), answers.logits, where)
        return answers


def _sample_targets(source: ExportSource, runner: DecoderRunner, never: Sequence[int]) -> list[NDArray[np.int64]]:
    """Returns tokens that a decoder is given, up to its limit: of evaluation data, or drawn among those it takes."""
    rows, length = max(_BATCH_SIZES), runner.max_length
    references = () if source.evaluation is None else source.evaluation.references or _captions(source)
    if references and source.tokenizer is not None:
        tokens = np.concatenate(source.encode(references[: rows * length], frame=False))
        if len(tokens) > 1:
            return list(np.resize(tokens, (rows, length)))
    allowed = np.setdiff1d(np.arange(runner.vocab_size), never)
    return list(np.random.default_rng(_SEED).choice(allowed, (rows, length)))


def _captions(source: ExportSource) -> list[str]:
    """Returns the captions of evaluation data, of all languages."""
    assert source.evaluation is not None, "the caller has looked"
    return [several[0] for captions in source.evaluation.captions.values() for several in captions]


def _sources(source: ExportSource, vocab_size: int, limit: int) -> Iterator[list[NDArray[Any]]]:
    """Yields batches of what the encoder reads: tokens of several lengths, pixels, or windows of audio."""
    if (audio := source.audio_preprocessing) is not None:
        random, log_mel = np.random.default_rng(_SEED), LogMel(audio)
        sounds = synthetic.draw_speech(max(_BATCH_SIZES), audio.sampling_rate, audio.window_samples, random)
        windows = [log_mel.features(one) for one in sounds]
        yield from (windows[:batch_size] for batch_size in _BATCH_SIZES)
        return
    if source.image_preprocessing is not None:
        images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
        yield from (list(images[:batch_size]) for batch_size in _BATCH_SIZES)
        return
    texts = _sample_tokens(source, vocab_size, limit, frame=True)
    for rows in _batches(limit):
        yield [texts[row % len(texts)][:length] for row, length in enumerate(rows)]


def _compare_texts(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
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
            expected = reference.outputs(*read)
            comparison.add_outputs(found, expected, f"batch {len(lengths)}, lengths {lengths}")
        comparison.num_shapes += len(set(lengths))


def _compare_images(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    source, graph = candidate.source, candidate.open_stateless()
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    for batch_size in _BATCH_SIZES:
        items = [{"pixel_values": image} for image in images[:batch_size]]
        for image, found in zip(images, run_batch(graph, items), strict=False):
            comparison.add_outputs(found, reference.outputs(image), f"batch {batch_size}")
        comparison.num_shapes += 1


def _compare_prompts(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    """Holds embeddings against PyTorch's, and masks of prompts whose images, kinds and numbers of points are drawn."""
    source, (encoder, decoder) = candidate.source, candidate.open_segmenter()
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    random, side = np.random.default_rng(_SEED), decoder.mask_size
    for num_images in _BATCH_SIZES:
        embeddings = embed_images(encoder, images[:num_images])
        items = []
        for number in range(2 * num_images + 1):
            points = random.random((random.integers(1, 7), 2), np.float32)
            labels = random.integers(PADDING, BOTTOM_RIGHT + 1, len(points))
            earlier = random.normal(size=(side, side)).astype(np.float32) if number % 2 else None
            items.append(as_item(embeddings[random.integers(num_images)], points, labels, earlier))
        where = f"{num_images} images, {len(items)} prompts"
        for pixels, embedding in zip(images, embeddings, strict=False):
            expected = reference.image_embedding(pixels)[EMBEDDING]
            comparison.add(EMBEDDING, embedding.ravel(), expected.ravel(), where)
        for item, found in zip(items, answer_prompts(decoder, items), strict=True):
            exact = reference.prompt_outputs(item)
            comparison.add(MASKS, found[MASKS].reshape(len(exact[MASKS]), -1), exact[MASKS], where)
            comparison.add(PREDICTED_IOU, found[PREDICTED_IOU], exact[PREDICTED_IOU], where)
        comparison.num_shapes += 1


def _compare_diffusion(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    """Holds all graphs against PyTorch's, rows at drawn times, of drawn labels or evaluation texts."""
    source, graphs = candidate.source, candidate.open_diffusion()
    module = cast("LatentDiffusion", reference.module)
    random, num_classes = np.random.default_rng(_SEED), len(source.labels)
    images = pixel_values_of(source, _sample_images(source, max(_BATCH_SIZES)))
    latents = random.standard_normal((len(images), *module.configuration.latent_shape), np.float32)
    times = random.random(len(images), np.float32)
    prompts: Sequence[Any] = random.integers(0, num_classes + 1, len(images)).tolist()  # the last one stands for none
    checked: dict[str, tuple[nn.Module, list[Tensors]]] = {
        "vae_decoder": (LatentDecoderGraph(module), [{"latent": latent} for latent in latents]),
        "vae_encoder": (LatentEncoderGraph(module), [{"pixel_values": image} for image in images]),
    }
    if module.text_encoder is not None:
        assert source.evaluation is not None, "such a model is exported with some"
        prompts = ["", *source.evaluation.texts[: len(images) - 1]]
        prompts = [prompts[row % len(prompts)] for row in range(len(images))]
        checked["text_encoder"] = (DiffusionTextGraph(module), drawing_texts(source, prompts))
    rows: list[Tensors] = [
        {"latent": latent, "timestep": time, **condition}
        for latent, time, condition in zip(latents, times, drawing_conditions(candidate, graphs, prompts), strict=True)
    ]
    checked["denoiser"] = (DenoiserGraph(module), rows)
    for role, (exact, items) in checked.items():
        for batch_size in _BATCH_SIZES:
            some = items[:batch_size]
            for item, found in zip(some, run_batch(graphs[role], some), strict=True):
                for name, expected in reference.row_outputs(role, exact, item).items():
                    comparison.add(name, found[name].ravel(), expected.ravel(), f"batch {batch_size}")
    comparison.num_shapes += len(_BATCH_SIZES)


def _compare_codec(candidate: Candidate, reference: Reference, comparison: _Comparison) -> None:
    """Holds the samples of streams, run after run, against those that PyTorch makes of all their codes at once."""
    module, graph = cast("Codec", reference.module), candidate.open_codec()
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
            comparison.add_outputs(outputs, reference.row_outputs("codec_decoder", exact, item), f"batch {batch_size}")
    comparison.num_shapes += len(_BATCH_SIZES)


def check_attention(candidate: Candidate, reference: Reference) -> AttentionFigures:
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
            for name, expected in reference.attention_weights(item).items():
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


def _batches(limit: int) -> list[list[int]]:
    """Returns the lengths of the rows of each batch, from 1 up to the limit, which a batch of three reaches too."""
    longest = min(_LONG, max(1, limit - 1))
    lengths = [length for length in _LENGTHS if length < limit] or [limit]
    rows = ([limit], [limit, 1, longest], lengths)
    return [list(islice(cycle(some), size)) for some, size in zip(rows, _BATCH_SIZES, strict=True)]


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
