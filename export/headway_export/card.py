"""The model card, `README.md` of a bundle: what a user must know before trusting the model, and its learning curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from headway_export.source import ExportSource
from headway_export.tasks.table import task_of
from headway_server.bundles import (
    CHAT_TEMPLATE_FILE,
    LEARNING_CURVE_FILE,
    ClassificationScheme,
    Manifest,
    Precision,
    Variant,
)
from headway_training.checkpoint import TrainingRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found of one variant."""

    precision: Precision
    variant: Variant
    """With its parity and its quality."""
    kept: bool
    """True if the bundle holds it."""
    weak_points: tuple[str, ...]
    """What it is bad at, with examples: Markdown, a line each."""


def write_card(file: Path, source: ExportSource, manifest: Manifest, proofs: Sequence[Proof]) -> None:
    """Writes the card of a bundle.

    Args:
        file: Where.
        source: What was exported.
        manifest: Of the bundle, with every file but the card.
        proofs: Of every variant that was made, those that the bundle does not hold included.
    """
    parts = [
        f"# {manifest.name} {manifest.version}",
        manifest.description,
        _facts(source, manifest),
        "## Quality",
        _quality_table(proofs),
        _baseline(source.training),
        _how_to_check(manifest),
        *_calibration(proofs, manifest),
        f"## Parity with {source.reference_name}",
        _parity_table(proofs, task_of(manifest.task).words_of_error),
        *attention_section(manifest),
        *(_training(source.training) if source.training else ()),
        "![Training loss and validation metric over the steps](" + LEARNING_CURVE_FILE + ")"
        if LEARNING_CURVE_FILE in manifest.files
        else "",
        *_weak_points(proofs),
        *task_of(manifest.task).more_sections(manifest),
        "## Limits",
        _limits(manifest),
    ]
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _facts(source: ExportSource, manifest: Manifest) -> str:
    architecture, exported = manifest.architecture, task_of(manifest.task)
    facts = {
        "Task": manifest.task,
        "Licence": manifest.license,
        "Architecture": f"{architecture.kind}, {architecture.parameter_count:,} parameters",
        "Languages": str(manifest.languages) if manifest.languages else "",
        exported.words_of_names: ", ".join(exported.names(manifest)),
        "Fetched from": f"{manifest.origin.id} at commit {manifest.origin.commit}" if manifest.origin else "",
        "Came with it": ", ".join(f"[{name}]({name})" for name in source.documents),
        "Conversations": "yes, by the chat template" if CHAT_TEMPLATE_FILE in manifest.files else "",
    }
    return _table(("", ""), [(name, str(value)) for name, value in facts.items() if value])


def _quality_table(proofs: Sequence[Proof]) -> str:
    rows = [
        (_variant(proof), figure.metric, f"{figure.value:.3f}", f"{figure.example_count:,}", figure.dataset)
        for proof in proofs
        if (figure := proof.variant.quality) is not None
    ]
    if not rows:
        return f"Not measured: the model was exported without evaluation data. {_agreement(proofs)}".rstrip()
    signatures = {proof.variant.quality.signature for proof in proofs if proof.variant.quality}
    notes = "".join(f"\n\nsacreBLEU signature: `{signature}`" for signature in sorted(signatures) if signature)
    table = _table(("variant", "metric", "value", "examples", "data"), rows)
    agreement = _agreement(proofs)
    return "\n\n".join(
        part for part in ("Measured at export, through the runner that serves.", table + notes, agreement) if part
    )


def _agreement(proofs: Sequence[Proof]) -> str:
    """How near the answers of variants are to fp32's."""
    agreed = [(_variant(proof), found) for proof in proofs if (found := proof.variant.agreement) is not None]
    if not agreed:
        return ""
    rows = [
        (
            variant,
            name,
            f"{value:.4f}",
            " to ".join(f"{end:.4f}" for end in found.intervals.get(name, ())),
            f"{found.limits[name]:g}" if name in found.limits else "",
            f"{found.example_count:,}",
            f"{found.prediction_count or found.example_count:,}",
            found.dataset,
        )
        for variant, found in agreed
        for name, value in found.figures.items()
    ]
    head = ("variant", "against fp32", "value", "90 % interval", "limit", "inputs", "predictions", "data")
    shared = [variant for variant, found in agreed if found.calibrated_on == "these inputs"]
    text = "Its answers were held against those of fp32. A limit is held against the worse end of an interval."
    if shared:
        text += f" The scales of {', '.join(shared)} were taken from these inputs too, since there were few."
    return f"{text}\n\n{_table(head, rows)}"


def _variant(proof: Proof) -> str:
    return str(proof.precision) if proof.kept else f"{proof.precision} (not in this bundle)"


