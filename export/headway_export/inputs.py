"""What variants read beside the proof with PyTorch: inputs that judge them, and others that scales are taken from.

They come from the evaluation data, from texts, images and recordings that are given, or are drawn (`synthetic.py`).
Where there is no evaluation data, a decoder reads what its fp32 variant writes. A generator goes on from beginnings
that are drawn, at a temperature of 1; an encoder-decoder writes of each source greedily and at that temperature.

N inputs, T tokens, S source tokens, R rows of a step, P tokens that are given, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_export import synthetic
from headway_export.candidate import Candidate, pixel_values_of
from headway_export.source import EvaluationData, ExportSource, Readable
from headway_export.tasks.table import task_of
from headway_server.batching import Tensors
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.tasks.text.model import text_tensors
from headway_server.tasks.tokens.pages import Page, token_boxes
from headway_training.tokenizers import encode_pairs

GENERATED: Final = "generated"
"""In place of a data set's name, where inputs are drawn."""
NUM_CALIBRATED: Final = 32
"""Inputs that scales are taken from, at most."""
HELD_OUT_SHARE: Final = 10
"""Scales are taken from one evaluation example of so many at most, or else from those that judge as well."""
_GIVEN_SHARE: Final = 4
"""Likewise of inputs that are given."""

_MOST_PRODUCTS: Final = 1.25e11
"""Multiplications with weights that fp32 may take for the inputs that judge: 5 s of two cores or less."""
NUM_ITEMS: Final = (128, 2048)
"""Of a model without state."""
NUM_VECTORS: Final = (64, 128)
"""Of a model of embeddings, whose cosines differ little."""
NUM_LONG: Final = (64, 128)
"""Of a model that answers once for an input of many frames: fewer could not tell that 95 of 100 answers agree."""
NUM_MASKED: Final = (32, 64)
"""Images of a segmentation model, each of which is thousands of predictions."""
LENGTHS: Final = (4, 64)
"""Tokens of a drawn text."""
FULL_SHARE: Final = 32
"""One drawn text of so many is as long as the model reads."""
_PATCH_PIXELS: Final = 256
"""Of an image, counted as one position."""
_SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderText:
    """What a decoder reads."""

    token_ids: NDArray[np.int64]
    """(T,)"""
    num_given: int = 1
    """Tokens before the first that the model has to predict."""
    source: Readable | None = None
    """What the encoder reads, if there is one: tokens, (S,), pixels, (3, height, width), or (mel bins, frames)."""
    images: NDArray[np.float32] | None = None
    """Tiles of a prompt's images, (N, 3, height, width), whose embeddings the token of `ImagePrompt` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs whose right answers are not looked at."""

    dataset: str
    """Name of what they come from, or `GENERATED`."""
    texts: tuple[DecoderText, ...] = ()
    """Of a model that writes."""
    items: tuple[Tensors, ...] = ()
    """Of a model without state."""

    def __len__(self) -> int:
        """The number of inputs."""
        return len(self.texts) or len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The inputs of a proof."""

    judged: Inputs
    """Those that variants are judged by."""
    calibration: Inputs
    """Those that the scales of an int8 cache and of fixed activations are taken from."""
    is_disjoint: bool
    """True if no input is in both."""


def hold_out(source: ExportSource) -> tuple[ExportSource, EvaluationData | None]:
    """Takes from the evaluation data what scales are taken from, where it is enough.

    Returns:
        The source with the rest; and what was taken, None where everything judges.
    """
    data = source.evaluation
    if data is None:
        return source, None
    if len(data) >= HELD_OUT_SHARE * NUM_CALIBRATED:
        taken = np.linspace(0, len(data) - 1, NUM_CALIBRATED).astype(np.int64)
        rest = np.setdiff1d(np.arange(len(data)), taken)
        return replace(source, evaluation=data.take(rest)), data.take(taken)
    parts = task_of(source.task).hold_out(source, data)
    return (source, None) if parts is None else (replace(source, evaluation=parts[0]), parts[1])


def draw(candidate: Candidate, held_out: EvaluationData | None = None) -> Drawn:
    """Returns the inputs of a source.

    Args:
        candidate: The fp32 variant, with evaluation data that judges, if there is any.
        held_out: Evaluation data that does not.
    """
    source = candidate.source
    if source.evaluation is not None:
        judged = of_evaluation(source, source.evaluation, candidate=candidate)
        apart = source.evaluation if held_out is None else held_out
        calibration = of_evaluation(source, apart, NUM_CALIBRATED, candidate=candidate)
        return Drawn(judged=judged, calibration=calibration, is_disjoint=held_out is not None)
    return Draw(candidate).all()


def of_evaluation(
    source: ExportSource, data: EvaluationData, most: int | None = None, *, candidate: Candidate | None = None
) -> Inputs:
    """Returns inputs of evaluation data, evenly from all of it.

    Args:
        source: The model.
        data: The data.
        most: How many; None: as many as judge.
        candidate: The fp32 variant, for a model that draws images.
    """
    return task_of(source.task).inputs_of(source, data, most, candidate)


# Given and drawn inputs


@dataclass
class Draw:
    """Draws the inputs of a source without evaluation data; those that are given come in place of drawn ones."""

    candidate: Candidate
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(_SEED))

    @property
    def source(self) -> ExportSource:
        """What is exported."""
        return self.candidate.source

    def all(self) -> Drawn:
        """Returns all inputs."""
        source = self.source
        given = bool(source.texts or source.recordings or source.images is not None)
        judged, calibration = task_of(source.task).draw(self)
        dataset = source.texts_name if given else GENERATED
        name = "items" if judged and not isinstance(judged[0], DecoderText) else "texts"
        return Drawn(
            judged=Inputs(dataset=dataset, **{name: tuple(judged)}),
            calibration=Inputs(dataset=dataset, **{name: tuple(calibration)}),
            is_disjoint=judged is not calibration,
        )

    # Decoders

    # Encoder-decoders

    # Models without state

    def languages(self) -> tuple[str, str]:
        """Draws what is read and what is written, among the codes that the model has."""
        known = self.source.languages
        spoken: Sequence[str] = ("",) if known is None else known.sources or ("",)
        written: Sequence[str] = ("",) if known is None else known.targets
        return str(self.generator.choice(spoken)), str(self.generator.choice(written))

    def texts(self, count: int) -> list[str]:
        """Draws texts of several lengths, some of them as long as the model reads."""
        source, limit = self.source, self.source.limits.max_input_tokens or LENGTHS[1]
        assert source.tokenizer is not None, "a text model has its tokenizer"
        shortest, longest = min(LENGTHS[0], limit), min(LENGTHS[1], limit)
        lengths = np.exp(self.generator.uniform(np.log(shortest), np.log(longest + 1), count)).astype(int)
        lengths[:: min(FULL_SHARE, max(1, count // 2))] = 2 * limit  # encoding may join tokens, and cuts at the limit
        return synthetic.draw_texts(source.tokenizer, lengths.tolist(), self.generator)

    def pixels(self, count: int) -> list[Tensors]:
        """Returns the images that are given, or draws some."""
        source = self.source
        assert source.image_preprocessing is not None, "an image model has its preprocessing"
        if source.images is not None:
            return list(image_items(source, evenly(source.images, count)))
        height, width = source.image_preprocessing.largest
        return list(image_items(source, synthetic.draw_images(count, height, width, self.generator)))


def write_on(  # noqa: PLR0917 (a text's parts, which belong together)
    runner: DecoderRunner,
    starts: NDArray[np.int64],
    length: int,
    is_drawn: NDArray[np.bool_],
    ends: Collection[int],
    forbidden: Sequence[int],
    generator: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Writes on at starts, (R, P), and returns what stands before the end of each row, starts included.

    Args:
        runner: A decoder, with its sources.
        starts: What is given of each row.
        length: Most tokens of a row.
        is_drawn: (R,), True to draw a row's tokens at a temperature of 1 rather than to take the likeliest.
        ends: Tokens that end a row.
        forbidden: Tokens that are never written.
        generator: What tokens are drawn with.
    """
    rows, num_given = starts.shape
    tokens, stops = starts, np.full(rows, length)
    for position in range(length):
        logits = runner.decode(tokens[:, position], np.full(rows, position))  # (R, V)
        if position + 1 < num_given:
            continue
        logits[:, list(forbidden)] = -np.inf
        chosen = logits.argmax(axis=-1)
        for row in np.flatnonzero(is_drawn):
            chances = np.cumsum(np.exp(logits[row] - logits[row].max()), dtype=np.float64)
            chosen[row] = np.searchsorted(chances, generator.uniform(0, chances[-1]), side="right")
        ended = np.isin(chosen, list(ends)) & (stops == length)
        stops[ended] = position + 1
        if position + 1 == length or (stops < length).all():
            break
        tokens = np.concatenate([tokens, chosen[:, np.newaxis]], axis=1)
    return [row[:stop] for row, stop in zip(tokens, stops, strict=True)]


