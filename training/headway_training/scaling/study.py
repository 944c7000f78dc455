"""Runs the pilots of a recipe, fits the law to them, and says what it advises: `scale.json` and `scale.svg`."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from headway_training.data.checksums import Checksums
from headway_training.data.sources import data_folder, find_unchecked_files, read_splits
from headway_training.durable import replacing
from headway_training.errors import RecipeError, ResumeError
from headway_training.hardware import describe_hardware, free_threads
from headway_training.models import build_model
from headway_training.recipes import Recipe, parse_setting
from headway_training.run import RunOptions
from headway_training.scaling.law import NUM_CONSTANTS, ScalingLaw, fit_law
from headway_training.scaling.picture import draw
from headway_training.scaling.plan import (
    MOST_EPOCHS,
    Budget,
    Data,
    describe_duration,
    measure_size,
    measure_sizes,
    pilot_recipe,
    plan_pilots,
    run_device,
    shapes,
)
from headway_training.scaling.records import Advice, HeldOut, Pilot, Study
from headway_training.tasks import Task, make_task
from headway_training.trainer import Trainer

STUDY_FILE = "scale.json"
PICTURE_FILE = "scale.svg"
HIT = 0.02
"""Share of the measured loss by which a prediction may differ to count as hit."""
_PLANNED = {"tracker", *(f"optimization.{name}" for name in ("epochs", "max_steps", "evaluations", "patience"))}
"""Settings of a recipe that pilots have their own of."""
_WORSE_IN_A_ROW = 2
"""Sizes worse than the best one after which larger ones are not looked at."""


def run_scaling(options: RunOptions, budget: Budget, target: Budget | None, console: Console) -> Study:
    """Plans pilots within a time, trains them one after another, fits the law to their losses, and advises.

    Pilots that are done are not run again where `options.resume` is set; one that was broken off goes on.

    Args:
        options: Recipe, data, seed and folder.
        budget: Time for the pilots.
        target: What to advise for; None: ten times the pilots' time.
        console: Where progress and results are shown.

    Raises:
        TrainingError: The recipe has no loss to compare or no size to vary, the budget is too small, or the folder
            cannot be used; the message says what to do.
    """
    assert budget.seconds is not None, "pilots have a budget of time"
    recipe, folder = _read_recipe(options), options.folder
    file = folder / STUDY_FILE
    study = _read_study(file, options, recipe, budget.seconds)
    torch.set_num_threads(options.threads or free_threads())
    checksums = Checksums.of(find_unchecked_files(recipe, data_folder(options.data_dir), options.own_data))
    if study is not None and study.data_sha256 is not None:
        checksums.check(folder, study.data_sha256)
    elif study is not None and checksums.files:
        console.print(f"{folder} was begun by a version that kept no checksum: its data is not compared")
    if study is None:
        for stale in ("tokenizer.json", "tokens.bin"):  # of a study that failed before it was planned
            (folder / stale).unlink(missing_ok=True)
    splits = read_splits(recipe, data_folder(options.data_dir), options.own_data)
    task = make_task(recipe, splits, folder)
    if study is None:
        console.print(f"{recipe.name}: measuring how fast sizes of its model are trained ...", highlight=False)
        data = Data.of(task, options.seed)
        pilots = plan_pilots(measure_sizes(recipe, task, data, budget.seconds, options.seed), data, budget.seconds)
        study = Study(
            **_describe(options, recipe, budget.seconds),
            data_sha256=checksums.whole if checksums.files else None,
            hardware=describe_hardware(run_device()),
            metric=task.metric,
            epoch_tokens=data.epoch_tokens,
            step_tokens=data.step_tokens,
            pilots=tuple(pilots),
        )
        checksums.write(folder)
        _write(file, study)
    data = Data(step_tokens=study.step_tokens, epoch_tokens=study.epoch_tokens)
    estimated_s = sum(pilot.estimated_s for pilot in study.pilots)
    console.print(
        f"{len(study.pilots)} pilots of about {describe_duration(estimated_s)} together; the budget is "
        f"{describe_duration(budget.seconds)}",
        highlight=False,
    )
    for number, pilot in enumerate(study.pilots):
        if pilot.loss is None:
            own, part = pilot_recipe(recipe, pilot, data), folder / "pilots" / str(number)
            done = _train(task, own, pilot, part, seed=options.seed, console=console)
            study = study.model_copy(update={"pilots": (*study.pilots[:number], done, *study.pilots[number + 1 :])})
            _write(file, study)
            console.print(f"pilot {number + 1} of {len(study.pilots)}: {_describe_pilot(done)}", highlight=False)
    study = _conclude(study, recipe, task, target or Budget(seconds=10 * budget.seconds))
    _write(file, study)
    _report(study, console)
    console.print(draw(study, folder / PICTURE_FILE), highlight=False)
    return study


def _read_recipe(options: RunOptions) -> Recipe:
    """The recipe, without trackers.

    Raises:
        RecipeError: The task has no loss that compares from one size to another, or a setting is given that the plan
            decides.
    """
    recipe = options.read_recipe()
    given = {parse_setting(setting)[0] for setting in options.settings}
    if planned := sorted(given & _PLANNED):
        raise RecipeError(f"--set {planned[0]}: the plan of the pilots decides it; leave it out")
    if recipe.task != "generation":
        raise RecipeError(
            f"{recipe.name}: a scaling law is fitted to losses in nats, which recipes for generation are validated by; "
            f"this one is for {recipe.task}"
        )
    if recipe.init.checkpoint is not None:
        raise RecipeError(f"{recipe.name}: pilots of several sizes start from fresh weights; leave init.checkpoint out")
    return recipe.model_copy(update={"tracker": "none", "result": None})


def _describe(options: RunOptions, recipe: Recipe, budget_s: float) -> dict[str, Any]:
    """What decides the pilots."""
    own = options.own_data
    return {
        "recipe": recipe.model_dump(mode="json", exclude={"result", "tracker"}),
        "seed": options.seed,
        "own_data": None if own is None else {"train": own.train, "valid": own.valid, "test": own.test},
        "budget_s": budget_s,
    }


def _read_study(file: Path, options: RunOptions, recipe: Recipe, budget_s: float) -> Study | None:
    """The study to go on with; None if a new one begins.

    Raises:
        ResumeError: There is one and it is not to be resumed, there is none to resume, or it is another one.
    """
    if not options.resume:
        if file.is_file():
            raise ResumeError(
                f"{file.parent} holds a study already. Go on with it by --resume, choose another folder with --output, "
                "or remove it"
            )
        return None
    if not file.is_file():
        raise ResumeError(f"{file.parent} holds no study to resume; leave --resume out to start one")
    try:
        study = Study.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ResumeError(f"{file} cannot be read; remove {file.parent} and start over") from error
    described = json.loads(json.dumps(_describe(options, recipe, budget_s)))
    changed = [name for name, value in described.items() if getattr(study, name) != value]
    if changed:
        raise ResumeError(
            f"{file.parent} was begun with another {' and '.join(changed)}. Resume it with the same, or start anew"
        )
    return study


def _write(file: Path, study: Study) -> None:
    """Writes the study, whole or not at all."""
    with replacing(file) as staging:
        staging.write_text(study.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _train(task: Task, recipe: Recipe, pilot: Pilot, folder: Path, *, seed: int, console: Console) -> Pilot:
    """Trains a pilot by its own recipe, from where its folder stands, and removes the folder.

    Raises:
        RecipeError: Its loss is no number.
        StoppedError: A signal came.
    """
    torch.manual_seed(seed)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    started_s = time.perf_counter()
    trainer = Trainer(
        task=task,
        model=model,
        recipe=recipe,
        folder=folder,
        seed=seed,
        console=console,
        accelerator=Accelerator(mixed_precision="no"),
    )
    before_s = trainer.progress.wall_time_s
    trainer.fit()
    loss = trainer.progress.best_value
    if loss is None or not math.isfinite(loss):
        raise RecipeError(
            f"the loss of a pilot of {pilot.size.parameter_count:,} parameters is {loss}: lower "
            "optimization.learning_rate"
        )
    shutil.rmtree(folder, ignore_errors=True)
    return pilot.model_copy(update={"loss": loss, "wall_time_s": before_s + time.perf_counter() - started_s})


def _conclude(study: Study, recipe: Recipe, task: Task, target: Budget) -> Study:
    """Fits the law without the largest pilot, to predict it, and to all, to advise."""
    *others, largest = study.pilots
    law = fit_law([_point(pilot) for pilot in others])
    measured = _point(largest)[2]
    predicted = law.loss(*_point(largest)[:2])
    difference = predicted / measured - 1
    whole = fit_law([_point(pilot) for pilot in study.pilots])
    return study.model_copy(
        update={
            "law": whole,
            "held_out": HeldOut(
                law=law,
                predicted=predicted,
                measured=measured,
                difference=difference,
                hit=abs(difference) <= HIT,
            ),
            "advice": _advise(study, whole, target, recipe, task),
        }
    )


def _point(pilot: Pilot) -> tuple[float, float, float]:
    assert pilot.loss is not None, "all pilots are done"
    return float(pilot.size.parameter_count), float(pilot.token_count), pilot.loss


def _advise(study: Study, law: ScalingLaw, target: Budget, recipe: Recipe, task: Task) -> Advice:
    """The size with the least predicted loss of those that fit the memory and are trained for a step or more.

    Sizes that were not measured take the time of their operations at the speed of the largest pilot.
    """
    largest = study.pilots[-1].size
    flop_s = largest.token_s / largest.flops_per_token
    known = {json.dumps(pilot.size.model): pilot.size for pilot in study.pilots}
    best: Advice | None = None
    num_worse = 0
    for fields in shapes(recipe, task):
        try:
            size = known.get(json.dumps(fields)) or measure_size(recipe, fields, task, study.seed, flop_s)
        except RecipeError:  # of more memory than there is
            break
        tokens = (
            target.seconds / size.token_s if target.seconds is not None else (target.flops or 0) / size.flops_per_token
        )
        steps = int(tokens / study.step_tokens)
        if steps < 1 or num_worse == _WORSE_IN_A_ROW:
            break
        one = Advice(
            budget=target.describe(),
            model=fields,
            parameter_count=size.parameter_count,
            token_count=int(tokens),
            epochs=tokens / study.epoch_tokens,
            step_count=steps,
            flops=tokens * size.flops_per_token,
            estimated_s=tokens * size.token_s,
            predicted=law.loss(size.parameter_count, tokens),
        )
        if best is None or one.predicted < best.predicted:
            best, num_worse = one, 0
        else:
            num_worse += 1
    if best is None:
        raise RecipeError(f"{target.describe()} does not train the smallest size for a step: raise --target")
    return best


def _describe_pilot(pilot: Pilot) -> str:
    assert pilot.loss is not None
    assert pilot.wall_time_s is not None
    return (
        f"N {pilot.size.parameter_count:,}, D {pilot.token_count:,}: loss {pilot.loss:.4f} in "
        f"{describe_duration(pilot.wall_time_s)} (estimated {describe_duration(pilot.estimated_s)})"
    )


def _short(number: float) -> str:
    """A number of three digits with its unit."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def _report(study: Study, console: Console) -> None:
    """Shows pilots, law, prediction and advice."""
    assert study.law is not None
    assert study.held_out is not None
    assert study.advice is not None
    law, held_out, advice = study.law, study.held_out, study.advice
    table = Table("layers", "d_model", "N", "D", "FLOPs", "time", "loss", "law", box=SIMPLE)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for pilot in study.pilots:
        num_parameters, num_tokens, loss = _point(pilot)
        table.add_row(
            str(pilot.size.model["num_layers"]),
            str(pilot.size.model["d_model"]),
            _short(pilot.size.parameter_count),
            _short(pilot.token_count),
            f"{pilot.flops:.1e}",
            describe_duration(pilot.wall_time_s or 0.0),
            f"{loss:.4f}",
            f"{law.loss(num_parameters, num_tokens):.4f}",
        )
    console.print(table)
    spent_s = sum(pilot.wall_time_s or 0.0 for pilot in study.pilots)
    lines = [
        f"{len(study.pilots)} pilots in {describe_duration(spent_s)}; losses are {study.metric} of the validation "
        "part, N counts the weights of the layers",
        law.describe(),
        f"without the largest pilot the law predicts {held_out.predicted:.4f} for it; measured "
        f"{held_out.measured:.4f}, {held_out.difference:+.1%}: {'hit' if held_out.hit else 'missed'} "
        f"({HIT:.0%} aimed at)",
    ]
    if len(study.pilots) <= NUM_CONSTANTS:
        lines.append(
            f"a law of {NUM_CONSTANTS} constants is not determined by {len(study.pilots)} pilots: raise --budget"
        )
    fields = "  ".join(f"{name} {value}" for name, value in advice.model.items())
    lines.append(
        f"for {advice.budget}: {fields} (N {advice.parameter_count:,}), D {advice.token_count:,}, which is "
        f"{advice.step_count:,} steps and {advice.epochs:.3g} passes over the data; about "
        f"{describe_duration(advice.estimated_s)} here, {advice.flops:.2e} FLOPs; predicted loss {advice.predicted:.4f}"
    )
    if advice.epochs > MOST_EPOCHS:
        lines.append(
            f"that many passes are worth less than the law says, which knows {MOST_EPOCHS} at most: it asks for "
            f"{advice.token_count:,} tokens of new text"
        )
    lines.append(f"the largest pilot has {study.pilots[-1].flops / advice.flops:.1%} of these FLOPs")
    console.print("\n".join(lines), highlight=False)
