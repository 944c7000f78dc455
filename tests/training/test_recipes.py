"""Recipes: what comes with the package is valid, and a wrong key or value is named."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from documents import pages_of_today, rows

from headway_training.errors import RecipeError
from headway_training.models import ARCHITECTURES
from headway_training.recipes import Recipe, list_recipes, read_recipe, section_kinds

NAMES = [file.stem for file in list_recipes()]


def test_the_recipes_are_there():
    assert {"ag-news", "cifar10", "multi30k-en-de", "tiny-shakespeare"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_carries_its_command(name):
    recipe = read_recipe(name)
    text = next(file for file in list_recipes() if file.stem == name).read_text(encoding="utf-8")
    assert f"headway-train run {name}" in text
    assert recipe.model["architecture"] in ARCHITECTURES


STARTS = {
    "caption": " --init runs/clip/checkpoint",
    "cifar10-dino": " --init runs/dino-1/checkpoint --set optimization.epochs=8 --output runs/dino-2",
    "clip": " --init runs/clip-3/checkpoint --set data.held_out_style= --set optimization.epochs=9"
    " --set optimization.evaluations=4 --output runs/clip-4",
    "detect": " --init runs/detect-1/checkpoint --set optimization.epochs=2.6 --set optimization.evaluations=3"
    " --set optimization.warmup_fraction=0.02 --output runs/detect-2",
    "segment": " --init runs/segment-6/checkpoint --set optimization.epochs=2.6 --set optimization.evaluations=5"
    " --output runs/segment-7",
    "telephone-speech": " --init runs/voices-2/checkpoint --set optimization.epochs=8 --set optimization.evaluations=8"
    " --output runs/voices-3",
    "telephone-transcriber": " --init runs/speech-ctc-2/checkpoint --set optimization.epochs=1.3"
    " --set optimization.evaluations=3 --output runs/telephone-transcriber-3",
}
"""What the results of recipes began with that were trained in several runs."""


def test_every_recipe_carries_its_result():
    for name in NAMES:
        result = read_recipe(name).result
        assert result is not None
        assert result.command == f"headway-train run {name}{STARTS.get(name, '')}"
        assert result.wall_time_s > 0
        assert result.hardware


def test_the_shipped_models_recipes_have_their_attention_shown():
    shipped = (
        "ag-news",
        "cifar10",
        "multi30k-de-en",
        "multi30k-en-de",
        "tiny-shakespeare",
        "ud-ewt-pos",
        "order",
        "clip",
    )
    assert all(read_recipe(name).attention for name in shipped)
    assert not read_recipe("multi30k-en-de-rnn").attention


def test_a_wrong_key_of_a_result_is_named(tmp_path):
    text = next(file for file in list_recipes() if file.stem == "ag-news").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("wall_time_s", "wall_time"), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"'result\.wall_time'; did you mean 'result\.wall_time_s'"):
        read_recipe(str(tmp_path / "mine.toml"))


def test_a_setting_replaces_the_files():
    recipe = read_recipe("ag-news", ["optimization.learning_rate=0.5", "name=mine", "model.d_model=64"])
    assert (recipe.optimization.learning_rate, recipe.name, recipe.model["d_model"]) == (0.5, "mine", 64)


def test_a_setting_without_a_value_leaves_out_what_the_file_has():
    assert read_recipe("clip").data.held_out_style == "noto"
    assert read_recipe("clip", ["data.held_out_style="]).data.held_out_style is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimization.learning_rat=1", "'optimization.learning_rat'; did you mean 'optimization.learning_rate'?"),
        ("model.d_modle=64", "'model.d_modle'; did you mean 'model.d_model'?"),
        ("optimisation.epochs=1", "'optimisation'; did you mean 'optimization'?"),
        ("optimization.epochs=-1", "optimization.epochs: .*greater than or equal to 0.001 .given: -1"),
        ("optimization.learning_rate=fast", "optimization.learning_rate: .* valid number.*'fast'"),
        ("optimization.optimizer=lion", "optimization.optimizer: .*'adamw' or 'muon'.*'lion'"),
        ("model.configuration=vit-b-61", "did you mean 'vit-b-16'?"),
        ("model.architecture=gtp", "architecture is 'gtp'; it must be one of autoencoder, captioner, clip, codec, det"),
        ("epochs", "expected section.key=value"),
        ("a.b.c=1", "expected section.key=value"),
        ("task.x=1", "task is not a section"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe("ag-news", [setting])


def test_a_misspelt_recipe_is_named_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no recipe 'agnews'; did you mean 'ag-news.\?"):
        read_recipe("agnews")


def test_a_misspelt_key_in_a_file_of_the_users_is_named(tmp_path: Path):
    source = next(file for file in list_recipes() if file.stem == "ag-news").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(source.replace("weight_decay", "wieght_decay"), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"mine\.toml: unknown key 'optimization\.wieght_decay'; did you mean"):
        read_recipe(str(mine))


def test_a_file_that_is_no_toml_or_is_not_there_is_an_error(tmp_path: Path):
    broken = tmp_path / "broken.toml"
    broken.write_text("epochs = = 3", encoding="utf-8")
    with pytest.raises(RecipeError, match="cannot be read as TOML"):
        read_recipe(str(broken))
    with pytest.raises(RecipeError, match="there is no recipe file"):
        read_recipe(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.configuration=cifar10-vit"], "unknown key 'model.max_length'"),
        (["task=generation"], "model.architecture is 'encoder'; generation needs 'gpt'"),
        (["model.head=token"], "model.head is 'token'; text_classification needs 'sequence'"),
        (["task=image_classification"], "model.architecture is 'encoder'; image_classification needs 'vit'"),
    ],
)
def test_a_model_that_does_not_fit_the_task_is_an_error(settings, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe("ag-news", settings)


def test_every_default_of_sampling_can_be_set():
    values = {"max_new_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.25}
    values |= {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.125}
    recipe = read_recipe("tiny-shakespeare", [f"sampling.{name}={value}" for name, value in values.items()])
    assert recipe.sampling is not None
    assert recipe.sampling.model_dump() == values


def test_images_must_be_square():
    with pytest.raises(RecipeError, match=r"preprocessing.height is 48 and width 32; the models take square images"):
        read_recipe("cifar10", ["preprocessing.height=48"])


def test_a_missing_section_is_named(tmp_path: Path):
    source = next(file for file in list_recipes() if file.stem == "multi30k-en-de").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(
        source.replace("[languages]", "[sampling]").replace('source = "en"', "").replace('target = "de"', "")
    )
    with pytest.raises(RecipeError, match=r"\[languages\] is missing"):
        read_recipe(str(mine))


def test_settings_that_documents_name_exist():
    root = Path(__file__).parents[2]
    known = set(Recipe.model_fields)
    known |= {f"{section}.{name}" for section, kind in section_kinds().items() for name in kind.model_fields}
    known |= {f"model.{field.name}" for one in ARCHITECTURES.values() for field in fields(one.configuration)}
    sections = "|".join({*section_kinds(), "model"} - {"sampling"})  # which requests have too
    named = {
        (str(page), name)
        for page in pages_of_today(root)
        for found in re.findall(
            rf"--set ([\w.]+)=|`((?:{sections})\.\w+)(?: = [^`]*|=[^`]*)?`", (root / page).read_text(encoding="utf-8")
        )
        for name in found
        if name
        and name != "section.key"
        and not name.endswith((".py", ".md", ".json", ".onnx", ".safetensors", ".sha256"))
    }
    assert len(named) > 30
    assert {(page, name) for page, name in named if name not in known} == set()


def test_the_settings_that_the_page_explains_exist() -> None:
    for row in rows(Path(__file__).parents[2] / "docs" / "training.md", "setting | effect"):
        section = ""
        for name in re.findall(r"`([\w.]+)[^`]*`", row[0]):
            section, setting = name.rsplit(".", 1) if "." in name else (section, name)
            fields = Recipe.model_fields[section].annotation.model_fields
            assert setting in fields, (section, setting)
