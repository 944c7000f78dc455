"""A run that was killed and resumed ends exactly like one that was not."""

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_tasks
import torch
from rich.console import Console
from safetensors.torch import load_file

from headway_training import durable, hardware
from headway_training.batches import StepPlan, step_seed
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import ResumeError, StoppedError
from headway_training.kinds import task_names
from headway_training.models import build_model
from headway_training.models.own import MODULE
from headway_training.optimization import learning_rate
from headway_training.recipes import read_recipe
from headway_training.recipes.settings import trainable
from headway_training.run import RUN_FILE, RunOptions, run_training
from headway_training.tasks import make_task, segmentation
from headway_training.trainer import Trainer


class Killed(BaseException):
    """What ends a process, as far as a test can."""


@pytest.fixture(scope="module")
def data(made_once):
    """The data of every task, and the ends of unbroken runs, by the names of tasks."""
    return made_once("tiny-tasks", tiny_tasks.write_data), {}


BROKEN = (
    *("optimization.max_steps=5", "optimization.evaluations=2", "optimization.state_every_steps=2"),
    *("optimization.average_decay=0.9", "optimization.learning_rate=0.003"),
)
"""Validations after the steps 2 and 5, states after 2 and 4."""


def state_at_the_end(folder: Path) -> dict[str, object]:
    """What the last state of a run holds by dotted names, but for the time it took, and its best weights."""
    (file,) = (folder / "state").glob("step-*.pt")
    state = torch.load(file, weights_only=True)
    del state["progress"]["wall_time_s"]
    return {**flat(state), **flat(load_file(folder / "best.safetensors"), "best.")}


def flat(value: object, prefix: str = "") -> dict[str, object]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: one for key, inner in items for name, one in flat(inner, f"{prefix}.{key}").items()}
    return {prefix: value}


@pytest.mark.parametrize("killed", ["in a step", "while it validated"])
@pytest.mark.parametrize("name", tiny_tasks.TASKS)
def test_a_killed_and_resumed_run_of_any_task_ends_with_the_bits_of_an_unbroken_one(
    tmp_path, data, monkeypatch, name, killed
):
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 2, "test": 2})
    monkeypatch.setattr(hardware, "_PROBE_S", 0.005)
    root, unbroken = data
    if name not in unbroken:
        tiny_tasks.open_trainer(name, root, tmp_path / "unbroken", *BROKEN).fit()
        unbroken[name] = state_at_the_end(tmp_path / "unbroken")
    measures_speed = killed == "in a step"  # which changes nothing of what the unbroken run does without
    broken = tiny_tasks.open_trainer(name, root, tmp_path / "broken", *BROKEN, measures_speed=measures_speed)
    broken.task.evaluate(broken.model.eval(), "valid")  # a validation more changes nothing
    if killed == "in a step":
        broken.fit(until_step=3)
    else:
        evaluate = broken.task.evaluate

        def die_at_the_end(model, part):
            metrics = evaluate(model, part)
            if broken.progress.step == broken.num_steps:
                raise Killed
            return metrics

        monkeypatch.setattr(broken.task, "evaluate", die_at_the_end)
        with pytest.raises(Killed):
            broken.fit()
    resumed = tiny_tasks.open_trainer(name, root, tmp_path / "broken", *BROKEN, measures_speed=measures_speed)
    assert resumed.progress.step == (2 if killed == "in a step" else 4)
    resumed.fit()
    expected, found = unbroken[name], state_at_the_end(tmp_path / "broken")
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert torch.equal(one, found[key]) if torch.is_tensor(one) else one == found[key], key


def test_every_task_is_tried_with_every_architecture():
    tried = {
        (recipe.task, "huggingface" if tiny.init in tiny_tasks.FOLDERS else recipe.architecture)
        for tiny in tiny_tasks.TASKS.values()
        for recipe in [read_recipe(tiny.recipe)]
    }
    known = {(task, one) for task in task_names() for one in trainable(task)}
    assert tried == {(task, one) for task, one in known if one != MODULE}  # of which test_own_models.py trains some


RUN = ("optimization.epochs=4", "optimization.evaluations=3", "optimization.state_every_steps=5")
QUIET = Console(quiet=True)


def make_trainer(
    folder: Path, recipe_name: str, own: OwnData, settings: tuple[str, ...], *more: str, console: Console = QUIET
) -> Trainer:
    """A trainer over the run in `folder`: fresh, or as its state says."""
    recipe = read_recipe(recipe_name, [*settings, *RUN, *more])
    task = make_task(recipe, read_splits(recipe, folder, own), folder)
    torch.manual_seed(7)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    return Trainer(task=task, model=model, recipe=recipe, folder=folder, seed=7, console=console)


