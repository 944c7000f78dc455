"""Measures how far a variant's answers are from fp32's: the judge where nobody knows the right ones, else a record.

Both read the same inputs (`inputs.py`) through the runners that serve. An answer is a row of numbers: the logits after
a token or of an input, an embedding, a mask. Of each kind:

- Distributions, of tokens and labels: the Kullback-Leibler divergence of fp32's from the variant's, in nats; where
  several labels may apply, that of each label's own probability. Its mean over all, and the largest mean over a label
  or over a band of positions.
- Choices: the share that are fp32's. A choice that fp32 itself holds nearly as likely as its own is no fault.
- Vectors: their cosine, the mean and the least.
- Masks: intersection over union of what either variant cuts out. Where neither cuts out anything, nothing is shown.
- Objects: the share of either variant's objects that the other has too, with the same label and an intersection over
  union of one half; and the mean of theirs. Objects whose score is close to the threshold are no fault.
- Pixels: as choices of one, and the mean over labels of the intersection over union of their pixels.
- Depth: the sum of an image's differences, relative to that of its values.
- Everything but objects: how each column of the rows varies over the inputs, by Lin's concordance (1989) without the
  shift of its mean, 2 cov / (var + var'): 1 if both variants vary alike, 0 if one of them answers a constant.

A figure that is a mean has an interval, and its limit is held against the interval's worse end.

N inputs, R rows, C columns, V vocabulary, M masks of a prompt, S side of a mask, O objects.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import expit, logit, ndtri, stdtrit

from headway_export.candidate import Candidate, media_of, open_sources
from headway_export.errors import ParityError
from headway_export.given import flag_of
from headway_export.inputs import DecoderText, Drawn, Inputs
from headway_export.source import ExportSource, has_metric
from headway_export.tasks.table import task_of
from headway_server.bundles import AgreementFigures, ClassificationScheme, Detection, Precision
from headway_server.decoding.interfaces import steps_of
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.tasks.detection.objects import Objects
from headway_server.tasks.outputs import log_softmax
from headway_server.tasks.segmentation.decoder import PREDICTED_IOU

Kind: TypeAlias = Literal["choice", "choices", "score", "vector", "mask", "objects", "pixel", "depth"]
"""What a row is: logits of which one is chosen, or each by itself, a logit, a vector, logits of a mask's pixels, the
outputs of a detector, logits of a pixel's labels, or the depth of an image's pixels."""

MARGIN: Final = 0.25
"""Nats by which fp32 must hold its choice likelier than the variant's, for that to be a fault: 1.28 times as likely.

Of a label or a pixel by itself, how far fp32's logit must be from where the choice changes."""
CONFIDENCE: Final = 0.9
"""Of an interval with two ends; that a limit holds is 0.95 sure, since one end alone is held against it."""

LIMITS: Final = {
    "mean_kl_divergence": 0.05,
    "worst_kl_divergence": 0.15,
    "top_agreement": 0.95,
    "mean_cosine": 0.99,
    "least_cosine": 0.95,
    "mean_mask_iou": 0.95,
    "mean_box_iou": 0.9,
    "mean_label_iou": 0.8,
    "mean_relative_error": 0.05,
    "correlation": 0.9,
    "least_correlation": 0.5,
    "iou_correlation": 0.5,
}
"""The most nats a prediction, of fp32's distribution against the variant's, and the most relative error; of all others
the least."""
LIMITS_OF_KINDS: Final[dict[Kind, dict[str, float]]] = {"score": {"correlation": 0.98}, "choices": {"mean_cosine": 0.9}}
"""In place of these: scores are judged by little else, and the cosines of logits have no common part."""
LIMITS_OF_INT4: Final = {
    "mean_kl_divergence": 0.1,
    "worst_kl_divergence": 0.3,
    "top_agreement": 0.9,
    "correlation": 0.8,
}
"""In place of these: 15 steps to a block round more than 254 to a column (docs/decisions/int4-weights.md)."""
LIMITS_BESIDE_A_METRIC: Final = {"correlation": 0.5, "least_correlation": 0.2}
"""Where a task metric judges: a variant must not answer a constant."""
LEAST_BOX_IOU: Final = 0.5
"""Intersection over union from which two boxes are of one object."""
_ERRORS: Final = ("mean_kl_divergence", "worst_kl_divergence", "mean_relative_error")
"""Figures that are better if they are smaller."""

