"""Measures the task metric of a variant on the source's evaluation data, through the runners that serve.

What the variant is bad at is found beside it, for the model card. docs/checkpoint.md defines the metrics.

N examples, C labels, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sacrebleu
import torch
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix, f1_score, recall_score
from tokenizers import Tokenizer
from torch.nn import functional

from headway_export.candidate import (
    NUM_ROWS,
    Candidate,
    answer_prompts,
    drawing_conditions,
    embed_images,
    encode_sources,
    features_of,
    open_sources,
    pixel_values_of,
    run_batch,
)
from headway_export.errors import ParityError
from headway_export.inputs import text_items
from headway_export.source import EvaluationData
from headway_server.bundles import CalibrationFigures, ClassificationScheme, QualityFigure
from headway_server.bundles.tags import TagSet
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.diffusion import mix
from headway_server.preprocessing.image import ImageTransform
from headway_server.tasks.segmentation.decoder import (
    BOTTOM_RIGHT,
    INSIDE,
    MASKS,
    PREDICTED_IOU,
    TOP_LEFT,
    PromptKind,
    answer_order,
    as_item,
)
from headway_server.tasks.segmentation.masks import PixelMask
from headway_server.tasks.text.model import text_tensors
from headway_server.tasks.tokens.spans import SpanDecoder
from headway_training.calibration import NUM_BINS, calibration_metrics, to_probabilities
from headway_training.evaluation import evaluation_windows
from headway_training.metrics import (
    caption_cider,
    caption_meteor,
    score_transcripts,
    span_scores,
    transcript_words,
    word_errors,
)
from headway_training.tasks.diffusion import measured_noise
from headway_training.tokenizers import encode_spans

ALLOWED_LOSS = {
    "accuracy": 0.5,
    "micro_f1": 0.5,
    "span_f1": 0.5,
    "sacrebleu": 0.5,
    "cider": 1.0,
    "wer": 0.5,
    "nats_per_character": 0.02,
    "first_mask_iou": 0.5,
    "velocity_error": 0.005,
    "nats_per_code": 0.02,
}
"""How much worse than fp32 a variant may be: in points, nats, or squared error of numbers of unit variance."""
NUM_EXAMPLES = 5
"""Examples, confusions or labels that a card names."""
MAX_CHARACTERS = 200
"""Of a text that a card quotes."""
MIN_SPANS = 10
"""Spans of a label from which a card gives the label's F1."""

Spans = list[tuple[int, int, int]]
"""Start, end and number of the label."""


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
    return None if data is None else _MEASURES[data.metric](candidate, data)


def check(candidate: Candidate, figure: QualityFigure, fp32: QualityFigure) -> None:
    """Checks that a variant is not much worse than fp32.

    Raises:
        ParityError: It is.
    """
    loss = fp32.value - figure.value if figure.higher_is_better else figure.value - fp32.value
    allowed = ALLOWED_LOSS[figure.metric]
    if not loss <= allowed:
        raise ParityError(
            f"{candidate.precision}: {figure.metric} on {figure.dataset} ({figure.example_count} examples) is "
            f"{figure.value:.3f}, fp32 has {fp32.value:.3f}: worse by {loss:.3f}, bound {allowed}"
        )


def _figure(data: EvaluationData, value: float, *, signature: str = "") -> QualityFigure:
    return QualityFigure(
        metric=data.metric,
        value=value,
        example_count=len(data),
        dataset=data.dataset,
        higher_is_better=data.higher_is_better,
        signature=signature,
    )


