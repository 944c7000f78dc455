"""Modules, architectures and tasks of one's own are trained by recipes, and what cannot be is told at once."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import own_models
import pytest
import tiny_tasks
import torch
from rich.console import Console
from typer.testing import CliRunner

from headway_training import kinds
from headway_training.checkpoint import load_model, read_checkpoint
from headway_training.cli import app
from headway_training.contract import check_contract
from headway_training.data.sources import OwnData
from headway_training.errors import CheckpointError, RecipeError
from headway_training.models import ARCHITECTURES, GPTConfig, architecture, architectures
from headway_training.models.own import find_factory, import_own
from headway_training.run import RunOptions, run_training
from headway_training.tasks import segmentation

QUIET = Console(quiet=True)


@pytest.fixture
def data(made_once):
    """The data of every task."""
    return made_once("tiny-tasks", tiny_tasks.write_data)


def run(data, folder, name, *settings, **options):
    """Trains a tiny task, with a module of one's own in place of its recipe's model where one is named."""
    made = tiny_tasks.run_options(name, data, folder, *settings)
    if options:
        kept = tuple(one for one in made.settings if not one.startswith("model."))
        made = replace(made, settings=(*kept, *settings), **options)
    return run_training(made, QUIET)


KITS = [name for name, tiny in tiny_tasks.TASKS.items() if tiny.init not in tiny_tasks.FOLDERS]


@pytest.mark.parametrize("name", KITS)
def test_every_architecture_keeps_to_what_is_asked_of_modules(name, tmp_path, data, monkeypatch):
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 2, "test": 2})
    trainer = tiny_tasks.open_trainer(name, data, tmp_path / "run", "optimization.max_steps=2")
    before = {key: one.clone() for key, one in trainer.model.state_dict().items()}
    check_contract(trainer.task, trainer.model)
    assert all(torch.equal(one, before[key]) for key, one in trainer.model.state_dict().items())


KITS_ALONE = {"captioning": ("captioning.text_share=0",), "transcription": ("speech.alignment_share=0",)}
"""What is learned by the kit's models alone, and left out."""


@pytest.mark.parametrize(
    "name",
    [
        *("generation", "linear generation", "translation", "recurrent translation", "text classification"),
        *("several labels", "token classification", "image classification", "captioning", "transcription"),
        "segmentation",
    ],
)
def test_a_module_learns_by_its_protocol_what_the_kit_learns_of_it(name, tmp_path, data, monkeypatch):
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 2, "test": 2})
    exact = ("optimization.epsilon=1", "optimization.optimizer=adamw", *KITS_ALONE.get(name, ()))
    kits = run(data, tmp_path / "kits", name, *exact, *(() if name == "segmentation" else ("model.dropout=0",)))
    expected, described = load_model(kits)
    monkeypatch.setattr(own_models, "MIRRORED", [(described.architecture, described.configuration)])
    found, checkpoint = load_model(run(data, tmp_path / "own", name, *exact, module="own_models:mirrored"))
    assert (checkpoint.architecture, checkpoint.configuration) == ("module", {"factory": "own_models:mirrored"})
    assert "--module own_models:mirrored" in checkpoint.training.command
    assert type(found) is type(expected)
    for key, one in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], one, msg=key)