def assert_same_end(one: Trainer, other: Trainer) -> None:
    assert one.progress.step == other.progress.step == one.num_steps
    assert one.progress.history == other.progress.history
    assert (one.progress.best_value, one.progress.best_step) == (other.progress.best_value, other.progress.best_step)
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


@pytest.mark.parametrize(("stops", "optimizer"), [((3, 4, 11), "adamw"), ((7,), "muon")])
def test_a_resumed_run_ends_like_an_unbroken_one(tmp_path, reviews, tiny_settings, stops, optimizer):
    own = OwnData(train=str(reviews), valid=str(reviews))
    settings = (
        *tiny_settings["ag-news"],
        "model.dropout=0.3",
        "augmentation.token_dropout=0.2",
        f"optimization.optimizer={optimizer}",
    )
    unbroken = make_trainer(tmp_path / "unbroken", "ag-news", own, settings)
    unbroken.fit()
    for stop in stops:  # until_step leaves the state of the last multiple of 5, like a kill at that step
        make_trainer(tmp_path / "broken", "ag-news", own, settings).fit(until_step=stop)
    resumed = make_trainer(tmp_path / "broken", "ag-news", own, settings)
    assert resumed.progress.step == max(stops) // 5 * 5
    resumed.fit()
    assert_same_end(unbroken, resumed)


def test_a_signal_ends_the_run_after_the_step_and_saves_it(tmp_path, reviews, tiny_settings, monkeypatch):
    own = OwnData(train=str(reviews), valid=str(reviews))
    trainer = make_trainer(tmp_path / "run", "ag-news", own, tiny_settings["ag-news"])
    after_step = trainer._after_step

    def interrupt_once(display):
        after_step(display)
        if trainer.progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trainer, "_after_step", interrupt_once)
    with pytest.raises(StoppedError, match="stopped by SIGINT after step 3 of"):
        trainer.fit()
    resumed = make_trainer(tmp_path / "run", "ag-news", own, tiny_settings["ag-news"])
    assert resumed.progress.step == 3


def test_a_killed_process_is_resumed_by_the_command(tmp_path, reviews, tiny_settings):
    settings = [*tiny_settings["ag-news"], "optimization.epochs=10", "optimization.state_every_steps=4"]
    words = ["run", "ag-news", "--train", str(reviews), "--valid", str(reviews), "--seed", "3"]
    for setting in settings:
        words += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "headway_training", *words, "--output", str(tmp_path / "killed")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list((tmp_path / "killed" / "state").glob("step-*.pt")):
            assert process.poll() is None, "the run ended before it wrote a state"
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "killed" / "checkpoint").exists()
    records = {}
    for name, resume in (("killed", True), ("unbroken", False)):
        options = RunOptions(
            recipe="ag-news",
            settings=tuple(settings) if resume else (*settings, 'name="killed"'),
            own_data=OwnData(train=str(reviews), valid=str(reviews)),
            output=tmp_path / name,
            seed=3,
            resume=resume,
        )
        checkpoint = run_training(options, QUIET)
        records[name] = load_file(checkpoint / "model.safetensors")
        description = json.loads((checkpoint / "checkpoint.json").read_text())
        assert description["name"] == "killed"
    assert records["killed"].keys() == records["unbroken"].keys()
    assert all(torch.equal(tensor, records["unbroken"][name]) for name, tensor in records["killed"].items())


def run_options(folder: Path, reviews: Path, settings: tuple[str, ...], **fields: object) -> RunOptions:
    own = OwnData(train=str(reviews), valid=str(reviews))
    return RunOptions(recipe="ag-news", settings=settings, own_data=own, output=folder, max_steps=2, **fields)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path, reviews, tiny_settings):
    settings = tiny_settings["ag-news"]
    run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    with pytest.raises(ResumeError, match=r"holds a run already\. Go on with it by --resume"):
        run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    with pytest.raises(ResumeError, match="holds no run to resume; leave --resume out"):
        run_training(run_options(tmp_path / "other", reviews, settings, resume=True), QUIET)


def test_a_run_is_resumed_only_with_the_settings_it_was_begun_with(tmp_path, reviews, tiny_settings):
    settings = tiny_settings["ag-news"]
    run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    changed = (*settings, "optimization.learning_rate=0.5")
    with pytest.raises(ResumeError, match=r"recipe\.optimization\.learning_rate was 0\.0015 and is 0\.5"):
        run_training(run_options(tmp_path / "run", reviews, changed, resume=True), QUIET)
    with pytest.raises(ResumeError, match="seed was 0 and is 1"):
        run_training(run_options(tmp_path / "run", reviews, settings, resume=True, seed=1), QUIET)