def _by_length(rows: Sequence[NDArray[np.int64]]) -> Iterator[list[int]]:
    """Yields batches of indices, rows of similar length together."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), NUM_ROWS):
        yield order[start : start + NUM_ROWS]


# Classifiers


def _accuracy(candidate: Candidate, data: EvaluationData) -> Quality:
    logits, scheme = _logits(candidate, data), candidate.source.classification or ClassificationScheme()
    return Quality(
        figure=_figure(data, float((logits.argmax(axis=-1) == data.labels).mean() * 100)),
        weak_points=weak_classes(logits / scheme.temperature, data.labels, candidate.source.labels, data.texts),
        calibration=_calibration(logits, data, scheme),
    )


def _micro_f1(candidate: Candidate, data: EvaluationData) -> Quality:
    logits, scheme = _logits(candidate, data), candidate.source.classification or ClassificationScheme()
    selected = to_probabilities(logits / scheme.temperature, multi_label=True) >= np.asarray(
        scheme.thresholds or (0.5,)
    )  # (N, C)
    value = f1_score(data.labels.ravel(), selected.astype(int).ravel(), zero_division=0)
    by_label = {
        label: 100 * f1_score(truth, chosen, zero_division=0)
        for label, truth, chosen in zip(candidate.source.labels, data.labels.T, selected.astype(int).T, strict=True)
        if truth.any()
    }
    hardest = sorted(by_label, key=by_label.__getitem__)[:NUM_EXAMPLES]
    return Quality(
        figure=_figure(data, 100 * float(value)),
        weak_points=(f"Lowest F1: {'; '.join(f'{label} {by_label[label]:.1f} %' for label in hardest)}.",),
        calibration=_calibration(logits, data, scheme),
    )


def _logits(candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
    """Logits of the examples, (N, C)."""
    source, graph = candidate.source, candidate.open_stateless()
    logits = np.empty((len(data), len(source.labels)), np.float32)
    if source.image_preprocessing is not None:
        for start in range(0, len(data), NUM_ROWS):
            batch = slice(start, start + NUM_ROWS)
            images = pixel_values_of(source, data.images[batch])
            logits[batch] = [found["logits"] for found in run_batch(graph, [{"pixel_values": i} for i in images])]
        return logits
    items = text_items(source, data.texts, data.text_pairs)
    for rows in _by_length([item["input_ids"] for item in items]):
        logits[rows] = [found["logits"] for found in run_batch(graph, [items[row] for row in rows])]
    return logits


def _calibration(logits: NDArray[np.float32], data: EvaluationData, scheme: ClassificationScheme) -> CalibrationFigures:
    metrics = calibration_metrics(logits, data.labels, scheme.temperature, multi_label=scheme.kind == "multi_label")
    return CalibrationFigures(
        expected_calibration_error=metrics["expected_calibration_error"],
        uncalibrated=metrics["expected_calibration_error_uncalibrated"],
        bin_count=NUM_BINS,
    )


def weak_classes(
    logits: NDArray[np.float32], labels: NDArray[np.int64], names: Sequence[str], texts: Sequence[str] = ()
) -> tuple[str, ...]:
    """The most frequent confusions, the class that is found least often, and the surest mistakes.

    Args:
        logits: (N, C), divided by the temperature.
        labels: (N,), the right classes.
        names: Of the classes.
        texts: What was classified; without them, mistakes are named by their numbers.
    """
    predicted = logits.argmax(axis=-1)  # (N,)
    wrong = np.flatnonzero(predicted != labels)
    if not len(wrong):
        return ()
    classes = range(len(names))
    recalls = recall_score(labels, predicted, labels=classes, average=None, zero_division=np.nan)  # (C,)
    confusions = confusion_matrix(labels, predicted, labels=classes)  # (C, C): the right class, the predicted one
    np.fill_diagonal(confusions, 0)
    most = np.argsort(-confusions, axis=None, kind="stable")[: min(NUM_EXAMPLES, np.count_nonzero(confusions))]
    pairs = np.stack(np.unravel_index(most, confusions.shape), axis=-1).tolist()
    probabilities = to_probabilities(logits).max(axis=-1)  # (N,), of the predicted class
    surest = wrong[np.argsort(-probabilities[wrong], kind="stable")][:NUM_EXAMPLES]
    taken = (f"{names[right]} for {names[other]} ({confusions[right, other]})" for right, other in pairs)
    hardest = int(np.nanargmin(recalls))
    return (
        f"Most frequent confusions: {', '.join(taken)}.",
        f"Found least often: {names[hardest]}, {100 * recalls[hardest]:.1f} % of its examples.",
        *(
            f"{_quoted(texts[index]) if texts else f'Example {index + 1}'}: predicted {names[predicted[index]]} with "
            f"probability {probabilities[index]:.2f}; it is {names[labels[index]]}."
            for index in surest
        ),
    )


# Token classifiers


def _span_f1(candidate: Candidate, data: EvaluationData) -> Quality:
    labels = TagSet.parse(candidate.source.labels).labels
    numbers = {label: number for number, label in enumerate(labels)}
    # A label that the model does not have is never right, whatever its number.
    expected = [[(start, end, numbers.get(label, -1)) for start, end, label in spans] for spans in data.spans]
    found = _find_spans(candidate, data.texts)
    _, _, f1 = span_scores(found, expected)
    return Quality(figure=_figure(data, f1), weak_points=_weak_labels(found, expected, labels))


def _find_spans(candidate: Candidate, texts: Sequence[str]) -> list[Spans]:
    """Finds the spans of texts as a server does; a text is cut at the model's limit."""
    source = candidate.source
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.limits.max_input_tokens is not None, "the source has read the module's length"
    encodings = encode_spans(source.tokenizer, texts, source.limits.max_input_tokens)
    graph, decoder = candidate.open_stateless(), SpanDecoder(TagSet.parse(source.labels))
    items = [text_tensors(np.array(encoding.ids, np.int64)) for encoding in encodings]
    found: list[Spans] = [[] for _ in texts]
    for batch in _by_length([item["input_ids"] for item in items]):
        for index, outputs in zip(batch, run_batch(graph, [items[index] for index in batch]), strict=True):
            spans = decoder.decode_text(outputs["logits"], texts[index], encodings[index].offsets)
            found[index] = [(span.start, span.end, span.label) for span in spans]
    return found