def _how_to_check(manifest: Manifest) -> str:
    is_measured = any(variant.quality for variant in manifest.variants.values())
    if not is_measured or not task_of(manifest.task).is_evaluated_served:
        return ""
    return f"Measure it yourself on a server that has it: `headway-train evaluate {manifest.name} --server ADDRESS`."


def _baseline(training: TrainingRecord | None) -> str:
    if training is None or training.baseline is None:
        return ""
    baseline = training.baseline
    return f"For comparison, {baseline.name} on the same data: {baseline.metric} {baseline.value:.3f}."


def _calibration(proofs: Sequence[Proof], manifest: Manifest) -> list[str]:
    """How far probabilities can be trusted; nothing for a model that is no classifier."""
    rows = [
        (_variant(proof), f"{figures.expected_calibration_error:.4f}", f"{figures.uncalibrated:.4f}")
        for proof in proofs
        if (figures := proof.variant.calibration) is not None
    ]
    if not rows:
        return []
    scheme = manifest.classification or ClassificationScheme()
    fitted = "fitted on validation data" if scheme.temperature != 1 else "since none was fitted"
    predictions = (
        "Every pair of an example and a label is a prediction: its probability is that of the label, and it is right "
        "where the label applies."
        if scheme.kind == "multi_label"
        else "Every example is a prediction: its probability is that of its likeliest label."
    )
    text = (
        f"Logits are divided by a temperature of {scheme.temperature:.4g}, {fitted}. The expected calibration error "
        "puts the predictions on the data above into 15 bins of equal width by their probability; it is the mean "
        "distance between a bin's mean probability and its share of right predictions (0 is best, 1 is worst). "
        f"{predictions}"
    )
    if scheme.thresholds:
        limits = ", ".join(
            f"{label} {limit:.3g}" for label, limit in zip(manifest.labels, scheme.thresholds, strict=True)
        )
        text += f" A label applies from a probability, chosen on validation data, of: {limits}."
    head = ("variant", "expected calibration error", "with a temperature of 1")
    return ["## Calibration", text, _table(head, rows)]


def _parity_table(proofs: Sequence[Proof], words: str) -> str:
    return _table(
        ("variant", f"largest relative {words}", "bound", "greedy tokens that differ", "checked on"),
        [(_variant(proof), *_parity(proof.variant)) for proof in proofs],
    )


def _parity(variant: Variant) -> tuple[str, str, str, str]:
    figures = variant.parity
    differ = f"{figures.greedy_mismatch_count} of {figures.greedy_token_count}" if figures.greedy_token_count else "-"
    largest = f"{figures.max_relative_logit_error:.1e}"
    if figures.rounded_count:
        largest += f" (past the bound in {figures.rounded_count} answers, which rounding explains)"
    bound = f"{figures.bound:.0e}" if figures.bound is not None else "by the metric"
    return largest, bound, differ, figures.provider


def attention_section(manifest: Manifest) -> list[str]:
    """How near the attention weights are to PyTorch's; nothing where a bundle has no graph that gives them."""
    rows = [
        (
            str(precision),
            f"{figures.max_weight_error:.1e}",
            f"{figures.bound:.0e}" if figures.bound is not None else "none",
            f"{figures.max_row_sum_error:.1e}",
        )
        for precision, variant in manifest.variants.items()
        if (figures := variant.attention) is not None
    ]
    if not rows:
        return []
    text = (
        "The attention weights of every layer and head can be looked at, with "
        f"`headway {task_of(manifest.task).inspection} --model {manifest.name}`. A weight is from 0 to 1."
    )
    head = ("variant", "largest difference from PyTorch's", "bound", "largest difference of a row's sum from 1")
    return ["## Attention", text, _table(head, rows)]


def _training(training: TrainingRecord) -> list[str]:
    metrics = (
        f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in training.metrics.items()
    )
    rows = [
        ("Command", f"`{training.command}`"),
        ("Data", f"{training.train_dataset}, {training.train_example_count:,} examples"),
        ("Data licence", training.dataset_license),
        ("Data home", training.dataset_home),
        ("Seed", str(training.seed)),
        ("Steps", f"{training.step_count:,} ({training.epoch_count:.1f} epochs)"),
        ("Wall time", f"{training.wall_time_s / 60:.1f} min on {training.hardware}"),
        ("Metrics", ", ".join(metrics)),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in training.libraries.items())),
    ]
    return ["## Training", _table(("", ""), rows)]


