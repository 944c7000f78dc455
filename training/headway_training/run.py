"""A whole run: recipe, data, tokenizer, training, the measurement at the end, and the checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import TypeAdapter
from rich.console import Console

from headway_training.allocation import keep_freed_memory
from headway_training.checkpoint import (
    IMAGE_EVALUATION_FILE,
    TEXT_EVALUATION_FILE,
    TOKENIZER_FILE,
    Checkpoint,
    Evaluation,
    Scalar,
    TrainingRecord,
    TriedIdea,
    write_checkpoint,
)
from headway_training.data.examples import Splits
from headway_training.data.sources import OwnData, data_folder, for_own_data, read_splits
from headway_training.errors import RecipeError
from headway_training.hardware import describe_hardware, library_versions
from headway_training.models import Model, build_model, count_parameters, make_configuration
from headway_training.pretraining import pretrain
from headway_training.recipes import Recipe, read_recipe
from headway_training.run_folder import check_folder, write_description
from headway_training.sizing import Sizing, size_up
from headway_training.tasks import Task, make_task
from headway_training.trainer import Trainer, TrainingSummary

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
    model: str | None = None
    """A named configuration in place of the recipe's model."""
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
        words += ["--model", self.model] if self.model is not None else []
        if self.own_data is not None:
            words += ["--train", self.own_data.train, "--valid", self.own_data.valid]
            words += ["--test", self.own_data.test] if self.own_data.test else []
        for setting in self.settings:
            words += ["--set", setting]
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--max-steps", str(self.max_steps)] if self.max_steps is not None else []
        return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Everything a run is made of, ready to train."""

    options: RunOptions
    recipe: Recipe
    splits: Splits[Any]
    task: Task
    configuration: dict[str, Scalar]
    model: Model
    sizing: Sizing
    trainer: Trainer


def run_training(options: RunOptions, console: Console) -> Path:
    """Trains what the options say, and leaves a checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        TrainingError: Recipe, data or the run's folder are not as they must be; the message says what to do.
    """
    accelerator = Accelerator(mixed_precision="no")
    run = _prepare(options, console, accelerator)
    if accelerator.is_main_process:
        console.print(_introduction(run), highlight=False)
    summary = run.trainer.fit()
    if accelerator.is_main_process:
        _finish(run, summary, console)
    accelerator.wait_for_everyone()
    return options.folder / CHECKPOINT_FOLDER


def _prepare(options: RunOptions, console: Console, accelerator: Accelerator) -> _Run:
    """Reads recipe and data, makes the model, and finds where the run stands."""
    recipe = _read_recipe(options)
    described = _describe(options, recipe)
    check_folder(options.folder, described, resume=options.resume)
    tokenizer_file = options.folder / TOKENIZER_FILE
    with accelerator.main_process_first():  # the first process trains the tokenizer, the others read it
        splits = read_splits(recipe, data_folder(options.data_dir), options.own_data)
        if accelerator.is_main_process and not options.resume:
            tokenizer_file.unlink(missing_ok=True)  # of a run that failed before it began
        task = make_task(recipe, splits, tokenizer_file)
    if options.own_data is not None:
        recipe = for_own_data(recipe, options.own_data, splits.labels)
    sizing = _size_up(recipe, task, options.seed, accelerator.device)
    if sizing.leaves_room and accelerator.device.type == "cpu":
        keep_freed_memory()
    model, configuration = _build(recipe, task, options.seed)
    if accelerator.is_main_process:
        write_description(options.folder, described)
    pretrain(
        recipe,
        task,
        splits,
        model,
        folder=options.folder,
        seed=options.seed,
        console=console,
        accelerator=accelerator,
    )
    trainer = Trainer(
        task=task,
        model=model,
        recipe=recipe,
        folder=options.folder,
        seed=options.seed,
        console=console,
        accelerator=accelerator,
        flops_per_unit=sizing.flops_per_unit,
    )
    return _Run(
        options=options,
        recipe=recipe,
        splits=splits,
        task=task,
        configuration=configuration,
        model=model,
        sizing=sizing,
        trainer=trainer,
    )


def _read_recipe(options: RunOptions) -> Recipe:
    """The recipe with the options on top; own data gives the model a name of its own."""
    settings = list(options.settings)
    if options.own_data is not None and not any(setting.startswith("name=") for setting in settings):
        settings.append(f"name={json.dumps(_model_name(options))}")
    if options.max_steps is not None:
        settings.append(f"optimization.max_steps={options.max_steps}")
    return read_recipe(options.recipe, settings, configuration=options.model)


def _model_name(options: RunOptions) -> str:
    """A name in a store, made of the run's folder or of the recipe and the training data."""
    assert options.own_data is not None
    stem = Path(options.own_data.train.split(",")[0]).name.split(".")[0]
    words = options.folder.name if options.output is not None else f"{Path(options.recipe).stem}-{stem}"
    return re.sub(r"[^a-z0-9._-]+", "-", words.lower()).strip("._-")[:64].strip("._-") or "model"


