"""A run that is resumed sees the data that it was begun with."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_tasks
from rich.console import Console
from typer.testing import CliRunner

from headway_training.cli import app
from headway_training.data.checksums import LIST_FILE, Checksums
from headway_training.data.public import find_dataset
from headway_training.data.sources import OwnData, find_unchecked_files
from headway_training.errors import ResumeError
from headway_training.recipes import read_recipe
from headway_training.run import RUN_FILE, run_training

QUIET = Console(quiet=True)


@pytest.fixture
def run_on_texts(made_once, tmp_path):
    """Options of a tiny run on a file of its own."""
    options = tiny_tasks.run_options(
        "text classification", made_once("tiny-tasks", tiny_tasks.write_data), tmp_path / "run"
    )
    file = str(shutil.copy(options.own_data.train, tmp_path))
    return replace(options, own_data=OwnData(train=file, valid=file))


@pytest.mark.parametrize("name", tiny_tasks.TASKS)
def test_every_file_that_a_user_gives_has_a_checksum_and_no_other(name, made_once, tmp_path):
    options = tiny_tasks.run_options(name, made_once("tiny-tasks", tiny_tasks.write_data), tmp_path)
    recipe = read_recipe(options.recipe)
    files = find_unchecked_files(recipe, options.data_dir or tmp_path / "data", options.own_data)
    if options.own_data is None:
        made = {file.name for file in find_dataset(recipe.data.dataset).files if file.maker}
        assert {file.relative_to(options.data_dir).as_posix() for file in files} == made
        return
    given = Path(options.own_data.train)
    of_table = given.parent.rglob("*") if given.name in ("recordings.tsv", "train.tsv") else [given]
    expected = given.rglob("*.png") if given.is_dir() else of_table
    assert set(files) == {file for file in expected if file.is_file()}
    assert files


def test_two_files_of_a_translation_and_what_is_made_here_have_checksums(tmp_path):
    for name in ("a.en", "a.de", "b.tsv"):
        (tmp_path / name).write_text("x\n")
    own = OwnData(train=f"{tmp_path / 'a.en'},{tmp_path / 'a.de'}", valid=str(tmp_path / "b.tsv"))
    found = find_unchecked_files(read_recipe("multi30k-en-de"), tmp_path, own)
    assert [file.name for file in found] == ["a.en", "a.de", "b.tsv"]
    (tmp_path / "synthesised").mkdir()
    (tmp_path / "synthesised" / "train.tar").write_bytes(b"")
    made = find_unchecked_files(read_recipe("telephone-codec"), tmp_path, None)
    assert [file.name for file in made] == ["train.tar"]


def test_a_run_is_not_resumed_on_a_text_that_has_changed(run_on_texts, tmp_path):
    options = run_on_texts
    run_training(options, QUIET)
    file, run = Path(options.own_data.train), tmp_path / "run"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (run / LIST_FILE).read_text() == f"{digest}  {file}\n"
    assert json.loads((run / RUN_FILE).read_text())["data_sha256"] == Checksums.of([file]).whole
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(before.replace(b"good", b"fine"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ResumeError, match=rf"was begun with other data: {file} has changed\. Resume it with the data"):
        run_training(replace(options, resume=True), QUIET)
    (run / LIST_FILE).unlink()
    with pytest.raises(ResumeError, match="its list of files is not there"):
        run_training(replace(options, resume=True), QUIET)
    file.write_bytes(before)
    run_training(replace(options, resume=True), QUIET)
    assert (run / LIST_FILE).read_text() == f"{digest}  {file}\n"


def test_images_that_changed_are_gone_or_are_new_are_named(tmp_path):
    folder = tmp_path / "images"
    for place in (folder / label / f"{number}.png" for label in ("red", "blue") for number in range(8)):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(place.name.encode())
    sums = Checksums.of(file for file in folder.rglob("*.png"))
    sums.write(tmp_path)
    for number in range(5):
        (folder / "red" / f"{number}.png").write_bytes(b"other")
    (folder / "blue" / "7.png").rename(folder / "blue" / "8.png")
    with pytest.raises(ResumeError) as refused:
        Checksums.of(file for file in folder.rglob("*.png")).check(tmp_path, sums.whole)
    red, blue = folder / "red", folder / "blue"
    told = f"{red / '0.png'}, {red / '1.png'}, {red / '2.png'} and 2 more has changed; "
    assert told + f"{blue / '7.png'} is gone; {blue / '8.png'} is new. Resume" in str(refused.value)


def test_a_run_of_a_version_without_checksums_is_resumed_with_a_note(run_on_texts, tmp_path, capsys):
    options = run_on_texts
    run_training(options, QUIET)
    run = tmp_path / "run"
    described = json.loads((run / RUN_FILE).read_text())
    whole = described.pop("data_sha256")
    (run / RUN_FILE).write_text(json.dumps(described))
    (run / LIST_FILE).unlink()
    run_training(replace(options, resume=True), Console(soft_wrap=True))
    assert "begun by a version that kept no checksum: its data is not compared" in capsys.readouterr().out
    assert json.loads((run / RUN_FILE).read_text())["data_sha256"] == whole
    run_training(replace(options, resume=True), Console(soft_wrap=True))
    assert "kept no checksum" not in capsys.readouterr().out


def test_a_study_of_sizes_is_not_resumed_on_other_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the sun and the moon doth speak of the king\n" * 60)
    words = ["scale", "tiny-shakespeare", "--train", str(text), "--valid", str(text), "--output", str(tmp_path / "s")]
    words += ["--budget", "60s", "--resume"]
    study = {"seed": 0, "own_data": {"train": str(text), "valid": str(text), "test": None}, "budget_s": 60.0}
    recipe = read_recipe("tiny-shakespeare", ["name=tiny-shakespeare-scale"])
    named = recipe.model_copy(update={"name": "s", "tracker": "none"}).model_dump(
        mode="json", exclude={"result", "tracker"}
    )
    measured = {"hardware": "", "metric": "nats_per_character", "epoch_tokens": 1, "step_tokens": 1, "pilots": []}
    (tmp_path / "s").mkdir()
    Checksums.of([text]).write(tmp_path / "s")
    described = {**study, **measured, "recipe": named, "data_sha256": Checksums.of([text]).whole}
    (tmp_path / "s" / "scale.json").write_text(json.dumps(described))
    text.write_text("another text\n" * 60)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert f"{text} has changed" in result.output