# How many


def affordable(source: ExportSource, positions: float, least: int, most: int) -> int:
    """Returns how many inputs of so many positions are affordable."""
    return int(np.clip(_MOST_PRODUCTS / (source.architecture.parameter_count * positions), least, most))


def image_positions(source: ExportSource) -> int:
    """Returns how many positions an image counts as."""
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    height, width = source.image_preprocessing.largest
    return max(1, height * width // _PATCH_PIXELS)


def places(length: int, count: int) -> NDArray[np.int64]:
    """Returns `count` places of a list, evenly from all of it; all of them if there are no more."""
    return np.arange(length) if count >= length else np.linspace(0, length - 1, count).astype(np.int64)


def evenly(values: Sequence[Any] | NDArray[Any], count: int) -> list[Any]:
    """Returns `count` values, evenly from all of them."""
    return [values[place] for place in places(len(values), count)]


def apart(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """Parts inputs into those that judge and those that scales are taken from; the same twice, if they are too few."""
    count = min(NUM_CALIBRATED, len(values) // _GIVEN_SHARE)
    if count < 2:
        return values, values
    taken = set(places(len(values), count).tolist())
    return [one for at, one in enumerate(values) if at not in taken], [values[at] for at in sorted(taken)]


# As a graph reads them


def text_items(source: ExportSource, texts: Sequence[str], pairs: Sequence[str] | None) -> list[Tensors]:
    """Makes a graph's inputs of texts, or of pairs of them, as a server does, cut to the model's length."""
    limit, has_types = source.limits.max_input_tokens, source.has_token_types
    assert limit is not None, "the source has read the module's length"
    assert source.tokenizer is not None, "a text model has its tokenizer"
    if pairs is not None and source.scoring is not None and source.scoring.template is not None:
        texts, pairs = [source.scoring.joined(text, pair) for text, pair in zip(texts, pairs, strict=True)], None
    if pairs is None or (source.scoring is not None and source.scoring.late_interaction is not None):
        rows = source.encode(texts, limit)
        return [text_tensors(ids, has_types=has_types, boxes=drawn_boxes(source, ids)) for ids in rows]
    encoded = zip(*encode_pairs(source.tokenizer, texts, pairs, limit), strict=True)
    return [text_tensors(np.array(ids), np.array(types), has_types=has_types) for ids, types in encoded]


def drawn_boxes(source: ExportSource, ids: NDArray[np.int64]) -> NDArray[Any] | None:
    """Draws the boxes of a text's tokens, which are (T,), between two special ones: (T, 4), the same for the same text.

    None of a model that reads none.
    """
    if (unit := source.word_boxes) is None:
        return None
    count = max(0, len(ids) - 2)
    sides = synthetic.draw_boxes(count, np.random.default_rng(ids))
    boxes = Page(words=(), boxes=()).scaled(sides, unit)
    return token_boxes(boxes, [None, *range(count), None][: len(ids)], unit)


def image_items(source: ExportSource, images: Iterable[NDArray[np.uint8]]) -> tuple[Tensors, ...]:
    """Makes a graph's inputs of images, (height, width, 3) each."""
    return tuple({"pixel_values": pixel_values_of(source, image[np.newaxis])[0]} for image in images)