def _weak_labels(found: Sequence[Spans], expected: Sequence[Spans], labels: Sequence[str]) -> tuple[str, ...]:
    """The labels of the lowest F1."""
    lines: list[tuple[float, str]] = []
    for number, label in enumerate(labels):
        own, wanted = ([[span for span in row if span[2] == number] for row in side] for side in (found, expected))
        if (count := sum(map(len, wanted))) >= MIN_SPANS:
            precision, recall, f1 = span_scores(own, wanted)
            scores = f"F1 {f1:.1f}, precision {precision:.0f} %, recall {recall:.0f} % of {count:,}"
            lines.append((f1, f"`{label}`: {scores}"))
    return tuple(line for _, line in sorted(lines)[:NUM_EXAMPLES])


# Segmentation


def _first_mask_iou(candidate: Candidate, data: EvaluationData) -> Quality:
    """Mean IoU in percent of the mask that an answer has first, of all segments at a point and at a box."""
    source, (encoder, decoder) = candidate.source, candidate.open_segmenter()
    segments = data.segments
    assert segments is not None, "the source has read them"
    height, width = data.images.shape[1:3]
    transform = ImageTransform(scale=(1.0, 1.0), offset=(0.0, 0.0))
    found: dict[str, list[float]] = {}
    for start in range(0, len(data), NUM_ROWS):
        images = embed_images(encoder, pixel_values_of(source, data.images[start : start + NUM_ROWS]))
        rows = np.flatnonzero((segments.image_index >= start) & (segments.image_index < start + len(images)))
        kinds: tuple[PromptKind, ...] = ("point", "box")
        for kind in kinds:
            items = []
            for row in rows:
                is_point = kind == "point"
                points = segments.points[row].reshape(1, 2) if is_point else segments.boxes[row].reshape(2, 2)
                labels = np.array([INSIDE] if is_point else [TOP_LEFT, BOTTOM_RIGHT])
                items.append(as_item(images[segments.image_index[row] - start], points, labels))
            answers: list[dict[str, NDArray[np.float32]]] = []
            for begin in range(0, len(items), NUM_ROWS):
                answers += answer_prompts(decoder, items[begin : begin + NUM_ROWS])
            for row, answer in zip(rows, answers, strict=True):
                truth = segments.mask(int(row), height, width)
                ious = []
                for number in answer_order(answer[PREDICTED_IOU], kind):
                    mask = PixelMask.of_logits(answer[MASKS][number], transform, (width, height), (width, height))
                    pixels = mask.pixels()
                    ious.append(100 * float((pixels & truth).sum() / max(1, (pixels | truth).sum())))
                found.setdefault(kind, []).append(ious[0])
                found.setdefault(f"{kind}, best", []).append(max(ious))
    means = {name: float(np.mean(values)) for name, values in found.items()}
    sizes = np.array([segments.mask(row, height, width).mean() for row in range(len(segments.masks))])
    both = np.mean([found["point"], found["box"]], axis=0)
    by_size = [
        f"{name} {both[of].mean():.1f} ({of.sum():,})"
        for name, of in (
            ("less than 1 % of the image", sizes < 0.01),
            ("1 to 10 %", (sizes >= 0.01) & (sizes < 0.1)),
            ("more", sizes >= 0.1),
        )
        if of.any()
    ]
    return Quality(
        figure=_figure(data, (means["point"] + means["box"]) / 2),
        weak_points=(
            f"Mean IoU in percent of the mask it is surest of: {means['point']:.1f} at a point, {means['box']:.1f} at "
            f"a box; of the best of its three: {means['point, best']:.1f} and {means['box, best']:.1f}.",
            f"The same by the segment's size, and how many there are: {', '.join(by_size)}.",
        ),
    )