_UNIT: Final = 32
"""Neighbouring predictions of an input that count as one when an interval is computed, since they are much alike."""
_FIRST_BAND: Final = 64
"""Positions of the first band; each further one has as many as all before it."""
_LEAST_OF_A_BAND: Final = 16
_LEAST_OF_A_LABEL: Final = 16
"""Pixels from which a label has an intersection over union."""
_MOST_COLUMNS: Final = 1024
"""Whose variation is compared, evenly from all of them."""
_CONSTANT: Final = 0.05
"""A column varies if its standard deviation in fp32 is more than this share of the median column's that is not 0."""
SEED: Final = 0


class Rows(NamedTuple):
    """Answers to some inputs or tokens."""

    values: NDArray[np.float32]
    """(R, C); of a choice, logarithms of probabilities."""
    positions: NDArray[np.int64]
    """(R,), the position of each, or the length of the input."""
    number: int
    """Of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Inputs, and what fp32 answers to them."""

    drawn: Drawn
    kind: Kind
    is_beside_a_metric: bool
    """True if a task metric decides."""
    answers: NDArray[Any]
    """(R, C) of fp32, on disk if they are many."""

    @classmethod
    def of(cls, candidate: Candidate, drawn: Drawn) -> Self:
        """Notes what fp32, the candidate, answers."""
        rows = list[NDArray[np.float32]]()
        spool, end = None, 0
        for found in task_of(candidate.source.task).answers(candidate, drawn.judged):
            if drawn.judged.texts:  # logits of a vocabulary take much memory
                spool = _spool(candidate, drawn.judged, found.values.shape[1]) if spool is None else spool
                spool[end : end + len(found.values)] = found.values
                end += len(found.values)
            else:
                rows.append(found.values)
        return cls(
            drawn=drawn,
            kind=task_of(candidate.source.task).kind(candidate.source),
            is_beside_a_metric=candidate.source.evaluation is not None,
            answers=np.concatenate(rows) if spool is None else spool,
        )

    def measure(self, candidate: Candidate) -> AgreementFigures:
        """Compares a variant with fp32.

        Raises:
            ParityError: A figure is past its limit, or too uncertain to tell.
        """
        source, judged = candidate.source, self.drawn.judged
        outputs = {spec.name: spec for graph in candidate.variant.graphs.values() for spec in graph.outputs}
        comparison = _Comparison(
            kind=self.kind,
            scheme=source.classification or ClassificationScheme(),
            has_labels=bool(source.labels) and self.kind in ("choice", "choices", "pixel"),
            is_probability=source.scoring is None or source.scoring.activation == "sigmoid",
            detection=source.detection,
            num_masks=int(outputs[PREDICTED_IOU].shape[-1]) if self.kind == "mask" else 0,
        )
        end = 0
        for found in task_of(source.task).answers(candidate, judged):
            start, end = end, end + len(found.values)
            comparison.add(self.answers[start:end].astype(np.float32), found)
        figures, intervals = comparison.figures()
        limits = limits_of(candidate.precision, figures, self.kind, is_beside_a_metric=self.is_beside_a_metric)
        self._check(candidate, figures, intervals, limits)
        return AgreementFigures(
            dataset=judged.dataset,
            example_count=len(judged),
            prediction_count=comparison.num_predictions,
            figures=figures,
            intervals={name: ends for name, ends in intervals.items() if all(map(math.isfinite, ends))},
            limits=limits,
            calibrated_on=_calibrated_on(candidate, self.drawn),
        )

    def _check(
        self,
        candidate: Candidate,
        figures: Mapping[str, float],
        intervals: Mapping[str, tuple[float, float]],
        limits: Mapping[str, float],
    ) -> None:
        """Holds figures to their limits.

        Raises:
            ParityError: One is past its limit, or not a number.
        """
        where = f"with fp32 on {len(self.drawn.judged)} inputs ({self.drawn.judged.dataset})"
        advice = "" if self.is_beside_a_metric else f"; {_advice(candidate.source)}"
        if not figures:
            raise ParityError(f"{candidate.precision}: fp32 answers all inputs alike, so that nothing is told{advice}")
        for name, value in figures.items():
            limit = limits.get(name)
            low, high = (value, value) if self.is_beside_a_metric else intervals.get(name, (value, value))
            sign, end = (-1, high) if name in _ERRORS else (1, low)
            if math.isfinite(value) and (limit is None or sign * end >= sign * limit):
                continue
            found = f"{candidate.precision}: {name} {where} is {value:.4f}"
            if limit is not None and sign * value >= sign * limit:
                found += f", and may be {end:.4f}, since there are few inputs"
            raise ParityError(f"{found}; limit {limit}{advice}")


