"""What a recipe adds to the loss: each is off by default, and is what its paper says."""

import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn

from headway_training.checkpoint import CHECKPOINT_FILE
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import build_model
from headway_training.objective import DropoutSchedule, Objective, divergence, symmetric_divergence
from headway_training.recipes import read_recipe
from headway_training.recipes.regularization import RegularizationSettings
from headway_training.run import RunOptions, run_training
from headway_training.tasks import make_task
from headway_training.tasks.base import IGNORED
from headway_training.trainer import Trainer

QUIET = Console(quiet=True)


def make(folder, name, data, settings):
    """Recipe, task and a fresh model."""
    recipe = read_recipe(name, ["optimization.precision=fp32", *settings])
    own = OwnData(train=str(data), valid=str(data))
    task = make_task(recipe, read_splits(recipe, folder, own), folder / "tokenizer.json")
    fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
    torch.manual_seed(0)
    return recipe, task, build_model(recipe.model["architecture"], {**fields, **task.model_fields()})


def batch_of(task):
    return task.collate(task.epoch_batches(0, 0)[0], torch.Generator().manual_seed(0)).tensors


def test_without_settings_the_objective_is_the_tasks_loss(tmp_path, reviews, tiny_settings):
    recipe, task, model = make(tmp_path, "ag-news", reviews, tiny_settings["ag-news"])
    objective, tensors = Objective(task, model.eval(), recipe, "cpu"), batch_of(task)
    assert torch.equal(objective(tensors), task.loss(model, tensors, recipe.optimization.label_smoothing))


def test_divergence_is_summed_over_what_is_predicted():
    one = torch.tensor([[[0.0, 0.0], [5.0, 1.0]]])
    other = torch.tensor([[[0.0, math.log(3)], [1.0, 5.0]]])
    targets = torch.tensor([[1, IGNORED]])
    forth = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    back = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert float(divergence(one, other, targets)) == pytest.approx(forth, rel=1e-5)
    assert float(symmetric_divergence(one, other, targets)) == pytest.approx((forth + back) / 2, rel=1e-5)
    assert float(divergence(one, one, targets)) == 0


def test_r_drop_adds_the_distance_between_two_passes(tmp_path, reviews, tiny_settings):
    settings = (*tiny_settings["ag-news"], "regularization.r_drop=2", "model.dropout=0.3")
    recipe, task, model = make(tmp_path, "ag-news", reviews, settings)
    objective, tensors = Objective(task, model, recipe, "cpu"), batch_of(task)
    torch.manual_seed(1)
    value = objective(tensors).item()
    torch.manual_seed(1)
    first, second = (task.logits(model, tensors) for _ in range(2))
    smoothing, targets = recipe.optimization.label_smoothing, tensors["targets"]
    plain = (task.loss_of_logits(first, targets, smoothing) + task.loss_of_logits(second, targets, smoothing)) / 2
    distance = symmetric_divergence(first, second, targets)
    assert distance.item() > 0
    assert value == pytest.approx((plain + distance).item(), rel=1e-5)
    model.eval()  # without dropout both passes are one
    assert objective(tensors).item() == pytest.approx(task.loss(model, tensors, smoothing).item(), rel=1e-5)


def test_mixup_weighs_two_images_and_their_labels(tmp_path, pictures, tiny_settings):
    settings = (*tiny_settings["cifar10"], "regularization.mixup=0.4")
    recipe, task, model = make(tmp_path, "cifar10", pictures, settings)
    objective, tensors = Objective(task, model, recipe, "cpu"), batch_of(task)
    torch.manual_seed(1)
    first = objective(tensors).item()
    torch.manual_seed(1)
    assert objective(tensors).item() == first  # a function of the step's seed
    torch.manual_seed(2)
    assert objective(tensors).item() != first
    objective.eval()
    plain = task.loss(model, tensors, recipe.optimization.label_smoothing).item()
    assert objective(tensors).item() == pytest.approx(plain)
    same = {name: tensor[:1].repeat_interleave(4, dim=0) for name, tensor in tensors.items()}
    objective.train()
    assert objective(same).item() == pytest.approx(task.loss(model, same).item(), rel=1e-4)  # mixed with itself


def test_dropout_is_on_in_its_part_of_the_training():
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2), nn.Dropout(0.1))
    schedule = DropoutSchedule(model, RegularizationSettings(dropout_from=0.25, dropout_until=0.5), 8)
    rates = []
    for step in range(8):
        schedule.apply(step)
        rates.append((model[0].p, model[2].p))
    assert rates == [(0.0, 0.0)] * 2 + [(0.3, 0.1)] * 2 + [(0.0, 0.0)] * 4


@pytest.fixture
def teacher(tmp_path, reviews, tiny_settings):
    """A checkpoint of a classifier of the reviews."""
    own = OwnData(train=str(reviews), valid=str(reviews))
    settings = (*tiny_settings["ag-news"], "optimization.evaluations=1")
    options = RunOptions(recipe="ag-news", settings=settings, own_data=own, output=tmp_path / "teacher", max_steps=3)
    return run_training(options, QUIET)


def test_a_teacher_draws_the_student_towards_it(tmp_path, reviews, tiny_settings, teacher):
    settings = (
        *tiny_settings["ag-news"],
        f"distillation.teacher={teacher}",
        "distillation.weight=1",
        "model.dropout=0",
    )
    (tmp_path / "student").mkdir()
    recipe, task, model = make(tmp_path / "student", "ag-news", reviews, settings)
    trainer = Trainer(task=task, model=model, recipe=recipe, folder=tmp_path / "student", seed=0, console=QUIET)
    objective, tensors = trainer._objective.eval(), batch_of(task)
    before = objective(tensors).item()
    trainer.fit(until_step=10)
    assert objective.eval()(tensors).item() < before
    model.load_state_dict(objective._teacher[0].state_dict())
    assert objective(tensors).item() == pytest.approx(0, abs=1e-4)
    assert all("teacher" not in name for name, _ in objective.named_parameters())


def test_a_teacher_of_something_else_is_refused(tmp_path, reviews, pictures, tiny_settings, teacher):
    chosen = f"distillation.teacher={teacher}"
    recipe, task, model = make(tmp_path, "cifar10", pictures, (*tiny_settings["cifar10"], chosen))
    with pytest.raises(RecipeError, match="is for text_classification; the recipe is for image_classification"):
        Trainer(task=task, model=model, recipe=recipe, folder=tmp_path, seed=0, console=QUIET)
    settings = (*tiny_settings["ag-news"], chosen, "tokenizer.vocabulary_size=280")
    recipe, task, model = make(tmp_path, "ag-news", reviews, settings)
    with pytest.raises(RecipeError, match="another tokenizer; train both on the same data"):
        Trainer(task=task, model=model, recipe=recipe, folder=tmp_path, seed=0, console=QUIET)
    content = json.loads((teacher / CHECKPOINT_FILE).read_text())
    (teacher / CHECKPOINT_FILE).write_text(json.dumps({**content, "labels": ["praise", "blame"]}))
    (tmp_path / "other").mkdir()
    recipe, task, model = make(tmp_path / "other", "ag-news", reviews, (*tiny_settings["ag-news"], chosen))
    with pytest.raises(RecipeError, match="whose labels are"):
        Trainer(task=task, model=model, recipe=recipe, folder=tmp_path, seed=0, console=QUIET)
