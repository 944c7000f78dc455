"""A whole run: recipe, data, tokenizer, training, the measurement at the end, and the checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import TypeAdapter
from rich.console import Console

from headway_training.checkpoint import (
    CHECKPOINT_FILE,
    IMAGE_EVALUATION_FILE,
    TEXT_EVALUATION_FILE,
    Checkpoint,
    Evaluation,
    TrainingRecord,
    write_checkpoint,
)
from headway_training.data.examples import Splits
from headway_training.data.sources import OwnData, data_folder, for_own_data, read_splits
from headway_training.errors import RecipeError, ResumeError
from headway_training.hardware import describe_hardware, library_versions
from headway_training.models import Model, build_model, count_parameters
from headway_training.recipes import Recipe, read_recipe
from headway_training.tasks import Task, make_task
from headway_training.trainer import Trainer, TrainingSummary

RUN_FILE = "run.json"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `headway-train run` was told."""

    recipe: str
    """Name of the recipe, or path of its file."""
    settings: tuple[str, ...] = ()
    """`section.key=value` on top of the recipe's."""
    data_dir: Path | None = None
    """Folder of the public data sets."""
    own_data: OwnData | None = None
    """The user's own files instead."""
    output: Path | None = None
    """Folder of the run; None: `runs/<recipe>`."""
    seed: int = 0
    """Seed of everything that is random."""
    max_steps: int | None = None
    """Most optimizer steps; None: the recipe's."""
    resume: bool = False
    """Whether to go on with the run in `output`."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.output or Path("runs") / Path(self.recipe).stem

    def command(self) -> str:
        """The command that makes this model again; where data and output lie is left out."""
        words = ["headway-train", "run", self.recipe]
        if self.own_data is not None:
            words += ["--train", self.own_data.train, "--valid", self.own_data.valid]
            words += ["--test", self.own_data.test] if self.own_data.test else []
        for setting in self.settings:
            words += ["--set", setting]
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--max-steps", str(self.max_steps)] if self.max_steps is not None else []
        return shlex.join(words)


def run_training(options: RunOptions, console: Console) -> Path:
    """Trains what the options say, and leaves a checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: Recipe, data or the run's folder are not as they must be; the message says what to do.
    """
    accelerator = Accelerator(mixed_precision="no")
    recipe = _read_recipe(options)
    _claim_folder(options, recipe, accelerator)
    with accelerator.main_process_first():  # the first process trains the tokenizer, the others read it
        splits = read_splits(recipe, data_folder(options.data_dir), options.own_data)
        task = make_task(recipe, splits, options.folder / "tokenizer.json")
    if options.own_data is not None:
        recipe = for_own_data(recipe, options.own_data, splits.labels)
    model = _build(recipe, task, options.seed)
    if accelerator.is_main_process:
        console.print(_introduction(recipe, task, splits, model, accelerator))
    trainer = Trainer(
        task=task,
        model=model,
        settings=recipe.optimization,
        folder=options.folder,
        seed=options.seed,
        console=console,
        accelerator=accelerator,
    )
    summary = trainer.fit()
    if accelerator.is_main_process:
        _finish(options, recipe, splits, task, trainer, summary, console)
    accelerator.wait_for_everyone()
    return options.folder / CHECKPOINT_FOLDER


def _read_recipe(options: RunOptions) -> Recipe:
    """The recipe with the options on top; own data gives the model a name of its own."""
    settings = list(options.settings)
    if options.own_data is not None and not any(setting.startswith("name=") for setting in settings):
        settings.append(f"name={json.dumps(_model_name(options))}")
    if options.max_steps is not None:
        settings.append(f"optimization.max_steps={options.max_steps}")
    return read_recipe(options.recipe, settings)


def _model_name(options: RunOptions) -> str:
    """A name in a store, made of the run's folder or of the recipe and the training data."""
    assert options.own_data is not None
    stem = Path(options.own_data.train.split(",")[0]).name.split(".")[0]
    words = options.folder.name if options.output is not None else f"{Path(options.recipe).stem}-{stem}"
    return re.sub(r"[^a-z0-9._-]+", "-", words.lower()).strip("._-")[:64].strip("._-") or "model"