def _advice(source: ExportSource) -> str:
    """Says what a user can do."""
    flags = " or ".join([flag_of(source), *(["--evaluation FILE"] if has_metric(source) else [])])
    return f"judge it on data of your own, {flags}, or export --precision fp32 alone"


def limits_of(
    precision: Precision, names: Iterable[str], kind: Kind = "choice", *, is_beside_a_metric: bool = False
) -> dict[str, float]:
    """Returns the limits of some figures of a variant, where they have one."""
    limits = LIMITS | LIMITS_OF_KINDS.get(kind, {}) | (LIMITS_OF_INT4 if precision is Precision.INT4 else {})
    limits = LIMITS_BESIDE_A_METRIC if is_beside_a_metric else limits
    return {name: limits[name] for name in names if name in limits}


def _calibrated_on(candidate: Candidate, drawn: Drawn) -> Literal["other inputs", "these inputs"] | None:
    """Says what scales were taken from, if the variant has such."""
    has_cache = any(spec.dtype == "int8" for graph in candidate.variant.graphs.values() for spec in graph.inputs)
    if not has_cache and candidate.precision is not Precision.INT8_STATIC:
        return None
    return "other inputs" if drawn.is_disjoint else "these inputs"


# Answers


def _spool(candidate: Candidate, inputs: Inputs, num_columns: int) -> NDArray[np.float16]:
    """Makes room for the answers of a decoder in a file beside the bundle, which is gone when it is closed.

    Logarithms of probabilities are near 0 where they count, so that 16 bits are enough.
    """
    count = sum(len(text.token_ids) - text.num_given + 1 for text in inputs.texts)
    with tempfile.TemporaryFile(dir=candidate.bundle.path) as file:
        return np.memmap(file, np.float16, "w+", shape=(count, num_columns))


def distributions(candidate: Candidate, texts: Sequence[DecoderText]) -> Iterator[Rows]:
    """Yields logarithms of the probabilities, (R, V), of what may follow each token of a text, from the last given."""
    source = candidate.source
    sources = {id(text.source): text.source for text in texts if text.source is not None}
    has_encoder = "encoder" in candidate.variant.graphs
    encoded = candidate.encode([one] for one in sources.values()) if has_encoder else []
    of_source = dict(zip(sources, encoded, strict=has_encoder))
    longest = max(len(text.token_ids) for text in texts)
    shown = [text.images for text in texts if text.images is not None]
    embedded = iter(candidate.embed_tiles(shown) if shown else ())
    runner = candidate.open_decoder(1, max_length=longest, sources=[one for (one,) in encoded])
    for number, text in enumerate(texts):
        if has_encoder:
            open_sources(runner, of_source[id(text.source)])
        media = None
        if text.images is not None:
            media = media_of(source, text.token_ids, text.images, next(embedded), text.num_given)
        for start, stop in steps_of(len(text.token_ids), runner.prefill_chunk, media):
            ids = text.token_ids[start:stop]
            # `score` begins a state without positions anew, which the source has filled.
            has_begun = has_encoder and not runner.keeps_positions
            given = None if media is None else media.between(start, stop)
            logits = _decoded(runner, ids, start) if has_begun else runner.score(0, ids, start, media=given)
            skipped = max(0, text.num_given - 1 - start)
            if skipped >= len(logits):
                continue
            logits = logits[skipped:]
            logits[:, list(source.suppressed_tokens)] = -1e4  # a server never takes them
            yield Rows(log_softmax(logits), start + skipped + np.arange(len(logits)), number)