# Translation


def _sacrebleu(candidate: Candidate, data: EvaluationData) -> Quality:
    metric = sacrebleu.BLEU()
    translations = _translate(candidate, data)
    score = metric.corpus_score(translations, [list(data.references)])
    return Quality(
        figure=_figure(data, float(score.score), signature=str(metric.get_signature())),
        weak_points=weak_translations(data.texts, translations, data.references),
    )


def _translate(candidate: Candidate, data: EvaluationData) -> list[str]:
    """Translates greedily, in fixed batches of sentences of similar length."""
    source = candidate.source
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.special_tokens is not None, "a text model has its special tokens"
    pairs = source.encode_sources(data.texts, data.languages)
    ids, starts = [ids for ids, _ in pairs], [start for _, start in pairs]
    decoder, encoder = candidate.open_decoder(NUM_ROWS), candidate.open_encoder()
    translations = [""] * len(ids)
    for batch in _by_length(ids):
        open_sources(decoder, encode_sources(encoder, [ids[index] for index in batch]))
        given = np.stack([starts[index] for index in batch])
        targets = _decode_greedily(decoder, given, source.special_tokens.eos, source.suppressed_tokens)
        for index, target in zip(batch, targets, strict=True):
            translations[index] = source.tokenizer.decode(target, skip_special_tokens=True)
    return translations


def _decode_greedily(
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


def weak_translations(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> tuple[str, ...]:
    """The worst translations by chrF (Popović 2015) of the sentence, with sacreBLEU's defaults."""
    metric = sacrebleu.CHRF()
    pairs = zip(translations, references, strict=True)
    scores = [metric.sentence_score(translation, [reference]).score for translation, reference in pairs]
    worst = sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES]
    return tuple(
        f"chrF {scores[index]:.1f}: {_quoted(sources[index])} became {_quoted(translations[index])}; "
        f"expected {_quoted(references[index])}."
        for index in worst
    )


# Captioning


def _cider(candidate: Candidate, data: EvaluationData) -> Quality:
    """CIDEr-D of greedy captions, the mean of the languages."""
    captions = {language: _caption(candidate, data.images, language) for language in data.captions}
    values = {language: caption_cider(written, data.captions[language]) for language, written in captions.items()}
    shown = ", ".join(f"{language} {value:.1f}" for language, value in values.items())
    return Quality(
        figure=_figure(data, float(np.mean(list(values.values())))),
        weak_points=(
            f"CIDEr-D in percent by language: {shown}.",
            *(line for one, written in captions.items() for line in _weak_captions(written, data.captions[one], one)),
        ),
    )


def _caption(candidate: Candidate, images: NDArray[np.uint8], language: str) -> list[str]:
    """Writes captions of images greedily, in fixed batches."""
    source = candidate.source
    batches = range(0, len(images), NUM_ROWS)
    pixels = (pixel_values_of(source, images[first : first + NUM_ROWS]) for first in batches)
    return _write_greedily(candidate, pixels, source.caption_start(language))


def _write_greedily(
    candidate: Candidate, batches: Iterable[NDArray[np.float32]], start: NDArray[np.int64]
) -> list[str]:
    """Writes a text of each image, (N, 3, height, width), or window of audio, (N, mel bins, frames), greedily.

    Args:
        candidate: The variant.
        batches: At most `NUM_ROWS` each.
        start: What the decoder reads before it writes, (P,).
    """
    source = candidate.source
    assert source.tokenizer is not None, "a model that writes has its tokenizer"
    assert source.special_tokens is not None, "a model that writes has its special tokens"
    decoder, encoder = candidate.open_decoder(NUM_ROWS), candidate.open_encoder()
    texts: list[str] = []
    for batch in batches:
        open_sources(decoder, encode_sources(encoder, list(batch)))
        starts = np.tile(start, (len(batch), 1))
        rows = _decode_greedily(decoder, starts, source.special_tokens.eos, source.suppressed_tokens)
        texts += source.tokenizer.decode_batch(rows, skip_special_tokens=True)
    return texts


def _weak_captions(captions: Sequence[str], references: Sequence[Sequence[str]], language: str) -> list[str]:
    """The worst captions of a language by METEOR of words and stems."""
    pairs = list(zip(captions, references, strict=True))
    scores = [caption_meteor([caption], [several], language) for caption, several in pairs]
    worst = sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES]
    return [
        f"METEOR {scores[index]:.1f}: image {index + 1} became {_quoted(captions[index])}; expected, for instance, "
        f"{_quoted(references[index][0])}."
        for index in worst
    ]