def test_a_run_is_resumed_on_its_threads_unless_others_are_named(tmp_path, reviews, tiny_settings):
    options = run_options(tmp_path / "run", reviews, tiny_settings["ag-news"], threads=2)
    run_training(options, QUIET)
    for chosen, expected in ((None, 2), (1, 1)):
        torch.set_num_threads(3)
        run_training(replace(options, resume=True, threads=chosen), QUIET)
        assert torch.get_num_threads() == expected


def test_a_run_from_before_a_setting_can_be_resumed(tmp_path, reviews, tiny_settings):
    settings = tiny_settings["ag-news"]
    run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    file = tmp_path / "run" / RUN_FILE
    described = json.loads(file.read_text())
    del described["recipe"]["init"], described["recipe"]["model"]["norm"]
    file.write_text(json.dumps(described))
    (stored,) = (tmp_path / "run" / "state").iterdir()
    state = torch.load(stored, weights_only=True)
    state["progress"]["ended"] = False  # which states had
    torch.save(state, stored)
    run_training(run_options(tmp_path / "run", reviews, settings, resume=True), QUIET)
    described["recipe"]["optimization"]["gone"] = 1
    file.write_text(json.dumps(described))
    with pytest.raises(ResumeError, match=r"optimization\.gone was 1 and is None"):
        run_training(run_options(tmp_path / "run", reviews, settings, resume=True), QUIET)


def test_a_finished_run_can_be_resumed_to_no_effect(tmp_path, reviews, tiny_settings):
    settings = tiny_settings["ag-news"]
    checkpoint = run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    before = (checkpoint / "model.safetensors").read_bytes()
    run_training(run_options(tmp_path / "run", reviews, settings, resume=True), QUIET)
    assert (checkpoint / "model.safetensors").read_bytes() == before


