"""Holds an exported variant against a second model in PyTorch (`Reference`), through the runners that serve.

Every output of an fp32 variant must be PyTorch's within a relative error of 1e-4, over batch sizes and lengths from 1
up to the limit, most of which the trace never saw, long and short rows together. A decoder must choose PyTorch's
tokens, except where PyTorch's own two best are closer than 1e-4. Where an answer is past that, it is held against what
rounding alone does to PyTorch's own (`rounding`) and counted. For int8 and fp16 the same figures are recorded
without a bound: they are judged by their task metric. A number that is not finite is refused in every precision, and a
decoder that ranks its logits must rank them as a sort does.

R rows, T tokens, S source tokens, P asked positions, V vocabulary, C ranked tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_export.candidate import Candidate, run_batch
from headway_export.differences import LEAST_SIZE, relative_errors
from headway_export.errors import ParityError
from headway_export.reference import Reference
from headway_export.rounding import FACTOR, is_explained, rounded_answers
from headway_export.source import ExportSource
from headway_export.tasks.table import task_of
from headway_server.bundles import AttentionFigures, ParityFigures, Precision
from headway_server.decoding.interfaces import PromptMedia, Ranking, steps_of
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import CrossTensors

LOGIT_BOUND = 1e-4
WEIGHT_BOUND = 1e-4
"""Of an attention weight, and of what rows of them sum to in fp32 and int8; both are from 0 to 1."""
_HALF_SUM_BOUND = 2e-3
"""Of what rows sum to in fp16."""
TIE_MARGIN = 1e-4

BATCH_SIZES = (1, 3, 8)
_LENGTHS = (2, 7, 16, 33, 64, 100, 129, 257)
_LONG = 500
DECODED_TOKENS = 16
_MOST_LOGITS = 1 << 25
"""Of a text that are compared at a time: 128 MiB. Of a longer text or a larger vocabulary, so many evenly spread."""
_MAX_ATTENTION_BYTES = 64 << 20
"""Of the weights that are compared at a time."""
_NORMALIZER_BOUND = 1e-5
SEED = 0


def check(candidate: Candidate, reference: Reference) -> ParityFigures:
    """Compares a variant with PyTorch.

    Raises:
        ParityError: An fp32 variant is past its bound; the message gives output, shape, difference and bound. Or a
            variant gives a number that is not finite, ranks wrongly, or verifies drafts otherwise than it decodes.
    """
    source, exported = candidate.source, task_of(candidate.source.task)
    is_fp32 = candidate.precision is Precision.FP32
    comparison = Comparison(
        bound=LOGIT_BOUND if is_fp32 else None,
        recorded=exported.output_of(source),
        of_softmax="logits" if exported.has_softmax(source) else None,
        least_size=exported.least_size(source),
    )
    try:
        exported.compare(candidate, reference, comparison)
    except ParityError:
        if is_fp32:  # a model that answers otherwise each time differs for that reason
            reference.check_is_steady()
        raise
    if is_fp32:
        reference.check_is_steady()
    return ParityFigures(
        max_relative_logit_error=comparison.max_error,
        bound=comparison.bound,
        checked_shape_count=comparison.num_shapes,
        greedy_token_count=comparison.num_tokens,
        greedy_mismatch_count=comparison.num_mismatches,
        rounded_count=comparison.num_rounded,
        provider="CUDAExecutionProvider" if candidate.runtime.device == "cuda" else "CPUExecutionProvider",
    )


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Figures so far."""

    bound: float | None
    recorded: str = "logits"
    """The output whose error is kept."""
    of_softmax: str | None = "logits"
    """The output that a softmax makes probabilities of."""
    least_size: float = LEAST_SIZE
    """Least size that differences of other outputs are divided by."""
    max_error: float = 0.0
    num_shapes: int = 0
    num_tokens: int = 0
    num_mismatches: int = 0
    num_rounded: int = 0
    """Answers past the bound that rounding explains."""

    def add(
        self, name: str, found: NDArray[Any], expected: NDArray[Any], where: str, again: Callable[[], NDArray[Any]]
    ) -> None:
        """Compares rows of an output, (..., D).

        The error of `logits` is what the manifest records; of an embedder's output, the embedding's.

        Args:
            name: Of the output.
            found: What the variant gives.
            expected: What PyTorch gives.
            where: The input, for messages.
            again: Asks PyTorch once more for what is expected, for an answer past the bound.
        """

        def error_of(found: NDArray[Any]) -> float:
            is_softmax = name == self.of_softmax
            errors = relative_errors(np.atleast_1d(found), exact, of_softmax=is_softmax, least_size=self.least_size)
            return float(errors.max(initial=0.0))

        exact = np.atleast_1d(expected)
        error = error_of(found)
        if not np.isfinite(error):
            whose = "PyTorch gives" if np.isnan(exact).any() or (exact == np.inf).any() else "the variant gives"
            raise ParityError(f"output {name} {found.shape} at {where}: {whose} numbers that are not finite")
        if name == self.recorded:
            self.max_error = max(self.max_error, error)
        if self.bound is None or error <= self.bound:
            return
        if not is_explained(error, again, error_of):
            raise ParityError(
                f"output {name} {found.shape} at {where}: relative difference {error:.2e} from PyTorch, "
                f"bound {self.bound:.0e}, and rounding does not explain it"
            )
        self.num_rounded += 1

    def add_outputs(
        self, found: Mapping[str, NDArray[Any]], where: str, answer: Callable[[], Mapping[str, NDArray[Any]]]
    ) -> None:
        """Compares all outputs of one input with what PyTorch answers."""
        for name, exact in answer().items():

            def again(name: str = name) -> NDArray[Any]:
                return answer()[name]

            self.add(name, found[name], exact, where, again)

    def add_greedy(
        self,
        tokens: NDArray[np.int64],
        expected: NDArray[np.float32],
        where: str,
        again: Callable[[], NDArray[np.float32]],
    ) -> None:
        """Compares chosen tokens, (T,), with PyTorch's logits for them, (T, V); the last two arguments are `add`'s."""
        best_two = np.partition(expected, -2, axis=-1)[:, -2:]
        clear = best_two[:, 1] - best_two[:, 0] >= TIE_MARGIN
        wrong = (expected.argmax(axis=-1) != tokens) & clear
        if self.bound is not None and wrong.any():
            rows = np.arange(len(tokens))
            margins = expected.max(axis=-1) - expected[rows, tokens]
            for rounded in rounded_answers(again):
                moves = np.abs(rounded - expected)
                wrong &= margins > FACTOR * np.maximum(moves[rows, tokens], moves[rows, expected.argmax(axis=-1)])
                if not wrong.any():
                    break
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