# Transcription


def _wer(candidate: Candidate, data: EvaluationData) -> Quality:
    """Word error rate in percent of greedy transcripts."""
    source = candidate.source
    batches = (features_of(source, data, slice(at, at + NUM_ROWS)) for at in range(0, len(data), NUM_ROWS))
    transcripts = [text.strip() for text in _write_greedily(candidate, batches, source.caption_start(""))]
    scores = score_transcripts(transcripts, data.references, data.groups)
    by_group = ", ".join(f"{name.removeprefix('wer_')} {value:.1f}" for name, value in scores.items() if name != "wer")
    return Quality(
        figure=_figure(data, scores["wer"]),
        weak_points=(
            *([f"Word error rate in percent by source: {by_group}."] if by_group else []),
            *_weak_transcripts(transcripts, data.references),
        ),
    )


def _weak_transcripts(transcripts: Sequence[str], references: Sequence[str]) -> list[str]:
    """Those with the most errors."""
    words = [tuple(map(transcript_words, pair)) for pair in zip(transcripts, references, strict=True)]
    errors = [word_errors(own, truth) for own, truth in words]
    worst = sorted(range(len(errors)), key=lambda index: -errors[index])[:NUM_EXAMPLES]
    return [
        f"{errors[index]} of {len(words[index][1])} words: {_quoted(references[index])} was heard as "
        f"{_quoted(transcripts[index])}."
        for index in worst
        if errors[index]
    ]


# Generation


def _nats_per_character(candidate: Candidate, data: EvaluationData) -> Quality:
    """Reads texts in windows of the model's length that overlap by half, counting each token once."""
    tokenizer = candidate.source.tokenizer
    assert tokenizer is not None, "a text model has its tokenizer"
    runner = candidate.open_decoder(1)
    characters = 0
    stretches: list[tuple[str, float]] = []
    for text in data.texts:
        (ids,) = candidate.source.encode([text], frame=False)
        for start, end, predicted in evaluation_windows(len(ids), runner.max_length):
            stretch = tokenizer.decode(ids[predicted:end].tolist(), skip_special_tokens=False)
            stretches.append((stretch, _nats_of_window(runner, ids[start:end], predicted - start)))
        characters += len(text) - len(tokenizer.decode(ids[:1].tolist(), skip_special_tokens=False))
    nats = sum(nats for _, nats in stretches)
    return Quality(figure=_figure(data, nats / characters), weak_points=weak_stretches(stretches))


def _nats_of_window(runner: DecoderRunner, window: NDArray[np.int64], first: int) -> float:
    """Returns the negative log-likelihood of a window's tokens from its `first` on."""
    nats = 0.0
    for start in range(0, len(window), runner.prefill_chunk):  # logits of a whole window may be gigabytes
        logits = torch.from_numpy(runner.score(0, window[start : start + runner.prefill_chunk], start))  # (T, V)
        begin = max(first - 1, start)
        predicted = torch.from_numpy(window[begin + 1 : start + len(logits) + 1])
        before = logits[begin - start :][: len(predicted)].double()  # the logits before each new token
        nats += float(functional.cross_entropy(before, predicted, reduction="sum"))
    return nats


def weak_stretches(stretches: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """The stretches of text that a model expects least.

    Args:
        stretches: Text and its negative log-likelihood in nats.
    """
    rates = [(nats / len(text), text) for text, nats in stretches if text]
    worst = sorted(rates, key=lambda pair: -pair[0])[:NUM_EXAMPLES]
    return tuple(f"{rate:.2f} nats per character: {_quoted(text)}" for rate, text in worst)


def _quoted(text: str) -> str:
    """Puts a text on one line, in quotes, shortened where it is long, with Markdown's marks escaped."""
    line = " ".join(text.split())
    short = line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 1] + "…"
    for mark in "\\`*_[]<>|":
        short = short.replace(mark, "\\" + mark)
    return f"“{short}”"