def test_a_damaged_state_is_an_error(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"]).fit(until_step=5)
    (tmp_path / "state" / "step-5.pt").write_bytes(b"damaged")
    with pytest.raises(ResumeError, match=r"step-5\.pt cannot be resumed"):
        make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"])
    make_trainer(tmp_path / "b", "ag-news", own, tiny_settings["ag-news"]).fit(until_step=5)
    with pytest.raises(ResumeError, match="cannot be resumed"):
        make_trainer(tmp_path / "b", "ag-news", own, (*tiny_settings["ag-news"], "model.d_ff=64"))


def test_a_state_that_a_power_cut_left_in_part_gives_way_to_the_one_before(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    unbroken = make_trainer(tmp_path / "unbroken", "ag-news", own, tiny_settings["ag-news"])
    unbroken.fit()
    for folder, kept in (("half", 0.5), ("nothing", 0)):
        shown = Console(file=io.StringIO(), width=1000)
        make_trainer(tmp_path / folder, "ag-news", own, tiny_settings["ag-news"]).fit(until_step=5)
        states = tmp_path / folder / "state"
        content = (states / "step-5.pt").read_bytes()
        (states / "step-10.pt").write_bytes(content[: int(kept * len(content))])
        resumed = make_trainer(tmp_path / folder, "ag-news", own, tiny_settings["ag-news"], console=shown)
        assert resumed.progress.step == 5
        assert re.search(r"step-10\.pt cannot be resumed: .*\. The run goes on from step 5", shown.file.getvalue())
        resumed.fit(until_step=10)  # where the state in part is overwritten
        resumed = make_trainer(tmp_path / folder, "ag-news", own, tiny_settings["ag-news"])
        assert resumed.progress.step == 10
        resumed.fit()
        assert_same_end(unbroken, resumed)


def test_a_state_and_the_best_weights_before_it_are_on_the_disk_before_an_older_state_goes(
    tmp_path, reviews, tiny_settings, monkeypatch
):
    flushed, flush = [], durable._flush

    def note(path: Path) -> None:
        flush(path)
        name = re.sub(r"\.[0-9a-f]{8}\.writing$", ".writing", path.name)  # each writer has a name of its own
        flushed.append((name, sorted(file.name for file in (tmp_path / "run" / "state").glob("step-*.pt"))))

    own = OwnData(train=str(reviews), valid=str(reviews))
    make_trainer(tmp_path / "run", "ag-news", own, tiny_settings["ag-news"]).fit(until_step=5)
    monkeypatch.setattr(durable, "_flush", note)
    resumed = make_trainer(tmp_path / "run", "ag-news", own, tiny_settings["ag-news"], "optimization.evaluations=1000")
    resumed.progress.best_value = -1.0  # so that the next validation is the best
    resumed.fit(until_step=6)
    resumed._save()
    assert flushed == [
        ("best.safetensors.writing", ["step-5.pt"]),
        ("run", ["step-5.pt"]),
        ("step-6.pt.writing", ["step-5.pt"]),
        ("state", ["step-5.pt", "step-6.pt"]),
    ]
    assert [file.name for file in (tmp_path / "run" / "state").iterdir()] == ["step-6.pt"]


def test_a_run_that_patience_ended_has_ended_when_it_is_resumed(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    settings = (*tiny_settings["ag-news"], "optimization.patience=2", "optimization.learning_rate=1e-9")
    for every in (1, 7):  # the run ends at a step that has a state already, or at another
        plan = ("optimization.evaluations=20", f"optimization.state_every_steps={every}")
        folder = tmp_path / str(every)
        first = make_trainer(folder, "ag-news", own, settings, *plan)
        first.fit()
        assert 0 < first.progress.step < first.num_steps
        resumed = make_trainer(folder, "ag-news", own, settings, *plan)
        assert resumed.progress.step == first.progress.step
        resumed.fit()
        assert resumed.progress.step == first.progress.step
        assert resumed.progress.history == first.progress.history
        for name, tensor in first.model.state_dict().items():
            assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_plan_covers_every_example_once_an_epoch(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    trainer = make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"])
    plan = trainer._plan
    seen = [int(index) for step in range(plan.num_steps) for index in plan.batch(step)]
    assert plan.epochs_at(plan.num_steps) == 4
    for epoch in range(4):
        assert sorted(seen[80 * epoch : 80 * (epoch + 1)]) == list(range(80))
    assert plan.num_steps in plan.evaluation_steps
    assert len(plan.evaluation_steps) == 3


def test_a_share_of_an_epoch_and_a_limit_of_steps_bound_the_plan(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    whole = make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"])
    for settings, epochs in ((["optimization.epochs=0.5"], 0.5), (["optimization.max_steps=3"], None)):
        recipe = read_recipe("ag-news", [*tiny_settings["ag-news"], *settings])
        plan = StepPlan(whole.task.num_batches, whole.task.epoch_batches, recipe.optimization, seed=0)
        assert (
            plan.num_steps == 3 if epochs is None else plan.epochs_at(plan.num_steps) == pytest.approx(epochs, abs=0.1)
        )


def test_a_plan_counts_batches_before_it_makes_any(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    task = make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"]).task
    made = []

    def make(seed, epoch):
        made.append(epoch)
        return task.epoch_batches(seed, epoch)

    settings = read_recipe("ag-news", ["optimization.epochs=2.5", "optimization.batch_tokens=128"]).optimization
    plan = StepPlan(task.num_batches, make, settings, seed=3)
    assert not made
    counts = [len(task.epoch_batches(3, epoch)) for epoch in range(3)]
    assert plan.num_steps == counts[0] + counts[1] + -(-counts[2] // 2)
    for step in range(plan.num_steps):
        plan.batch(step)
    assert made == [0, 1, 2]
    assert plan.epochs_at(plan.num_steps) == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("name", tiny_tasks.TASKS)
def test_batches_of_any_task_are_as_many_as_are_counted_and_follow_from_seed_and_step_alone(tmp_path, data, name):
    trainer = tiny_tasks.open_trainer(name, data[0], tmp_path, "optimization.max_steps=3")
    for epoch in range(3):
        assert trainer.task.num_batches(5, epoch) == len(trainer.task.epoch_batches(5, epoch))
    batches = []
    for other in range(2):
        torch.manual_seed(other)
        np.random.seed(other)  # noqa: NPY002 (what nothing may draw from)
        random.seed(other)
        batches.append([trainer._make_batch(step).tensors for step in (other, 0, 2)][1:])
    for one, same in zip(*batches, strict=True):
        assert one.keys() == same.keys()
        assert all(torch.equal(tensor, same[key]) for key, tensor in one.items())


def test_every_step_and_stream_has_a_seed_of_its_own():
    seeds = {step_seed(seed, step, stream) for seed in range(3) for step in range(20) for stream in range(3)}
    assert len(seeds) == 180
    assert step_seed(0, 1, 0) == step_seed(0, 1, 0)


def test_the_learning_rate_rises_linearly_and_falls_like_half_a_cosine():
    cosine = read_recipe("ag-news", ["optimization.learning_rate=1", "optimization.warmup_fraction=0.1"]).optimization
    rates = [learning_rate(cosine, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.0, abs=1e-3)
