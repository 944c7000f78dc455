"""Settings that a run would not read are refused by name, whatever the task, and whatever brings them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
import tiny_huggingface as tiny
import tiny_own
import tiny_tasks
import tiny_vision
from pydantic import BaseModel
from rich.console import Console
from typer.testing import CliRunner

from headway_training.checkpoint import read_checkpoint
from headway_training.cli import app
from headway_training.data.sources import OwnData
from headway_training.errors import RecipeError
from headway_training.recipes import Recipe, list_recipes, section_kinds
from headway_training.run import RUN_FILE, RunOptions, run_training
from headway_training.tasks import segmentation
from headway_training.unread import find_unread_of_run

RECIPES = {
    "generation": "tiny-shakespeare",
    "translation": "multi30k-en-de",
    "text_classification": "ag-news",
    "token_classification": "ud-ewt-pos",
    "image_classification": "cifar10",
    "image_embedding": "cifar10-dino",
    "image_text_embedding": "clip",
    "segmentation": "segment",
    "captioning": "caption",
    "transcription": "telephone-transcriber",
    "autoencoding": "emoji-autoencoder",
    "image_generation": "fashion-mnist-diffusion",
    "audio_coding": "telephone-codec",
    "speech_synthesis": "telephone-speech",
}
IMAGES = {
    *("image_classification", "image_embedding", "image_text_embedding", "segmentation", "captioning"),
    *("autoencoding", "image_generation"),
}
TEXTS = {
    *("generation", "translation", "text_classification", "token_classification", "image_text_embedding"),
    *("captioning", "transcription", "speech_synthesis"),
}
READ_BY = {
    "data": set(RECIPES),
    "init": set(RECIPES),
    "optimization": set(RECIPES),
    "tokenizer": TEXTS,
    "augmentation": set(RECIPES) - {"transcription", "audio_coding"},
    "classification": set(),  # of the user's own data alone
    "lora": set(),  # of a model folder alone
    "segmentation": {"segmentation"},
    "captioning": {"captioning"},
    "speech": {"transcription", "speech_synthesis"},
    "distillation": {"image_embedding"},
    "preprocessing": IMAGES,
    "audio": {"transcription"},
    "languages": {"translation"},
    "sampling": {"generation", "speech_synthesis"},
}
"""The tasks that read something of each section, on the data sets of `RECIPES`."""
OTHERS = {
    "data.dataset": "none",
    "data.held_out_style": "fluent",
    "init.checkpoint": "runs/other/checkpoint",
    "languages.source": "fr",
    "languages.target": "fr",
    "speech.language": "fr",
    "preprocessing.mean": "[0.4, 0.4, 0.4]",
    "preprocessing.std": "[0.2, 0.2, 0.2]",
    "lora.target_modules": '["query"]',
    "classification.label_separator": "';'",
    "audio.max_frequency": "3000.0",
    "audio.num_frames": "400",
    "optimization.warmup_fraction": "0.2",
}
"""Values that are neither a default nor what a recipe of the package has, where none can be made of the default."""


def sections() -> dict[str, type[BaseModel]]:
    """The sections of a recipe but for its result and its model, which has fields of its architecture's."""
    return {name: kind for name, kind in section_kinds().items() if name != "result"}


def another_value(key: str, kind: type[BaseModel]) -> str:
    """A value of a setting that is not its default, as `--set` takes it."""
    if key in OTHERS:
        return OTHERS[key]
    field = kind.model_fields[key.partition(".")[2]]
    kinds = [one for one in (get_args(field.annotation) or (field.annotation,)) if one is not NoneType]
    if isinstance(kinds[0], str):  # of a few words
        return next(word for word in kinds if word != field.default)
    if kinds[0] is bool:
        return str(not field.default).lower()
    default = field.default if isinstance(field.default, int | float) else 1
    if kinds[0] is int:
        return str(default + 1)
    assert kinds[0] is float, (key, kinds)
    return str(default / 2 or 0.125)


@pytest.fixture
def data(made_once):
    """The data of every task."""
    return made_once("tiny-tasks", tiny_tasks.write_data)


def read(recipe: str, *settings: str, **options: object) -> Recipe:
    return RunOptions(recipe=recipe, settings=settings, **options).read_recipe()  # type: ignore[arg-type]


def refusal(recipe: str, setting: str) -> str:
    """What is said against a setting, be it of its value; nothing where it is taken."""
    try:
        read(recipe, setting)
    except RecipeError as error:
        return str(error)
    return ""


def test_every_section_is_tried():
    assert READ_BY.keys() == sections().keys()