# Latent diffusion


def _velocity_error(candidate: Candidate, data: EvaluationData) -> Quality:
    """Mean squared error of velocities of the images' noisy latents, with the noise and times of training."""
    source, graphs = candidate.source, candidate.open_diffusion()
    prompts: Sequence[Any] = data.texts or data.labels.tolist()
    errors = np.empty(len(data))
    squares = 0.0
    for start in range(0, len(data), NUM_ROWS):
        pixels = pixel_values_of(source, data.images[start : start + NUM_ROWS])
        latents = np.stack(
            [found["latent"] for found in run_batch(graphs["vae_encoder"], [{"pixel_values": one} for one in pixels])]
        )
        if not start:
            noise, times = measured_noise(len(data), latents.shape[1:])
        rows = range(start, start + len(latents))
        items = [
            {"latent": mix(latent, noise[row], times[row]), "timestep": times[row], **condition}
            for row, latent, condition in zip(
                rows, latents, drawing_conditions(candidate, graphs, prompts[rows[0] : rows[-1] + 1]), strict=True
            )
        ]
        for row, latent, found in zip(rows, latents, run_batch(graphs["denoiser"], items), strict=True):
            angle = float(times[row]) * np.pi / 2
            velocity = np.cos(angle) * noise[row] - np.sin(angle) * latent
            errors[row] = np.square(found["velocity"] - velocity).mean()
        images = run_batch(graphs["vae_decoder"], [{"latent": latent} for latent in latents])
        shown = np.stack([found["pixel_values"] for found in images]).transpose(0, 2, 3, 1)
        squares += float(np.square(shown - data.images[start : start + NUM_ROWS] / 255).mean(axis=(1, 2, 3)).sum())
    psnr = -10 * np.log10(max(squares / len(data), 1e-10))
    parts = ", ".join(
        f"{errors[(times >= low) & (times < low + 0.25)].mean():.3f} ({low:g} to {low + 0.25:g})"
        for low in (0.0, 0.25, 0.5, 0.75)
        if ((times >= low) & (times < low + 0.25)).any()
    )
    return Quality(
        figure=_figure(data, float(errors.mean())),
        weak_points=(
            f"Squared error of the velocity by the time, from 0, an image, to 1, noise: {parts}.",
            f"An image that goes through the autoencoder comes back with a peak signal-to-noise ratio of {psnr:.1f} "
            "dB; no drawing can be finer than that.",
        ),
    )


# Speech


def _nats_per_code(candidate: Candidate, data: EvaluationData) -> Quality:
    """Negative log-likelihood of the codes of recordings, and of their ends, after voice and text."""
    runner = candidate.open_decoder(1)
    pairs = list(zip(data.sequences, data.prompt_lengths, strict=True))
    rates = [_nats_of_window(runner, ids, first) / (len(ids) - first) for ids, first in pairs]
    counts = [len(ids) - first for ids, first in pairs]
    tokenizer = candidate.source.tokenizer
    assert tokenizer is not None, "a model that speaks has its tokenizer"
    worst = sorted(range(len(pairs)), key=lambda index: -rates[index])[:NUM_EXAMPLES]
    first_code = tokenizer.get_vocab_size()
    return Quality(
        figure=_figure(data, float(np.average(rates, weights=counts))),
        weak_points=tuple(
            f"{rates[index]:.2f} nats per code: {_quoted(_text_of(pairs[index], first_code, tokenizer))}."
            for index in worst
        ),
    )


def _text_of(pair: tuple[NDArray[np.int64], int], first_code: int, tokenizer: Tokenizer) -> str:
    """Returns the text of a sequence: what comes before the speech and is no code."""
    ids, first = pair
    prompt = ids[:first]
    return tokenizer.decode(prompt[prompt < first_code].tolist())


_MEASURES: dict[str, Callable[[Candidate, EvaluationData], Quality]] = {
    "accuracy": _accuracy,
    "micro_f1": _micro_f1,
    "span_f1": _span_f1,
    "sacrebleu": _sacrebleu,
    "cider": _cider,
    "wer": _wer,
    "nats_per_character": _nats_per_character,
    "first_mask_iou": _first_mask_iou,
    "velocity_error": _velocity_error,
    "nats_per_code": _nats_per_code,
}