def asked_positions(length: int, vocab_size: int) -> NDArray[np.int64]:
    """Returns positions of a text that are compared: all, or as many as there is room for, and the last."""
    count = min(length, max(2, _MOST_LOGITS // vocab_size))
    return np.unique(np.linspace(0, length - 1, count).astype(np.int64))


def read_text(
    runner: DecoderRunner,
    slot: int,
    token_ids: NDArray[np.int64],
    asked: NDArray[np.int64],
    source: CrossTensors | None = None,
    *,
    media: PromptMedia | None = None,
) -> NDArray[np.float32]:
    """Reads a text into a slot, chunk by chunk, and returns the logits after the asked tokens: (T,), (P,) -> (P, V)."""
    return np.concatenate([logits for _, logits in read_chunks(runner, slot, token_ids, asked, source, media=media)])


def read_chunks(
    runner: DecoderRunner,
    slot: int,
    token_ids: NDArray[np.int64],
    asked: NDArray[np.int64],
    source: CrossTensors | None = None,
    *,
    media: PromptMedia | None = None,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Reads a text into a slot and yields the asked positions of each chunk with the logits there, (P,) and (P, V).

    A chunk none of whose logits but the last are asked for is read as a server reads a prompt.
    """
    for start, stop in steps_of(len(token_ids), runner.prefill_chunk, media):
        chunk = token_ids[start:stop]
        given = None if media is None else media.between(start, stop)
        here = asked[(asked >= start) & (asked < start + len(chunk))] - start
        if (here < len(chunk) - 1).any():
            logits = runner.score(slot, chunk, start, source, media=given)
            yield here + start, logits if len(here) == len(chunk) else logits[here]
        else:
            last = runner.prefill(slot, chunk, start, source, media=given)
            yield here + start, last[np.newaxis][: len(here)].copy()


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
    for items in task_of(candidate.source.task).attention_items(candidate):
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


def attention_texts(
    candidate: Candidate, *, frame: bool
) -> Iterator[tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]]:
    """Yields batches of texts whose attention weights are few enough, and of as many others."""
    source, graph = candidate.source, candidate.variant.graphs["attention"]
    limit = source.limits.max_input_tokens
    assert limit is not None, "the source has read the module's lengths"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    num_maps = sum(int(spec.shape[1]) for spec in graph.outputs) * max(BATCH_SIZES)
    limit = min(limit, source.limits.max_total_tokens or limit, int((_MAX_ATTENTION_BYTES / 4 / num_maps) ** 0.5))
    texts = sample_tokens(source, source.tokenizer.get_vocab_size(), limit, frame=frame)
    for lengths in batches(limit):
        batch = [texts[row % len(texts)][:length] for row, length in enumerate(lengths)]
        yield batch, [texts[-row - 1] for row in range(len(lengths))]


def batches(limit: int) -> list[list[int]]:
    """Returns the lengths of the rows of each batch, from 1 up to the limit, which a batch of three reaches too."""
    longest = min(_LONG, max(1, limit - 1))
    lengths = [length for length in _LENGTHS if length < limit] or [limit]
    rows = ([limit], [limit, 1, longest], lengths)
    return [list(islice(cycle(some), size)) for some, size in zip(rows, BATCH_SIZES, strict=True)]


def sample_tokens(source: ExportSource, vocab_size: int, length: int, *, frame: bool) -> list[NDArray[np.int64]]:
    """Returns rows of `length` tokens: of the evaluation data, run together, or drawn at random where there is none."""
    rows = max(BATCH_SIZES)
    if source.evaluation is None or source.tokenizer is None:
        generator = np.random.default_rng(SEED)
        return list(generator.integers(0, vocab_size, (rows, length)))
    if source.evaluation.sequences:
        return list(np.resize(np.concatenate(source.evaluation.sequences), (rows, length)))
    texts = source.evaluation.texts[: rows * max(1, length)]
    if not frame:
        texts = [text[: rows * length * 16] for text in texts]
    tokens = np.concatenate(source.encode(texts, frame=frame))
    return list(np.resize(tokens, (rows, length)))


def sample_images(source: ExportSource, count: int) -> NDArray[np.uint8]:
    """Returns images of the evaluation data, or drawn ones where there are too few."""
    if source.evaluation is not None and len(source.evaluation) >= count:
        return source.evaluation.images[:count]
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    shape = (count, source.image_preprocessing.height, source.image_preprocessing.width, 3)
    return np.random.default_rng(SEED).integers(0, 256, shape).astype(np.uint8)