def _decoded(runner: DecoderRunner, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
    """Reads tokens, (T,), one after another and returns the logits after each, (T, V)."""
    places = np.arange(start, start + len(token_ids))
    return np.concatenate(
        [runner.decode(token_ids[at : at + 1], places[at : at + 1]).copy() for at in range(len(places))]
    )


# Figures


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Rows of both variants, as they come."""

    kind: Kind
    scheme: ClassificationScheme
    has_labels: bool
    """True if each column is a label."""
    is_probability: bool = True
    """True if a score is the sigmoid of its logit."""
    detection: Detection | None = None
    """How a row becomes objects."""
    num_masks: int = 0
    """Columns at the end of a row that are no pixels: the IoU that is predicted of each mask."""
    num_predictions: int = 0
    _columns: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]] = field(default_factory=lambda: ([], []))
    """(R, at most `_MOST_COLUMNS` and the masks) of fp32 and of the variant."""
    _divergences: list[NDArray[np.float64]] = field(default_factory=list)
    """(R,), or (R, C) of labels."""
    _agrees: list[NDArray[np.bool_]] = field(default_factory=list)
    _cosines: list[NDArray[np.float64]] = field(default_factory=list)
    _ious: list[NDArray[np.float64]] = field(default_factory=list)
    _labels: list[NDArray[np.int64]] = field(default_factory=list)
    """(2, R), labels of pixels by fp32 and by the variant."""
    _errors: list[NDArray[np.float64]] = field(default_factory=list)
    """(R,), of depth."""
    _positions: list[NDArray[np.int64]] = field(default_factory=list)
    _units: list[NDArray[np.int64]] = field(default_factory=list)
    """(R,), what counts as one in an interval."""

    def add(self, expected: NDArray[np.float32], found: Rows) -> None:
        """Adds rows, (R, C), of fp32 and of the variant."""
        values = found.values
        self._positions.append(found.positions)
        self._units.append(found.number * (1 << 32) + found.positions // _UNIT)
        if self.kind == "objects":
            self._add_objects(expected[0], values[0])
            return
        self.num_predictions += len(values)
        count = values.shape[1] - self.num_masks
        self._keep_columns(expected, values, count)
        match self.kind:
            case "choice" | "pixel":
                self._add_choices(expected, values)
            case "score":
                if self.is_probability:
                    self._divergences.append(_binary_divergences(expected, values))
            case "choices":
                self._divergences.append(_binary_divergences(expected, values))
                shares = np.clip(np.asarray(self.scheme.thresholds, np.float64), 1e-6, 1 - 1e-6)
                limits = np.log(shares / (1 - shares))
                is_unsure = np.abs(expected - limits) <= MARGIN
                self._agrees.append(is_unsure | ((expected >= limits) == (values >= limits)))
            case "vector":
                self._cosines.append(_cosines(expected, values))
            case "depth":
                self._errors.append(_relative_errors(expected, values))
            case "mask":
                self._ious.append(_ious(*(rows[0, :count].reshape(self.num_masks, -1) for rows in (expected, values))))

    def _keep_columns(self, expected: NDArray[np.float32], values: NDArray[np.float32], count: int) -> None:
        """Keeps some of the first `count` columns, and all further ones."""
        for side, rows in zip(self._columns, (expected, values), strict=True):
            kept = np.concatenate([rows[:, : count : -(-count // _MOST_COLUMNS)], rows[:, count:]], axis=1)
            if self.kind in ("choice", "pixel"):  # what a row's logits have in common says nothing
                kept -= rows.mean(axis=1, keepdims=True)
            side.append(kept)

    def _add_choices(self, expected: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """Adds logarithms of probabilities, (R, C)."""
        self._divergences.append((np.exp(expected) * (expected - found)).sum(axis=1, dtype=np.float64))
        other = found.argmax(axis=1)
        chosen = np.take_along_axis(expected, other[:, np.newaxis], axis=1)[:, 0]
        agrees = expected.max(axis=1) - chosen <= MARGIN
        self._agrees.append(agrees)
        if self.kind == "pixel":
            own = expected.argmax(axis=1)
            self._labels.append(np.stack([own, np.where(agrees, own, other)]))

    def _add_objects(self, expected: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """Adds the objects of an image, (C,)."""
        assert self.detection is not None, "a detector has it"
        first, second = (_objects_of(row, self.detection) for row in (expected, found))
        shares = _box_ious(first.boxes, second.boxes) * (first.labels[:, np.newaxis] == second.labels)  # (O, O)
        rows, columns = linear_sum_assignment(shares, maximize=True)
        is_same = shares[rows, columns] >= LEAST_BOX_IOU
        self._ious.append(shares[rows, columns][is_same])
        for objects, matched in ((first, rows[is_same]), (second, columns[is_same])):
            logits = logit(objects.scores.astype(np.float64))
            agrees = np.abs(logits - logit(self.detection.threshold)) <= MARGIN
            agrees[matched] = True
            self._agrees.append(agrees)
        self.num_predictions += len(first.scores)

    def figures(self) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        """Returns all figures, and the intervals of those that are means."""
        figures: dict[str, float] = {}
        intervals: dict[str, tuple[float, float]] = {}
        units = np.concatenate(self._units)
        for name, values in self._means().items():
            figures[name] = float(values.mean())
            intervals[name] = interval_of_mean(values, units if len(values) == len(units) else np.arange(len(values)))
        if self._agrees and (agrees := np.concatenate(self._agrees)).size:
            figures["top_agreement"] = float(agrees.mean())
            intervals["top_agreement"] = interval_of_share(int(agrees.sum()), agrees.size)
        return figures | self._extremes() | self._correlations(), intervals

    def _means(self) -> dict[str, NDArray[np.float64]]:
        """Returns the values of figures that are means, of one row each, or of the masks that show something."""
        values: dict[str, NDArray[np.float64]] = {}
        if self._divergences:
            divergences = np.concatenate(self._divergences)
            values["mean_kl_divergence"] = divergences if divergences.ndim == 1 else divergences.mean(axis=1)
        if self._errors:
            values["mean_relative_error"] = np.concatenate(self._errors)
        if self._cosines:
            values["mean_cosine"] = np.concatenate(self._cosines)
        if self.kind == "choices":
            first, second = map(np.concatenate, self._columns)
            values["mean_cosine"] = _cosines(first - first.mean(axis=0), second - first.mean(axis=0))
        if self._ious and len(ious := np.concatenate(self._ious)):
            values["mean_mask_iou" if self.kind == "mask" else "mean_box_iou"] = ious
        return values

    def _extremes(self) -> dict[str, float]:
        """Returns the divergence of the worst label or band of positions, and the least cosine."""
        figures: dict[str, float] = {}
        if self._divergences:
            divergences = np.concatenate(self._divergences)  # (R,), or (R, C) of labels
            of_labels = np.atleast_2d(divergences.T)  # (C, R), or (1, R)
            bands = _means_of_bands(of_labels.mean(axis=0), np.concatenate(self._positions))
            figures["worst_kl_divergence"] = float(max([*of_labels.mean(axis=1), *bands]))
        if self._labels and len(ious := _label_ious(np.concatenate(self._labels, axis=1))):
            figures["mean_label_iou"] = float(ious.mean())
        if self._cosines:
            figures["least_cosine"] = float(np.concatenate(self._cosines).min())
        return figures

    def _correlations(self) -> dict[str, float]:
        """Returns how alike columns vary, where they vary."""
        figures: dict[str, float] = {}
        if not self._columns[0]:
            return figures
        first, second = map(np.concatenate, self._columns)
        count = first.shape[1] - self.num_masks
        if len(found := _concordances(first[:, :count], second[:, :count])):
            figures["correlation"] = float(found.mean())
            if self.has_labels:
                figures["least_correlation"] = float(found.min())
        if len(found := _concordances(first[:, count:], second[:, count:])):
            figures["iou_correlation"] = float(found.mean())
        return figures


def interval_of_share(count: int, total: int) -> tuple[float, float]:
    """Wilson's interval (1927) of a share of independent trials."""
    z = float(ndtri((1 + CONFIDENCE) / 2))
    share, weight = count / total, z * z / total
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def interval_of_mean(values: NDArray[np.float64], units: NDArray[np.int64]) -> tuple[float, float]:
    """Student's interval of a mean of values in independent units; endless if there is one unit.

    Args:
        values: (R,)
        units: (R,), the unit of each.
    """
    _, places = np.unique(units, return_inverse=True)
    count, mean = int(places.max()) + 1, float(values.mean())
    if count < 2:
        return -math.inf, math.inf
    sums = np.bincount(places, weights=values - mean)  # of a ratio: units have several sizes
    deviation = math.sqrt(count / (count - 1) * float(np.square(sums).sum())) / len(values)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation
    return mean - half, mean + half


def _binary_divergences(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the divergence of each label's probability, of logits: (R, C), (R, C) -> (R, C)."""
    first, second = expected.astype(np.float64), found.astype(np.float64)
    chances = expit(first)
    applies = np.logaddexp(0, -second) - np.logaddexp(0, -first)
    does_not = np.logaddexp(0, second) - np.logaddexp(0, first)
    divergences: NDArray[np.float64] = chances * applies + (1 - chances) * does_not
    return divergences


def _cosines(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the cosines of rows: (R, C), (R, C) -> (R,)."""
    first, second = expected.astype(np.float64), found.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines: NDArray[np.float64] = (first * second).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)
    return cosines


def _ious(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the intersection over union of what masks, rows of logits, cut out: (M, S S) twice -> (at most M,).

    A pixel of which fp32 is unsure is where it has it. Masks without a pixel on either side are left out.
    """
    first = expected > 0
    second = np.where(np.abs(expected) <= MARGIN, first, found > 0)
    either = (first | second).sum(axis=1)
    shares: NDArray[np.float64] = (first & second).sum(axis=1)[either > 0] / either[either > 0]
    return shares


def _relative_errors(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the sum of differences, relative to that of expected values: (R, C), (R, C) -> (R,)."""
    sums = np.abs(expected).sum(axis=1, dtype=np.float64)
    errors: NDArray[np.float64] = np.abs(expected - found).sum(axis=1, dtype=np.float64)
    errors /= np.maximum(sums, np.finfo(np.float64).tiny)
    return errors


def _label_ious(labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Computes the intersection over union of each label with enough pixels in fp32: (2, R) -> (at most C,)."""
    count = int(labels.max()) + 1
    first, second = (np.bincount(row, minlength=count) for row in labels)
    common = np.bincount(labels[0][labels[0] == labels[1]], minlength=count)
    counted = first >= _LEAST_OF_A_LABEL
    shares: NDArray[np.float64] = common[counted] / (first + second - common)[counted]
    return shares


def _objects_of(row: NDArray[np.float32], scheme: Detection) -> Objects:
    """Reads the objects of logits and boxes, (C,), as a server does; sides are shares of the image."""
    end = len(row) - 4 * scheme.num_queries
    logits, boxes = row[:end].reshape(scheme.num_queries, -1), row[end:].reshape(-1, 4)
    return Objects.of(
        logits, boxes, scheme, threshold=scheme.threshold, size=(1, 1), nms_threshold=scheme.nms_threshold
    )


def _box_ious(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the intersection over union of boxes, left, top, right, bottom: (O, 4), (O, 4) -> (O, O)."""
    boxes, others = first.astype(np.float64)[:, np.newaxis], second.astype(np.float64)
    sides = np.minimum(boxes[..., 2:], others[..., 2:]) - np.maximum(boxes[..., :2], others[..., :2])
    common = np.maximum(sides, 0).prod(axis=-1)
    areas, other_areas = ((each[..., 2:] - each[..., :2]).prod(axis=-1) for each in (boxes, others))
    shares: NDArray[np.float64] = common / np.maximum(areas + other_areas - common, np.finfo(np.float64).tiny)
    return shares


def _means_of_bands(values: NDArray[np.float64], positions: NDArray[np.int64]) -> list[float]:
    """Returns the means of values, (R,), over bands of positions that have enough of them."""
    bands = np.floor(np.log2(np.maximum(positions, _FIRST_BAND // 2) / _FIRST_BAND))
    return [float(values[bands == one].mean()) for one in np.unique(bands) if (bands == one).sum() >= _LEAST_OF_A_BAND]


def _concordances(expected: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    """Computes the concordance of each column that varies in fp32: (R, C), (R, C) -> (at most C,)."""
    first, second = (rows.astype(np.float64) for rows in (expected, found))
    sizes = np.abs(first).max(axis=0, initial=0)
    first, second = first - first.mean(axis=0), second - second.mean(axis=0)
    deviations = first.std(axis=0)
    is_varied = deviations > 1e-5 * sizes
    if not is_varied.any():
        return np.empty(0)
    is_varied &= deviations > _CONSTANT * np.median(deviations[is_varied])
    sums = np.square(first[:, is_varied]).sum(axis=0) + np.square(second[:, is_varied]).sum(axis=0)
    concordances: NDArray[np.float64] = 2 * (first * second)[:, is_varied].sum(axis=0) / sums
    return concordances