def _claim_folder(options: RunOptions, recipe: Recipe, accelerator: Accelerator) -> None:
    """Takes the run's folder, or checks that the run in it is the one to resume.

    Raises:
        ResumeError: There is a run and `resume` is off, there is none and it is on, or it is another one.
    """
    file = options.folder / RUN_FILE
    described = {
        "recipe": TypeAdapter(Recipe).dump_python(recipe, mode="json"),
        "seed": options.seed,
        "own_data": asdict(options.own_data) if options.own_data else None,
    }
    if not options.resume:
        accelerator.wait_for_everyone()
        taken = file.is_file()
        accelerator.wait_for_everyone()
        if taken:
            raise ResumeError(
                f"{options.folder} holds a run already. Go on with it by --resume, choose another folder with --output, "
                "or remove it"
            )
        if accelerator.is_main_process:
            options.folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        return
    if not file.is_file():
        raise ResumeError(f"{options.folder} holds no run to resume; leave --resume out to start one")
    _check_same(json.loads(file.read_text(encoding="utf-8")), described, options.folder)


def _check_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Checks that a run is resumed as it was begun: a changed recipe would make another model."""
    before, after = _flatten(stored), _flatten(wanted)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        shown = "; ".join(f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in changed[:3])
        raise ResumeError(
            f"{folder} was begun with other settings: {shown}. Resume it with the same, or start a new run"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _build(recipe: Recipe, task: Task, seed: int) -> Model:
    """The model with fresh weights of the run's seed.

    Raises:
        RecipeError: The configuration is not a valid one.
    """
    torch.manual_seed(seed)
    fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
    try:
        return build_model(recipe.model["architecture"], {**fields, **task.model_fields()})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from error


def _introduction(recipe: Recipe, task: Task, splits: Splits[Any], model: Model, accelerator: Accelerator) -> str:
    """What is about to be trained, on what."""
    hardware = describe_hardware(accelerator.device, accelerator.num_processes)
    return (
        f"{recipe.name}: {recipe.model['architecture']} of {count_parameters(model):,} parameters on {hardware}, "
        f"{recipe.optimization.precision}\n"
        f"training data: {splits.train_name} ({task.num_train_examples:,} examples), validation: {len(splits.valid):,}, "
        f"test: {splits.test_name}"
    )


def _finish(
    options: RunOptions,
    recipe: Recipe,
    splits: Splits[Any],
    task: Task,
    trainer: Trainer,
    summary: TrainingSummary,
    console: Console,
) -> None:
    """Reads the test data, once, with the best weights; measures the baseline; writes the checkpoint."""
    console.print(f"best weights: step {summary.best_step:,}. Measuring on the test data, and the baseline ...")
    metrics = trainer.evaluate("test")
    baseline = task.measure_baseline()
    evaluation = task.evaluation_data()
    record = TrainingRecord(
        recipe=Path(options.recipe).stem,
        command=options.command(),
        seed=options.seed,
        step_count=summary.step_count,
        epoch_count=round(summary.epoch_count, 2),
        wall_time_s=round(summary.wall_time_s, 1),
        hardware=describe_hardware(trainer.accelerator.device, trainer.accelerator.num_processes),
        libraries=library_versions(),
        train_dataset=splits.train_name,
        train_example_count=task.num_train_examples,
        dataset_license=splits.license,
        dataset_home=splits.home,
        metrics=metrics,
        baseline=baseline,
    )
    checkpoint = Checkpoint(
        name=recipe.name,
        task=recipe.task,
        description=recipe.description,
        license=recipe.license,
        architecture=recipe.model["architecture"],
        configuration=trainer.model.configuration.to_dict(),
        evaluation=Evaluation(
            file=TEXT_EVALUATION_FILE if evaluation.texts is not None else IMAGE_EVALUATION_FILE,
            dataset=splits.test_name,
            metric=task.metric,
            higher_is_better=task.higher_is_better,
        ),
        training=record,
        **task.checkpoint_fields(),
    )
    folder = options.folder / CHECKPOINT_FOLDER
    write_checkpoint(
        folder, checkpoint, trainer.model, tokenizer=task.tokenizer, texts=evaluation.texts, images=evaluation.images
    )
    measured = "  ".join(f"{name} {_shown(value)}" for name, value in metrics.items())
    console.print(f"test: {measured}\nbaseline ({baseline.name}): {baseline.metric} {baseline.value:.4g}")
    console.print(f"{summary.step_count:,} steps, {summary.epoch_count:.1f} epochs, {summary.wall_time_s:,.0f} s")
    console.print(f"checkpoint: {folder / CHECKPOINT_FILE}")


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
