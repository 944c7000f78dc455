"""A run that was killed and resumed ends exactly like one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from headway_training.batches import StepPlan, step_seed
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import ResumeError, StoppedError
from headway_training.models import build_model
from headway_training.optimization import learning_rate
from headway_training.recipes import read_recipe
from headway_training.run import RUN_FILE, RunOptions, run_training
from headway_training.tasks import make_task
from headway_training.trainer import Trainer

RUN = ("optimization.epochs=4", "optimization.evaluations=3", "optimization.state_every_steps=5")
QUIET = Console(quiet=True)


def make_trainer(folder: Path, recipe_name: str, own: OwnData, settings: tuple[str, ...]) -> Trainer:
    """A trainer over the run in `folder`: fresh, or as its state says."""
    recipe = read_recipe(recipe_name, [*settings, *RUN])
    task = make_task(recipe, read_splits(recipe, folder, own), folder)
    torch.manual_seed(7)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    return Trainer(task=task, model=model, recipe=recipe, folder=folder, seed=7, console=QUIET)


def assert_same_end(one: Trainer, other: Trainer) -> None:
    assert one.progress.step == other.progress.step == one.num_steps
    assert one.progress.history == other.progress.history
    assert (one.progress.best_value, one.progress.best_step) == (other.progress.best_value, other.progress.best_step)
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


@pytest.mark.parametrize(("stops", "optimizer"), [((7,), "adamw"), ((3, 4, 11), "adamw"), ((7,), "muon")])
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


def test_random_changes_of_images_are_resumed_too(tmp_path, pictures, tiny_settings):
    own = OwnData(train=str(pictures), valid=str(pictures))
    settings = (*tiny_settings["cifar10"], "model.dropout=0.2", "augmentation.crop_padding=2")
    unbroken = make_trainer(tmp_path / "unbroken", "cifar10", own, settings)
    unbroken.fit()
    make_trainer(tmp_path / "broken", "cifar10", own, settings).fit(until_step=6)
    resumed = make_trainer(tmp_path / "broken", "cifar10", own, settings)
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
    settings = [*tiny_settings["ag-news"], "optimization.epochs=25", "optimization.state_every_steps=4"]
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


def test_a_run_from_before_a_setting_can_be_resumed(tmp_path, reviews, tiny_settings):
    settings = tiny_settings["ag-news"]
    run_training(run_options(tmp_path / "run", reviews, settings), QUIET)
    file = tmp_path / "run" / RUN_FILE
    described = json.loads(file.read_text())
    del described["recipe"]["init"], described["recipe"]["model"]["norm"]
    file.write_text(json.dumps(described))
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


def test_the_plan_covers_every_example_once_an_epoch(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    trainer = make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"])
    plan = trainer._plan
    seen = [int(index) for step in range(plan.num_steps) for index in plan.batch(step)]
    assert plan.epochs_at(plan.num_steps) == 4
    for epoch in range(4):
        assert sorted(seen[80 * epoch : 80 * (epoch + 1)]) == list(range(80))
    assert plan.num_steps in plan.evaluation_steps(3)
    assert len(plan.evaluation_steps(3)) == 3


def test_a_share_of_an_epoch_and_a_limit_of_steps_bound_the_plan(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    whole = make_trainer(tmp_path, "ag-news", own, tiny_settings["ag-news"])
    for settings, epochs in ((["optimization.epochs=0.5"], 0.5), (["optimization.max_steps=3"], None)):
        recipe = read_recipe("ag-news", [*tiny_settings["ag-news"], *settings])
        plan = StepPlan(whole.task.epoch_batches, recipe.optimization, seed=0)
        assert (
            plan.num_steps == 3 if epochs is None else plan.epochs_at(plan.num_steps) == pytest.approx(epochs, abs=0.1)
        )


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