def test_a_run_of_a_module_is_resumed_and_starts_another(tmp_path, data):
    first = run(data, tmp_path / "first", "generation", module="own_models:gpt")
    options = replace(
        tiny_tasks.run_options("generation", data, tmp_path / "second"), module="own_models:gpt", init=first
    )
    kept = tuple(one for one in options.settings if not one.startswith(("model.", "tokenizer.")))
    run_training(replace(options, settings=kept), QUIET)
    run_training(replace(options, settings=kept, resume=True), QUIET)
    assert read_checkpoint(tmp_path / "second" / "checkpoint").training.step_count == 2


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("TakesOneTensor", "it does not read a batch, {'input_ids': .* takes 2 positional arguments"),
        ("ColumnsFirst", r"it returns \(2, 3\), and the targets of the rows are \(3,\)"),
        ("OtherClasses", "it tells 7 classes apart, and the data has 2: give its factory a parameter num_classes"),
        ("StartsTooLarge", "its fresh weights give numbers that are not finite"),
        ("NeverSteady", "in evaluation mode it answers the same batch twice with different numbers"),
        ("ComparesRows", "a row's answer must not depend on others"),
        ("ReadsPadding", "padding behind a text changes its answer"),
        ("KeepsFigures", "forward changes module.norm.running_mean, module.norm.running_var"),
        ("HasIdleWeights", "module.spare.weight, module.spare.bias get no gradient"),
        ("IsNotTrained", "its loss depends on no weight"),
    ],
)
def test_a_module_that_cannot_be_trained_is_told_in_a_sentence_before_it_is(module, message, tmp_path, data):
    with pytest.raises(RecipeError, match=message):
        run(data, tmp_path / "run", "text classification", module=f"own_models:{module}")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_decoder_that_looks_ahead_is_told(tmp_path, data):
    with pytest.raises(RecipeError, match="another last token changes what is predicted before it"):
        run(data, tmp_path / "run", "generation", module="own_models:LooksAhead")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": "nowhere:build"}, "nowhere:build: No module named 'nowhere'; give it as package.module:function"),
        ({"module": "nowhere"}, "--module nowhere: No module named 'nowhere'"),
        ({"module": "own_models:nothing"}, "own_models has no function 'nothing'"),
        ({"module": "own_models:untold"}, "does not say that it returns a torch.nn.Module"),
        ({"module": "own_models:bare"}, "its parameter vocabulary_size has no default"),
        ({"module": "own_models:gpt", "model": "gpt3-small"}, "--model gpt3-small and --module own_models:gpt each"),
        ({"module": "own_models:gpt", "settings": ("model.max_lenght=9",)}, "did you mean 'max_length'"),
        (
            {"module": "own_models:gpt", "settings": ("model.max_length=[1]",)},
            "must be a number, a word, true or false",
        ),
    ],
)
def test_what_is_no_factory_or_not_taken_by_one_is_refused(options, message):
    with pytest.raises(RecipeError, match=message):
        RunOptions(recipe="tiny-shakespeare", **options).read_recipe()


def test_a_module_that_is_not_there_is_named_as_it_was_given():
    result = CliRunner().invoke(app, ["run", "tiny-shakespeare", "--module", "own_model:x:"])
    assert result.exit_code == 1
    assert "--module own_model:x:: No module named 'own_model'; give it as" in result.output


_SOURCES = {
    "my-model.py": "def build(): return 1",
    "2024_model.py": "locals()['build'] = lambda: 1",
    "named.py": "import sys\nsys.modules[__name__].build = lambda: 1",
    "package/__init__.py": "import sys, types\nsys.modules['package.made'] = made = types.ModuleType('package.made')\n"
    "made.build = lambda: 1",
    "syntax.py": "def build(: pass",
    "needs.py": "\nimport not_installed\nbuild = int",
    "raises.py": "\n\nraise ValueError('bad')\nbuild = int",
    "ends.py": "import sys\nsys.exit(5)\nbuild = int",
}


@pytest.mark.parametrize("name", ["my-model:build", "2024_model", "named", "package.made"])
def test_whatever_python_imports_is_taken_as_a_factory(name, tmp_path, monkeypatch):
    _write_sources(tmp_path, monkeypatch)
    assert find_factory(name)() == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-modle", "No module named 'my-modle' (did you mean 'my-model'?)"),
        ("package.other", "No module named 'package.other'"),
        ("syntax", "SyntaxError: invalid syntax (syntax.py, line 1)"),
        ("needs", "ModuleNotFoundError: No module named 'not_installed' (needs.py, line 2)"),
        ("raises", "ValueError: bad (raises.py, line 3)"),
        ("ends", "SystemExit: 5 (ends.py, line 2)"),
    ],
)
def test_why_a_factory_cannot_be_imported_is_told_with_its_line(name, told, tmp_path, monkeypatch):
    _write_sources(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=re.escape(f"{name}: {told}")):
        find_factory(name)


