"""What a card tells: precisions side by side, the learning curve, and what the model is bad at."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from headway_export import quality
from headway_export.card import MAX_POINTS, attention_section, draw_learning_curve
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_export.tasks.generation import weak_stretches
from headway_export.tasks.stateless import weak_classes
from headway_export.tasks.text_to_text import weak_translations
from headway_server.bundles import LEARNING_CURVE_FILE, AttentionFigures, Precision, open_bundle
from headway_training.checkpoint import CHECKPOINT_FILE, Checkpoint, TrainingRecord

HISTORY = tuple({"step": 10.0 * i, "train_loss": 2.0 / i, "accuracy": 50.0 + 4 * min(i, 6)} for i in range(1, 9))
RECORD = TrainingRecord(
    recipe="weather",
    command="headway-train run weather",
    seed=3,
    step_count=80,
    epoch_count=2.0,
    wall_time_s=12.0,
    hardware="a processor",
    libraries={},
    train_dataset="weather",
    train_example_count=2000,
    dataset_license="none needed",
    dataset_home="here",
    metrics={"accuracy": 99.0},
    baseline=None,
    history=HISTORY,
)


@pytest.fixture(scope="module")
def bundle(tiny_checkpoints, tmp_path_factory):
    """A bundle of int8 alone, of a checkpoint with a record of its training."""
    source = tiny_checkpoints["text_classification"]
    folder = tmp_path_factory.mktemp("card") / "checkpoint"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.model_validate_json((folder / CHECKPOINT_FILE).read_text())
    recorded = checkpoint.model_copy(update={"training": RECORD})
    (folder / CHECKPOINT_FILE).write_text(recorded.model_dump_json())
    return export(from_checkpoint(folder), ExportOptions(store=folder.parent / "store", precisions=(Precision.INT8,)))


def test_a_card_has_fp32_beside_int8_where_int8_alone_is_kept(bundle):
    card = bundle.file("README.md").read_text(encoding="utf-8")
    assert set(bundle.manifest.variants) == {Precision.INT8}
    assert "| fp32 (not in this bundle) | accuracy |" in card
    assert "| int8 | accuracy |" in card
    assert "`headway-train evaluate tiny-classification --server ADDRESS`" in card
    for told in ("headway-train run weather", "| Seed | 3 |", "none needed", "0.2 min on a processor"):
        assert told in card


def test_a_card_tells_how_to_look_at_attention_where_there_is_its_graph(bundle):
    assert "Attention" not in bundle.file("README.md").read_text(encoding="utf-8")
    variant = bundle.manifest.variants[Precision.INT8]
    figures = AttentionFigures(max_weight_error=0.01, bound=None, max_row_sum_error=2e-7, checked_shape_count=3)
    variants = {Precision.INT8: variant.model_copy(update={"attention": figures})}
    section = attention_section(bundle.manifest.model_copy(update={"variants": variants}))
    assert "`headway inspect-text TEXT --model tiny-classification`" in section[1]
    assert "| int8 | 1.0e-02 | none | 2.0e-07 |" in section[2]


def test_a_bundle_carries_its_learning_curve(bundle):
    assert LEARNING_CURVE_FILE in bundle.manifest.files
    assert f"]({LEARNING_CURVE_FILE})" in bundle.file("README.md").read_text(encoding="utf-8")
    drawing = bundle.file(LEARNING_CURVE_FILE)
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")
    assert "best 74" in drawing.read_text()
    open_bundle(Path(bundle.path))


def test_a_learning_curve_stays_small():
    history = [{"step": float(i), "train_loss": 1 / i, "accuracy": i % 97 / 1.7} for i in range(1, 5000)]
    drawing = draw_learning_curve(history, "accuracy", higher_is_better=True)
    assert drawing is not None
    assert len(drawing.encode()) < 20_000
    assert drawing.count(",") > MAX_POINTS
    assert "4,999 steps" in drawing
    lowest = draw_learning_curve(HISTORY, "accuracy", higher_is_better=False)
    assert lowest is not None
    assert "best 54" in lowest
    assert draw_learning_curve(HISTORY[:1], "accuracy", higher_is_better=True) is None
    assert draw_learning_curve(HISTORY, "sacrebleu", higher_is_better=True) is None


def test_confusions_are_counted_and_the_surest_mistakes_come_first():
    logits = np.array([[4, 0, 0], [0, 9, 0], [0, 2, 0], [0, 0, 3], [0, 1, 0]], np.float32)
    labels = np.array([0, 0, 0, 2, 2])
    lines = weak_classes(logits, labels, ("cat", "dog", "owl"), ["a", "b *", "c", "d", "e"])
    assert lines[0] == "Most frequent confusions: cat for dog (2), owl for dog (1)."
    assert lines[1] == "Found least often: cat, 33.3 % of its examples."
    assert lines[2] == "“b \\*”: predicted dog with probability 1.00; it is cat."
    assert [line[:3] for line in lines[3:]] == ["“c”", "“e”"]
    assert weak_classes(logits, logits.argmax(axis=-1), ("cat", "dog", "owl")) == ()
    assert "Example 2: predicted dog" in weak_classes(logits, labels, ("cat", "dog", "owl"))[2]


def test_the_worst_translations_and_stretches_come_first():
    lines = weak_translations(["one", "two"], ["eins", "falsch"], ["eins", "zwei"])
    assert lines[0].startswith("chrF 0.0: “two” became “falsch”; expected “zwei”")
    assert lines[1].startswith("chrF 100.0")
    assert weak_stretches([("easy", 1.0), ("hard", 8.0), ("", 1.0)])[0] == "2.00 nats per character: “hard”"
    assert quality.quoted("x" * 500) == f"“{'x' * (quality.MAX_CHARACTERS - 1)}…”"
