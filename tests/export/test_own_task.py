"""A task that is no part of headway: declared here alone, traced, proved and judged by a metric of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign import image_classifier
from safetensors.torch import save_model
from typer.testing import CliRunner

from headway_export.candidate import run_batch
from headway_export.cli import app
from headway_export.quality import Quality, figure_of
from headway_export.tasks.images import ImageTask
from headway_export.tasks.table import TASKS, task_of
from headway_export.tasks.task import Metric
from headway_server.bundles import TASK_PARTS, Precision, Task, TaskParts, open_bundle
from headway_server.tasks.table import FAMILIES

PREPROCESSING = {
    "height": 16,
    "width": 16,
    "resize": "stretch",
    "interpolation": "bicubic",
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
}


class ImageMeasuring(ImageTask):
    """Numbers of images."""

    metrics = (Metric(name="mean_error", allowed_loss=0.1, higher_is_better=False),)
    names_columns = False
    is_evaluated_served = False
    own_kind = "vector"

    def read_examples(self, file, num_labels):  # noqa: ARG002
        with np.load(file) as arrays:
            return {"images": arrays["images"], "labels": arrays["measures"]}

    def logits(self, candidate, data):
        found = run_batch(candidate.open_stateless(), self.items(candidate.source, data))
        return np.stack([outputs["logits"] for outputs in found])

    def measure(self, candidate, data):
        errors = np.abs(self.logits(candidate, data) - data.labels)  # (N, 4)
        return Quality(figure=figure_of(data, float(errors.mean())), weak_points=(f"Worst by {errors.max():.1f}.",))

    def more_limits(self, manifest):  # noqa: ARG002
        return ["It measures four numbers."]


@pytest.fixture
def task(monkeypatch) -> Iterator[Task]:
    task = Task.add("image_measuring", TaskParts(needs=("image_preprocessing",)))
    monkeypatch.setitem(TASKS, task, f"{__name__}:ImageMeasuring")
    yield task
    del TASK_PARTS[task]


def test_a_task_of_ones_own_goes_through_export_and_proof(task: Task, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights, preprocessing, data = (tmp_path / name for name in ("weights.safetensors", "images.json", "data.npz"))
    save_model(image_classifier.build(), str(weights))
    preprocessing.write_text(json.dumps(PREPROCESSING))
    random = np.random.default_rng(0)
    np.savez(data, images=random.integers(0, 256, (9, 16, 16, 3)).astype(np.uint8), measures=np.zeros((9, 4), np.int64))
    named = ["--model", "foreign.image_classifier:build", "--weights", str(weights), "--name", "measurer"]
    chosen = ["--task", "image_measuring", "--precision", "fp32", "--precision", "int8", "--evaluation", str(data)]
    command = [*named, *chosen, "--store", str(tmp_path / "store")]
    assert "image_measuring needs --preprocessing" in " ".join(CliRunner().invoke(app, command).output.split())
    result = CliRunner().invoke(app, [*command, "--preprocessing", str(preprocessing)])
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "store" / "measurer" / "1")
    assert bundle.manifest.task is task
    fp32, int8 = (bundle.manifest.variants[precision] for precision in (Precision.FP32, Precision.INT8))
    assert fp32.parity.max_relative_logit_error < fp32.parity.bound
    assert (int8.quality.metric, int8.quality.example_count) == ("mean_error", 9)
    assert int8.agreement.figures["mean_cosine"] > 0.99
    card = (bundle.path / "README.md").read_text()
    assert "Every image is resized to 16 x 16 pixels. It measures four numbers. The model knows" in card
    assert "Worst by" in card


def test_every_task_that_is_served_is_exported() -> None:
    assert set(TASKS) == set(FAMILIES)
    assert [task_of(task).task for task in TASKS] == list(TASKS)