def _weak_points(proofs: Sequence[Proof]) -> list[str]:
    """Of the smallest variant that the bundle holds: a server takes that one on a CPU."""
    kept = [proof for proof in proofs if proof.kept and proof.weak_points]
    if not kept:
        return []
    proof = next((proof for proof in kept if proof.precision is Precision.INT8), kept[0])
    lines = "\n".join(f"- {line}" for line in proof.weak_points)
    return ["## What it is bad at", f"Found on the evaluation data ({proof.precision}).", lines]


def _limits(manifest: Manifest) -> str:
    limits, exported = manifest.limits, task_of(manifest.task)
    sentences = []
    audio = manifest.audio_preprocessing
    reads_text = manifest.image_preprocessing is None and audio is None and manifest.sound is None
    if limits.max_input_tokens is not None and reads_text:
        sentences.append(f"An input has at most {limits.max_input_tokens} tokens.")
    if limits.max_total_tokens is not None:
        sentences.append(f"{exported.words_of_total} at most {limits.max_total_tokens} tokens.")
    if manifest.image_preprocessing is not None:
        sentences += exported.image_limits(manifest)
    if audio is not None:
        sentences.append(f"It hears {audio.window_s:g} seconds of mono audio of {audio.sampling_rate} Hz at once.")
    sentences += exported.more_limits(manifest)
    sentences.append("The model knows what its training data holds and nothing else; measure it on your own data.")
    return " ".join(sentences)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# The learning curve

MAX_POINTS = 200
"""Validations that are drawn; of more, that many are taken evenly."""
_WIDTH, _HEIGHT = 340, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 28, 34
_STYLE = "font:11px sans-serif;fill:#444"


def write_learning_curve(folder: Path, source: ExportSource) -> None:
    """Draws the learning curve if the checkpoint has a record of its training run.

    What an export measures may be another metric than the weights were selected by, which is the baseline's, too.
    """
    training, evaluation = source.training, source.evaluation
    if training is None or evaluation is None:
        return
    metric = evaluation.metric
    if training.baseline is not None and not any(metric in record for record in training.history):
        metric = training.baseline.metric
    drawing = draw_learning_curve(training.history, metric, higher_is_better=evaluation.higher_is_better)
    if drawing is not None:
        (folder / LEARNING_CURVE_FILE).write_text(drawing, encoding="utf-8")


def draw_learning_curve(history: Sequence[Mapping[str, float]], metric: str, *, higher_is_better: bool) -> str | None:
    """Draws training loss and validation metric over the steps.

    Args:
        history: A record of each validation, with `step`, `train_loss` and the metric.
        metric: The metric the weights were selected by.
        higher_is_better: True to mark the highest value as the best, False for the lowest.

    Returns:
        An SVG of less than 20 KB; None for fewer than two records.
    """
    records = [record for record in history if {"step", "train_loss", metric} <= record.keys()]
    if len(records) < 2:
        return None
    taken = np.linspace(0, len(records) - 1, min(len(records), MAX_POINTS)).round().astype(int)
    steps, loss, values = (
        np.array([records[index][name] for index in taken]) for name in ("step", "train_loss", metric)
    )
    best = int(values.argmax() if higher_is_better else values.argmin())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" width="{2 * _WIDTH}" '
        f'height="{_HEIGHT}" role="img"><title>Learning curve</title>',
        f'<rect width="{2 * _WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        *_panel("training loss", "#b5523b", steps, loss, offset=0, marked=None),
        *_panel(f"validation {metric}", "#2f6690", steps, values, offset=_WIDTH, marked=best),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    title: str,
    colour: str,
    steps: NDArray[np.float64],
    values: NDArray[np.float64],
    *,
    offset: float,
    marked: int | None,
) -> list[str]:
    """Axes, the ends of their ranges, the line, and one marked point."""
    left, right, top, bottom = offset + _LEFT, offset + _WIDTH - _RIGHT, _TOP, _HEIGHT - _BOTTOM
    xs = left + (right - left) * (steps - steps.min()) / (np.ptp(steps) or 1)
    ys = bottom - (bottom - top) * (values - values.min()) / (np.ptp(values) or 1)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    parts = [
        _text(left, top - 10, title, "start"),
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="#aaa"/>',
        _text(left - 5, bottom, f"{values.min():.4g}", "end"),
        _text(left - 5, top + 8, f"{values.max():.4g}", "end"),
        _text(left, bottom + 16, f"{steps[0]:,.0f}", "start"),
        _text(right, bottom + 16, f"{steps[-1]:,.0f} steps", "end"),
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
    ]
    if marked is not None:
        x, y = xs[marked], ys[marked]
        anchor = "end" if x > (left + right) / 2 else "start"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        parts.append(_text(x, min(y + 16, bottom - 4), f"best {values[marked]:.4g}", anchor))
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{_STYLE}">{escape(text)}</text>'