@pytest.mark.parametrize("section", READ_BY)
@pytest.mark.parametrize("task", RECIPES)
def test_a_setting_is_read_or_refused_with_those_that_are(task, section):
    kind, refused = sections()[section], []
    for name in kind.model_fields:
        key = f"{section}.{name}"
        said = refusal(RECIPES[task], f"{key}={another_value(key, kind)}")
        if f"{key} is not read" in said or "lora: is for a model folder" in said:
            refused.append(key)
            assert section == "lora" or f"--set {key}=" in said
    of_section = {f"{section}.{name}" for name in kind.model_fields}
    assert (of_section != set(refused)) == (task in READ_BY[section])


@pytest.mark.parametrize("name", [file.stem for file in list_recipes()])
def test_a_shipped_recipe_sets_nothing_that_its_run_does_not_read(name):
    read(name)


@contextmanager
def noted_reads() -> Iterator[set[str]]:
    """The settings that are read of any recipe meanwhile."""
    noted: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        for section, kind in sections().items():

            def read_field(self: Any, name: str, section: str = section, fields: Any = kind.model_fields) -> Any:
                if name in fields:
                    noted.add(f"{section}.{name}")
                return object.__getattribute__(self, name)

            patch.setattr(kind, "__getattribute__", read_field, raising=False)
        yield noted


IN_CHECKS = {"preprocessing", "audio", "languages", "sampling", "init", "lora"}
"""Sections that are given on as they are, or read by the checks of recipes themselves."""
HANDED_ON = {"classification.multi_label", "optimization.label_smoothing"}
"""Settings that every run hands to its task, whatever it makes of them."""


@pytest.mark.parametrize("name", tiny_tasks.TASKS)
def test_what_is_not_refused_is_read_and_what_is_refused_is_not(name, tmp_path, data, monkeypatch):
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 2, "test": 2})
    check_reads(tiny_tasks.run_options(name, data, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("captioning", "captions.tsv"),
        ("images and texts", "captions.tsv"),
        ("drawing of texts", "captions.tsv"),
        ("autoencoding", "captions.tsv"),
        ("segmentation", "."),
    ],
)
def test_so_it_is_on_own_data_in_place_of_a_data_set(name, own, tmp_path, data):
    options = tiny_tasks.run_options(name, data, tmp_path / "run")
    files = str(tiny_own.write_own(tmp_path / "own") / own)
    settings = [one for one in options.settings if not one.startswith(("data.", "captioning.text_share"))]
    own_data = OwnData(train=files, valid=files)
    check_reads(replace(options, settings=tuple(settings), own_data=own_data, data_dir=None))


def check_reads(options: RunOptions) -> None:
    """Checks that a run reads the settings that are not refused for it, and no others."""
    recipe = options.read_recipe()
    every = {f"{one}.{field}" for one, kind in sections().items() for field in kind.model_fields}
    declared = {key for key in every if key.partition(".")[0] not in IN_CHECKS} - set(
        find_unread_of_run(recipe, options.own_data)
    )
    with noted_reads() as noted:
        run_training(options, Console(quiet=True))
    noted = {key for key in noted if key.partition(".")[0] not in IN_CHECKS}
    assert declared <= noted
    assert noted - declared <= HANDED_ON


# What is read with some data or some model alone


def check_refused(message: str, recipe: str, *settings: str, **options: object) -> None:
    with pytest.raises(RecipeError, match=message):
        read(recipe, *settings, **options)


def own(file: str) -> OwnData:
    return OwnData(train=file, valid=file)


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("order", "data.valid_fraction=0.2", "not read by the data set order, which reads data.dataset"),
        ("ag-news", "data.test_fraction=0.2", "data set ag-news, which reads data.dataset, data.valid_fraction"),
        ("ag-news", "classification.multi_label=true", "not read by a data set.* it is for --train"),
        ("ud-ewt-pos", "model.pooling=mean", "not read by a model that classifies every token"),
        ("fashion-mnist-diffusion", "model.text_num_layers=2", "a model that draws labels reads no texts"),
        ("fashion-mnist-diffusion", "tokenizer.lowercase=true", "a model that draws labels reads no texts"),
        ("multi30k-en-de-rnn", "attention=true", "attention weights of 'recurrent' cannot be looked at"),
        ("segment", "attention=true", "is not read for segmentation"),
    ],
)
def test_a_setting_that_data_or_model_leave_unread_is_refused(recipe, setting, message):
    check_refused(rf"{setting.partition('=')[0]} is not read.*{message}|{message}", recipe, setting)


