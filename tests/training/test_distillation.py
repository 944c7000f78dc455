"""An encoder that learns without labels: student and teacher, views, k-NN, and runs on tiny data."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from headway_training.checkpoint import load_model
from headway_training.data.sources import OwnData, read_splits
from headway_training.data.views import random_crops
from headway_training.errors import RecipeError
from headway_training.metrics import nearest_neighbour_labels
from headway_training.models import DINO, DINOConfig, ImageEmbedder, build_model, count_parameters
from headway_training.models.dino import cosine_momentum
from headway_training.recipes import Recipe, read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks import make_task
from headway_training.trainer import Trainer

RECIPE = "cifar10-dino"
QUIET = Console(quiet=True)
TINY = {"patch_size": 4, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32, "num_registers": 2}
SETTINGS = (
    *(f"model.{name}={value}" for name, value in TINY.items()),
    *("preprocessing.height=16", "preprocessing.width=16", "tracker=none", "optimization.batch_size=8"),
    *("distillation.local_size=8", "distillation.num_local_views=2", "distillation.num_prototypes=16"),
    *("distillation.d_hidden=32", "distillation.d_bottleneck=16", "distillation.momentum=0.9"),
)
HEAD = DINOConfig(
    d_hidden=32,
    d_bottleneck=16,
    num_prototypes=16,
    student_temperature=0.1,
    teacher_temperature=0.04,
    centre_momentum=0.9,
)


@pytest.fixture
def dino() -> DINO:
    torch.manual_seed(0)
    encoder = build_model("image_encoder", {**TINY, "image_size": 16, "stem": "convolutions"})
    assert isinstance(encoder, ImageEmbedder)
    return DINO(encoder, HEAD)


def views(count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 2, 3, 16, 16, generator=generator),
        torch.randn(count, 3, 3, 8, 8, generator=generator),
    )


def test_the_loss_is_the_mean_cross_entropy_of_a_global_view_and_another_one(dino: DINO) -> None:
    first, others = views()
    dino.centre.normal_(std=0.1)
    teacher, student = dino.teacher, dino.student
    targets = [
        torch.softmax((teacher.head(teacher.encoder.pooled(first[:, g])) - dino.centre) / 0.04, dim=-1)
        for g in range(2)
    ]
    seen = [first[:, 0], first[:, 1], others[:, 0], others[:, 1], others[:, 2]]
    logs = [
        torch.log_softmax(student.head(student.encoder.pooled(view, interpolate=True)) / 0.1, dim=-1) for view in seen
    ]
    pairs = [-(targets[g] * logs[v]).sum(-1) for g in range(2) for v in range(5) if v != g]
    torch.testing.assert_close(dino(first, others), torch.stack(pairs).mean(0))
    alone = dino(first, others[:, :0])
    torch.testing.assert_close(alone, (-(targets[0] * logs[1]).sum(-1) - (targets[1] * logs[0]).sum(-1)) / 2)


def test_the_teacher_is_the_moving_average_of_the_student_and_is_never_trained(dino: DINO) -> None:
    assert not list(dino.teacher.parameters())
    assert count_parameters(dino) == count_parameters(dino.student)
    weights = [dict(dino.student.named_parameters())["encoder.patches.convolutions.0.weight"]]
    average = weights[0].detach().clone()
    optimizer = torch.optim.AdamW(dino.parameters(), lr=0.01)
    for step in range(3):
        dino.begin_step(temperature=0.04, learns_prototypes=True)
        optimizer.zero_grad()
        dino(*views()).mean().backward()
        optimizer.step()
        momentum = cosine_momentum(0.9, step, 3)
        dino.end_step(momentum=momentum)
        average = momentum * average + (1 - momentum) * weights[0].detach()
    torch.testing.assert_close(dict(dino.teacher.named_buffers())["encoder.patches.convolutions.0.weight"], average)
    assert cosine_momentum(0.9, 0, 100) == pytest.approx(0.9)
    assert cosine_momentum(0.9, 50, 100) == pytest.approx(0.95)
    assert cosine_momentum(0.9, 100, 100) == 1


def test_the_centre_moves_towards_the_mean_output_of_a_step_and_of_that_step_alone(dino: DINO) -> None:
    first, others = views()
    dino(first + 1, others)  # of no step
    dino.begin_step(temperature=0.04, learns_prototypes=True)
    for rows in (slice(0, 1), slice(1, 4)):  # a batch in two parts
        dino(first[rows], others[rows])
    outputs = dino.teacher.head(dino.teacher.encoder.pooled(first.transpose(0, 1).flatten(0, 1)))
    dino.end_step(momentum=1.0)
    torch.testing.assert_close(dino.centre, 0.1 * outputs.mean(0))


def test_prototypes_learn_once_they_are_let(dino: DINO) -> None:
    prototypes = dino.student.head.prototypes.weight
    for learns in (False, True):
        dino.begin_step(temperature=0.04, learns_prototypes=learns)
        prototypes.grad = None
        dino(*views()).mean().backward()
        assert bool(prototypes.grad.any()) == learns


@pytest.mark.parametrize("kind", ["same", "uniform"])
def test_a_collapse_is_told_by_the_teachers_outputs(dino: DINO, kind: str) -> None:
    images = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    entropy, information = dino.spread(images)
    assert information > 0.3
    assert entropy + information <= math.log(16) + 1e-5
    with torch.no_grad():
        if kind == "same":
            dino.centre[0] = -100.0
        else:
            dino.teacher.head.prototypes.weight.copy_(torch.ones(16, 16))
    entropy, information = dino.spread(images)
    assert information == pytest.approx(0, abs=1e-4)
    assert entropy == pytest.approx(0 if kind == "same" else math.log(16), abs=1e-4)


def test_neighbours_vote_by_their_nearness() -> None:
    known = np.array([[1, 0], [0.9, 0.1], [0, 1], [0.1, 1], [0.2, 1], [-1, 0]], np.float32)
    labels = np.array([0, 0, 1, 1, 1, 2])
    queries = np.array([[5, 0.1], [0.1, 3], [-2, 0.1]], np.float32)
    assert nearest_neighbour_labels(known, labels, queries, num_neighbours=5).tolist() == [0, 1, 2]
    assert nearest_neighbour_labels(known, labels, queries).tolist() == [0, 1, 2]


def test_small_views_show_no_more_than_they_may() -> None:
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(64, 3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    mirrored = torch.zeros(64, dtype=torch.bool)
    cut = random_crops(ramp, 16, least_area=0.1, most_area=0.2, mirrored=mirrored, generator=generator)
    spans = (cut[:, 0, 0, -1] - cut[:, 0, 0, 0]) * 255 / 8 / 32
    assert spans.min() > 0.2
    assert spans.max() < math.sqrt(0.2 * 4 / 3) + 0.01


def settings_of(*more: str) -> tuple[str, ...]:
    return (*SETTINGS, *more)


def make_trainer(folder: Path, pictures: Path, *more: str) -> Trainer:
    recipe: Recipe = read_recipe(RECIPE, settings_of(*more))
    task = make_task(recipe, read_splits(recipe, folder, OwnData(train=str(pictures), valid=str(pictures))), folder)
    torch.manual_seed(7)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    return Trainer(task=task, model=model, recipe=recipe, folder=folder, seed=7, console=QUIET)


def test_a_run_learns_without_labels_and_leaves_the_teachers_encoder(tmp_path: Path, pictures: Path) -> None:
    settings = settings_of(
        *("optimization.epochs=1000", "optimization.max_steps=60", "optimization.learning_rate=0.003"),
        *("optimization.evaluations=3", "augmentation.grey=0", "augmentation.colour_change=0.1"),
    )
    data = OwnData(train=str(pictures), valid=str(pictures))
    options = RunOptions(recipe=RECIPE, settings=settings, own_data=data, output=tmp_path / "run", seed=0)
    folder = run_training(options, QUIET)
    model, checkpoint = load_model(folder)
    assert isinstance(model, ImageEmbedder)
    assert (checkpoint.task, checkpoint.architecture, checkpoint.attention) == (
        "image_embedding",
        "image_encoder",
        True,
    )
    assert model(torch.zeros(2, 3, 16, 16))["embedding"].shape == (2, 16)
    record = checkpoint.training
    assert record is not None
    assert record.baseline is not None
    assert record.baseline.metric == "knn_accuracy"
    assert {"knn_accuracy", "teacher_entropy", "teacher_information"} <= record.metrics.keys()
    losses = [entry["train_loss"] for entry in record.history]
    assert losses[-1] < losses[0]
    assert record.metrics["knn_accuracy"] > 90
    best = torch.load(next((tmp_path / "run" / "state").glob("*.pt")), weights_only=True)["parts"][0]
    assert any(name.startswith("teacher.encoder.") for name in best)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("distillation.local_size=6", "local_size is 6; it must be a multiple of model.patch_size"),
        ('model.positions="rotary"', "model.positions is 'rotary'"),
    ],
)
def test_what_views_cannot_be_is_named(tmp_path: Path, pictures: Path, setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_trainer(tmp_path, pictures, setting)
