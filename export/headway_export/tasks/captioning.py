"""Texts that say what an image shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of
from headway_export.inputs import DecoderText, Draw
from headway_export.parity import BATCH_SIZES, sample_images
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, quoted, write_greedily
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import Metric
from headway_export.tasks.text_to_text import EncoderDecoder, framed
from headway_export.tracing import Traceable
from headway_server.bundles import Limits, PatchGrid, TensorSpec
from headway_training.metrics import caption_cider, caption_meteor
from headway_training.models.protocols import ImageToText


class Captioning(EncoderDecoder):
    """Captions of images, in one language or several."""

    needed_flags = ("--tokenizer", "--preprocessing")
    metrics = (Metric(name="cider", allowed_loss=1.0),)

    shows_no_attention = "each caption brings its attention to the image"

    def limits(self, module: nn.Module) -> Limits:
        """Reads the grid of an image, and the length of captions."""
        length = int(cast("Any", module).max_target_length)
        return Limits(max_input_tokens=_patches(module).num_tokens, max_total_tokens=length)

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads images, and captions by language."""
        with np.load(file) as arrays:
            captions = arrays["captions"].swapaxes(0, 1).tolist()
            of_languages = zip(arrays["languages"].tolist(), captions, strict=True)
            return {"images": arrays["images"], "captions": dict(of_languages)}

    def described(self, source: ExportSource) -> dict[str, Any]:
        """The patches that a caption attends to."""
        return {"patches": _patches(source.module)}

    def encoder_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Pixels."""
        return [asked.pixels]

    def source_batches(self, source: ExportSource, vocab_size: int, limit: int) -> Iterator[list[NDArray[Any]]]:
        """Yields the pixels of images."""
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        yield from (list(images[:batch_size]) for batch_size in BATCH_SIZES)

    def references(self, data: EvaluationData) -> Sequence[str]:
        """Returns captions of all languages."""
        return [several[0] for captions in data.captions.values() for several in captions]

    def pairs(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        """Yields images with their first captions."""
        pixels = pixel_values_of(source, data.images)
        for language, captions in data.captions.items():
            start = source.caption_start(language)
            for image, ids in zip(pixels, source.encode([several[0] for several in captions]), strict=True):
                yield framed(source, start, ids, image)

    def draw_sources(self, draw: Draw, count: int, most: int) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Returns images, in drawn languages."""
        return [(item["pixel_values"], draw.source.caption_start(draw.languages()[1])) for item in draw.pixels(count)]

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """CIDEr-D of greedy captions, the mean of the languages."""
        captions = {language: _caption(candidate, data.images, language) for language in data.captions}
        values = {language: caption_cider(written, data.captions[language]) for language, written in captions.items()}
        shown = ", ".join(f"{language} {value:.1f}" for language, value in values.items())
        return Quality(
            figure=figure_of(data, float(np.mean(list(values.values())))),
            weak_points=(
                f"CIDEr-D in percent by language: {shown}.",
                *(
                    line
                    for one, written in captions.items()
                    for line in _weak_captions(written, data.captions[one], one)
                ),
            ),
        )


def _patches(module: nn.Module) -> PatchGrid:
    """Returns the tokens of an image that a decoder attends to."""
    rows, columns = (int(size) for size in cast("ImageToText", module).grid)
    leading = int(getattr(module, "num_leading_tokens", 0))
    return PatchGrid(rows=rows, columns=columns, has_class_token=leading > 0, num_registers=max(leading - 1, 0))


def _caption(candidate: Candidate, images: NDArray[np.uint8], language: str) -> list[str]:
    """Writes captions of images greedily, in fixed batches."""
    source = candidate.source
    batches = range(0, len(images), NUM_ROWS)
    pixels = (list(pixel_values_of(source, images[first : first + NUM_ROWS])) for first in batches)
    return write_greedily(candidate, pixels, source.caption_start(language))


def _weak_captions(captions: Sequence[str], references: Sequence[Sequence[str]], language: str) -> list[str]:
    """The worst captions of a language by METEOR of words and stems."""
    pairs = list(zip(captions, references, strict=True))
    scores = [caption_meteor([caption], [several], language) for caption, several in pairs]
    worst = sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES]
    return [
        f"METEOR {scores[index]:.1f}: image {index + 1} became {quoted(captions[index])}; expected, for instance, "
        f"{quoted(references[index][0])}."
        for index in worst
    ]
