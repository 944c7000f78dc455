"""The model card, `README.md` of a bundle: what a user must know before trusting the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway_export.source import ExportSource
from headway_server.bundles import CHAT_TEMPLATE_FILE, Manifest, Variant
from headway_training.checkpoint import TrainingRecord


def write_card(file: Path, source: ExportSource, manifest: Manifest) -> None:
    """Writes the card of a bundle whose variants have been proved."""
    parts = [
        f"# {manifest.name} {manifest.version}",
        manifest.description,
        _facts(manifest),
        "## Quality",
        _quality_table(manifest),
        _baseline(source.training),
        "## Parity with PyTorch",
        _parity_table(manifest),
        *(_training(source.training) if source.training else ()),
        "## Limits",
        _limits(manifest),
    ]
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _facts(manifest: Manifest) -> str:
    architecture = manifest.architecture
    facts = {
        "Task": manifest.task,
        "Licence": manifest.license,
        "Architecture": f"{architecture.kind}, {architecture.parameter_count:,} parameters",
        "Languages": f"{manifest.languages.source} to {manifest.languages.target}" if manifest.languages else "",
        "Labels": ", ".join(manifest.labels),
        "Conversations": "continued too, by the chat template" if CHAT_TEMPLATE_FILE in manifest.files else "",
    }
    return _table(("", ""), [(name, str(value)) for name, value in facts.items() if value])


def _quality_table(manifest: Manifest) -> str:
    rows = [
        (str(precision), figure.metric, f"{figure.value:.3f}", str(figure.example_count), figure.dataset)
        for precision, variant in manifest.variants.items()
        if (figure := variant.quality) is not None
    ]
    if not rows:
        return "Not measured: the model was exported without evaluation data."
    signatures = {variant.quality.signature for variant in manifest.variants.values() if variant.quality}
    notes = "".join(f"\n\nsacreBLEU signature: `{signature}`" for signature in sorted(signatures) if signature)
    table = _table(("variant", "metric", "value", "examples", "data"), rows)
    return f"Measured at export, through the runner that serves.\n\n{table}{notes}"


def _baseline(training: TrainingRecord | None) -> str:
    if training is None or training.baseline is None:
        return ""
    baseline = training.baseline
    return f"For comparison, {baseline.name} on the same data: {baseline.metric} {baseline.value:.3f}."


def _parity_table(manifest: Manifest) -> str:
    return _table(
        ("variant", "largest relative logit error", "bound", "greedy tokens that differ", "checked on"),
        [(str(precision), *_parity(variant)) for precision, variant in manifest.variants.items()],
    )


def _parity(variant: Variant) -> tuple[str, str, str, str]:
    figures = variant.parity
    differ = f"{figures.greedy_mismatch_count} of {figures.greedy_token_count}" if figures.greedy_token_count else "-"
    bound = f"{figures.bound:.0e}" if figures.bound is not None else "by the metric"
    return f"{figures.max_relative_logit_error:.1e}", bound, differ, figures.provider


def _training(training: TrainingRecord) -> list[str]:
    rows = [
        ("Command", f"`{training.command}`"),
        ("Data", f"{training.train_dataset}, {training.train_example_count:,} examples"),
        ("Data licence", training.dataset_license),
        ("Data home", training.dataset_home),
        ("Seed", str(training.seed)),
        ("Steps", f"{training.step_count:,} ({training.epoch_count:.1f} epochs)"),
        ("Wall time", f"{training.wall_time_s / 60:.1f} min on {training.hardware}"),
        ("Metrics", ", ".join(f"{name} {_number(value)}" for name, value in training.metrics.items())),
        ("Libraries", ", ".join(f"{name} {version}" for name, version in training.libraries.items())),
    ]
    return ["## Training", _table(("", ""), rows)]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _limits(manifest: Manifest) -> str:
    limits = manifest.limits
    sentences = []
    if limits.max_input_tokens is not None:
        sentences.append(f"An input has at most {limits.max_input_tokens} tokens.")
    if limits.max_total_tokens is not None:
        what = "A translation has" if manifest.languages else "Prompt and continuation together have"
        sentences.append(f"{what} at most {limits.max_total_tokens} tokens.")
    if manifest.image_preprocessing is not None:
        image = manifest.image_preprocessing
        sentences.append(f"Every image is brought to {image.height} x {image.width} pixels before the model sees it.")
    sentences.append("The model knows what its training data holds and nothing else; measure it on your own data.")
    return " ".join(sentences)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