def _write_sources(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for file, source in _SOURCES.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(source)
        monkeypatch.delitem(sys.modules, file.removesuffix(".py").replace("/__init__", ""), raising=False)
    monkeypatch.delitem(sys.modules, "package.made", raising=False)


def test_a_task_that_trains_the_kits_models_alone_takes_no_module():
    with pytest.raises(RecipeError, match=r"model.architecture is 'module'; image_embedding needs 'image_encoder'"):
        RunOptions(recipe="cifar10-dino", module="own_models:gpt").read_recipe()
    with pytest.raises(RecipeError, match=r"captioning.text_share must be 0: a module of your own"):
        RunOptions(recipe="caption", module="own_models:gpt").read_recipe()


@pytest.mark.parametrize("factory", ["subprocess:run", "os:system", "torch:load"])
def test_a_checkpoint_cannot_have_anything_called_but_what_says_that_it_makes_modules(factory, tmp_path, data):
    folder = run(data, tmp_path / "run", "generation", module="own_models:gpt")
    file = folder / "checkpoint.json"
    content = json.loads(file.read_text())
    content["configuration"] = {"factory": factory}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"does not say that it returns a torch.nn.Module"):
        load_model(folder)


# Architectures and tasks of one's own

RECIPE = """
name = "slope"
task = "slope_finding"
description = "A line."
license = "CC0-1.0"
tracker = "none"

[data]
dataset = "none"

[model]
architecture = "slope"

[optimization]
epochs = 40
batch_size = 8
learning_rate = 0.1
weight_decay = 0
evaluations = 2
"""


@pytest.fixture
def line(tmp_path):
    """Points of a line and a recipe for them; what is registered meanwhile is forgotten."""
    kept = [(table, dict(table)) for table in (kinds._KINDS, architectures._ENTRIES)]
    places = np.linspace(-1, 1, 32)
    np.savetxt(tmp_path / "line.txt", np.stack((places, 3 * places + 1), axis=1))
    (tmp_path / "slope.toml").write_text(RECIPE)
    yield tmp_path
    sys.modules.pop("own_task", None)
    for table, before in kept:
        table.clear()
        table.update(before)


def test_a_task_and_an_architecture_of_ones_own_need_no_other_file(line):
    """Both stand in `own_task`; the command names the module, and nothing else knows of them."""
    points = str(line / "line.txt")
    arguments = ["run", str(line / "slope.toml"), "--module", "own_task", "--train", points, "--valid", points]
    result = CliRunner().invoke(app, [*arguments, "--output", str(line / "run")])
    assert result.exit_code == 0, result.output
    model, checkpoint = load_model(line / "run" / "checkpoint")
    assert checkpoint.modules == ("own_task",)
    assert checkpoint.description == "Finds a slope; trained on line.txt."
    assert checkpoint.evaluation.metric == "squared_error"
    assert model.factors.tolist() == pytest.approx([1, 3], abs=0.1)


def test_what_such_a_task_does_not_read_is_refused_as_for_every_task(line):
    own = OwnData(train="line.txt", valid="line.txt")

    def check_refused(message, *settings, own_data=own):
        recipe = str(line / "slope.toml")
        options = RunOptions(recipe=recipe, module="own_task", own_data=own_data, settings=settings)
        with pytest.raises(RecipeError, match=message):
            options.read_recipe()

    check_refused("flip is not read for slope_finding, whose sections are", "augmentation.flip=true")
    check_refused("architecture is 'gpt'; slope_finding needs 'slope'", "model.architecture=gpt")
    check_refused("dataset 'cifar10' is for the task image_classification", "data.dataset=cifar10", own_data=None)


def test_a_name_is_taken_once(line):
    own_task = import_own("own_task")
    with pytest.raises(ValueError, match="task 'slope_finding' of SlopeTask: SlopeTask has that name"):
        kinds.register(own_task.SlopeTask)
    with pytest.raises(ValueError, match="architecture 'gpt' of Slope: 'gpt' has that name"):
        architecture("gpt", own_task.SlopeConfig, "generation")(own_task.Slope)
    with pytest.raises(ValueError, match="architecture 'mine' of Slope: 'gpt' has that name or configuration"):
        architecture("mine", GPTConfig, "generation")(own_task.Slope)
    assert {"slope_finding", "generation"} <= set(kinds.task_names())
    assert {"slope", "gpt"} <= set(ARCHITECTURES)