def _describe(options: RunOptions, recipe: Recipe) -> dict[str, Any]:
    """What decides the result of a run, as it is kept in its folder."""
    settings = TypeAdapter(Recipe).dump_python(replace(recipe, results=(), ideas=()), mode="json")
    return {
        "recipe": settings,
        "seed": options.seed,
        "own_data": asdict(options.own_data) if options.own_data else None,
    }


def _build(recipe: Recipe, task: Task, seed: int) -> tuple[Model, dict[str, Scalar]]:
    """The model with fresh weights of the run's seed, and its configuration.

    Raises:
        RecipeError: The configuration is not a valid one.
    """
    architecture = recipe.model["architecture"]
    fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
    torch.manual_seed(seed)
    try:
        configuration = make_configuration(architecture, {**fields, **task.model_fields()})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from error
    return build_model(architecture, configuration), dict(configuration.to_dict())


def _size_up(recipe: Recipe, task: Task, seed: int, device: torch.device) -> Sizing:
    """What the training needs, with errors that name the recipe's key."""
    try:
        return size_up(recipe, task, seed, device)
    except ValueError as error:
        raise RecipeError(f"model: {error}") from error


def _introduction(run: _Run) -> str:
    """What is about to be trained, on what, with what memory and how fast."""
    recipe, splits, accelerator = run.recipe, run.splits, run.trainer.accelerator
    rate, how = run.trainer.expected_throughput(run.sizing)
    hardware = describe_hardware(accelerator.device, accelerator.num_processes)
    return (
        f"{recipe.name}: {recipe.model['architecture']} of {count_parameters(run.model):,} parameters on {hardware}, "
        f"{recipe.optimization.precision}; {run.trainer.num_steps:,} steps\n"
        f"training data: {splits.train_name}; validation: {len(splits.valid):,} examples; test: {splits.test_name}\n"
        f"{run.sizing.describe()}\n"
        f"speed: about {rate:,.0f} {run.task.unit}/s a process ({how})"
    )


def _finish(run: _Run, summary: TrainingSummary, console: Console) -> None:
    """Reads the test data, once, with the best weights; measures the baseline; writes the checkpoint."""
    console.print(f"best weights: step {summary.best_step:,}. Measuring on the test data, and the baseline ...")
    run.trainer.calibrate()
    record = _record(run, summary)
    evaluation = run.task.evaluation_data()
    checkpoint = Checkpoint(
        name=run.recipe.name,
        task=run.recipe.task,
        description=run.recipe.description,
        license=run.recipe.license,
        architecture=run.recipe.model["architecture"],
        configuration=run.configuration,
        evaluation=Evaluation(
            file=TEXT_EVALUATION_FILE if evaluation.texts is not None else IMAGE_EVALUATION_FILE,
            dataset=run.splits.test_name,
            metric=run.task.metric,
            higher_is_better=run.task.higher_is_better,
        ),
        training=record,
        **run.task.checkpoint_fields(),
    )
    folder = run.options.folder / CHECKPOINT_FOLDER
    write_checkpoint(
        folder, checkpoint, run.model, tokenizer=run.task.tokenizer, texts=evaluation.texts, images=evaluation.images
    )
    _report(record, folder, console)


def _record(run: _Run, summary: TrainingSummary) -> TrainingRecord:
    """The measurements at the end, with all that a model card says of the training."""
    accelerator = run.trainer.accelerator
    return TrainingRecord(
        recipe=Path(run.options.recipe).stem,
        command=run.options.command(),
        seed=run.options.seed,
        step_count=summary.step_count,
        epoch_count=round(summary.epoch_count, 2),
        wall_time_s=round(summary.wall_time_s, 1),
        hardware=describe_hardware(accelerator.device, accelerator.num_processes),
        libraries=library_versions(),
        train_dataset=run.splits.train_name,
        train_example_count=run.task.num_train_examples,
        dataset_license=run.splits.license,
        dataset_home=run.splits.home,
        metrics=run.trainer.evaluate("test"),
        baseline=run.task.measure_baseline(),
        history=tuple(summary.history),
        ideas=tuple(TriedIdea(**asdict(idea)) for idea in ([] if run.options.own_data else run.recipe.ideas)),
    )


def _report(record: TrainingRecord, folder: Path, console: Console) -> None:
    """Shows what was measured."""
    shown = {name: value if isinstance(value, str) else f"{value:.4g}" for name, value in record.metrics.items()}
    console.print(f"test: {'  '.join(f'{name} {value}' for name, value in shown.items())}", highlight=False)
    if record.baseline is not None:
        baseline = record.baseline
        console.print(f"baseline ({baseline.name}): {baseline.metric} {baseline.value:.4g}", highlight=False)
    console.print(f"{record.step_count:,} steps, {record.epoch_count} epochs, {record.wall_time_s:,.0f} s")
    console.print(f"export it with: headway-export {folder} --store models", highlight=False, soft_wrap=True)
