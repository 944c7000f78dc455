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
from headway_export.source import EvaluationData, ExportSource, Readable
from headway_export.tasks.task import Metric
from headway_export.tasks.text_to_text import EncoderDecoder, framed
from headway_export.tracing import Traceable, make_spec
from headway_server.bundles import Limits, PatchGrid, TensorSpec, demanded
from headway_server.tasks.captioning.model import framed_question
from headway_training.metrics import caption_cider, caption_meteor
from headway_training.models.protocols import ImageToText


class Captioning(EncoderDecoder):
    """Captions of images, in one language or several."""

    metrics = (Metric(name="cider", allowed_loss=1.0),)
    protocols = (ImageToText,)
    shows_no_attention = "each caption brings its attention to the image"

    def limits(self, module: nn.Module) -> Limits:
        """Reads the grid of an image, and the length of captions."""
        asked = cast("Any", module)
        most = int(asked.max_source_length) if _reads_questions(module) else _patches(module).num_tokens
        return Limits(max_input_tokens=most, max_total_tokens=int(asked.max_target_length))

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
        """Pixels, and the tokens of a question behind those of its image."""
        if not _reads_questions(asked.module):
            return [asked.pixels]
        return [
            asked.pixels,
            *(make_spec(name, "int64", "batch", "length") for name in ("input_ids", "attention_mask")),
        ]

    def source_batches(self, source: ExportSource, vocab_size: int, limit: int) -> Iterator[Sequence[Readable]]:
        """Yields the pixels of images, with questions of several tasks."""
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        yield from (_with_questions(source, list(images[:batch_size])) for batch_size in BATCH_SIZES)

    def references(self, data: EvaluationData) -> Sequence[str]:
        """Returns captions of all languages."""
        return [several[0] for captions in data.captions.values() for several in captions]

    def pairs(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        """Yields images with their first captions."""
        pixels = pixel_values_of(source, data.images)
        for language, captions in data.captions.items():
            start = source.caption_start(language)
            images = _with_questions(source, list(pixels), of_tasks=False)
            for image, ids in zip(images, source.encode([several[0] for several in captions]), strict=True):
                yield framed(source, start, ids, image)

    def draw_sources(self, draw: Draw, count: int, most: int) -> list[tuple[Readable, NDArray[np.int64]]]:
        """Returns images, in drawn languages."""
        read = _with_questions(draw.source, [item["pixel_values"] for item in draw.pixels(count)])
        return [(one, draw.source.caption_start(draw.languages()[1])) for one in read]

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


def _reads_questions(module: nn.Module) -> bool:
    """True if the encoder of a module reads a text behind an image."""
    return bool(getattr(module, "reads_questions", False))


def _with_questions(
    source: ExportSource, images: Sequence[NDArray[np.float32]], *, of_tasks: bool = True
) -> list[Readable]:
    """Returns what the encoder reads of images, (3, height, width), with the questions of all tasks or the default."""
    question = source.image_question
    if question is None:
        return list(images)
    assert source.tokenizer is not None, "a text model has its tokenizer"
    names = (list(question.tasks) if of_tasks else []) or [question.default]
    texts = [demanded(question.spelled_out(name)) for name in names]
    ids = [np.array(source.tokenizer.encode(text, add_special_tokens=False).ids, np.int64) for text in texts]
    grid = _patches(source.module)
    return [
        {"pixel_values": image, "input_ids": framed_question(question, grid, ids[index % len(ids)])}
        for index, image in enumerate(images)
    ]


def _caption(candidate: Candidate, images: NDArray[np.uint8], language: str) -> list[str]:
    """Writes captions of images greedily, in fixed batches."""
    source = candidate.source
    batches = range(0, len(images), NUM_ROWS)
    pixels = (
        _with_questions(source, list(pixel_values_of(source, images[first : first + NUM_ROWS])), of_tasks=False)
        for first in batches
    )
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