def test_a_setting_that_another_one_leaves_unread_is_refused():
    smoothing, separator = "optimization.label_smoothing=0.1", "classification.label_separator=';'"
    check_refused("label_smoothing is not read with model.loss 'sigmoid'", "clip", "model.loss=sigmoid", smoothing)
    assert read("clip", smoothing).optimization.label_smoothing == 0.1
    check_refused(
        r"valid_fraction is not read by the data set pictures, which reads data\.dataset, data\.held_out_style",
        "clip",
        "data.held_out_style=",
        "data.valid_fraction=0.2",
    )
    check_refused("not read without classification.multi_label=true", "ag-news", separator, own_data=own("a.csv"))
    assert read("ag-news", separator, "classification.multi_label=true", own_data=own("a.csv"))


def test_own_data_takes_the_place_of_what_the_file_says_of_data_and_not_of_what_is_set():
    assert read("cifar10", own_data=own("images")).data.valid_fraction == 0.04
    check_refused(
        "data.valid_fraction is not read, as the data is that of --train",
        "cifar10",
        "data.valid_fraction=0.2",
        own_data=own("images"),
    )
    check_refused("--data-dir holds public data sets", "cifar10", own_data=own("images"), data_dir=Path("data"))


def test_an_option_and_a_setting_that_say_the_same_are_not_both_taken():
    check_refused(
        "--max-steps and --set optimization.max_steps are both given",
        "ag-news",
        "optimization.max_steps=5",
        max_steps=3,
    )
    check_refused("--init and --set init.checkpoint are both given", "ag-news", "init.checkpoint=a", init=Path("b"))


def test_conversations_leave_the_settings_of_running_text_unread():
    chat = {"own_data": own("chats.jsonl"), "init": None}
    check_refused("batch_size is not read on conversations", "tiny-shakespeare", **chat)
    read(
        "tiny-shakespeare",
        "optimization.batch_size=",
        "augmentation.subword_splitting=",
        "optimization.batch_tokens=512",
        **chat,
    )
    check_refused("batch_tokens is not read on running text", "tiny-shakespeare", "optimization.batch_tokens=512")


def test_a_run_that_takes_a_tokenizer_trains_none(tmp_path):
    folder = tiny.write_model(tmp_path / "bert", "bert", "ForSequenceClassification")
    assert read("ag-news", "model.max_length=24", init=folder).tokenizer.lowercase  # of the file, which it replaces
    check_refused(
        "the tokenizer is that of", "ag-news", "tokenizer.lowercase=false", "tokenizer.min_frequency=3", init=folder
    )
    check_refused("'huggingface' cannot be looked at", "ag-news", "attention=true", init=folder)
    vision = tiny_vision.write_vision_model(tmp_path / "vit", "vit")
    check_refused("model.max_length is not read by a model of images", "cifar10", "model.max_length=9", init=vision)


def test_what_the_data_decides_of_a_model_is_not_set(tmp_path, data):
    options = tiny_tasks.run_options("text classification", data, tmp_path / "run")
    wrong = replace(options, settings=(*options.settings, "model.num_classes=7"))
    with pytest.raises(RecipeError, match=r"model\.num_classes is 7, and the data makes it 2; leave it out"):
        run_training(wrong, Console(quiet=True))
    run_training(replace(options, settings=(*options.settings, "model.num_classes=2")), Console(quiet=True))


def test_muon_without_matrices_of_layers_is_refused(tmp_path, data):
    options = tiny_tasks.run_options("autoencoding", data, tmp_path / "run")
    with pytest.raises(RecipeError, match="'muon', which is for the matrices of layers, and the model has none"):
        run_training(replace(options, settings=(*options.settings, "optimization.optimizer=muon")), Console(quiet=True))


def test_a_description_that_is_set_is_kept_with_own_data(tmp_path, data):
    options = tiny_tasks.run_options("text classification", data, tmp_path / "run")
    settings = (*options.settings, 'description="Tells praise from blame."')
    folder = run_training(replace(options, settings=settings), Console(quiet=True))
    assert read_checkpoint(folder).description == "Tells praise from blame."


def test_a_run_that_was_begun_with_an_unread_setting_is_resumed_without_it(tmp_path, data):
    options = tiny_tasks.run_options("text classification", data, tmp_path / "run")
    run_training(options, Console(quiet=True))
    file = tmp_path / "run" / RUN_FILE
    described = json.loads(file.read_text())
    described["recipe"]["segmentation"]["click_rounds"] = 9
    described["recipe"]["data"]["valid_fraction"] = 0.3
    file.write_text(json.dumps(described))
    run_training(replace(options, resume=True), Console(quiet=True))


def test_a_study_of_sizes_refuses_what_its_plan_decides(tmp_path):
    words = ["scale", "tiny-shakespeare", "--budget", "1m", "--output", str(tmp_path)]
    for setting in ("optimization.epochs=3", "tracker=wandb"):
        result = CliRunner().invoke(app, [*words, "--set", setting])
        assert result.exit_code == 1
        assert f"--set {setting.partition('=')[0]}: the plan of the pilots decides it" in result.output
