"""The whole modules of docs/bring-your-own.md: trained, exported, served and called by the page's commands."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from headway_client.cli import app as client_app
from headway_export.cli import app as export_app
from headway_training.cli import app as training_app

from .conftest import serve

PAGE = (Path(__file__).parents[2] / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
SPECIAL = ("<pad>", "<bos>", "<eos>")
PHOTO, COPY = (320, 240), "photo-2.jpg"
TRAINED = ("mine.gpt", "mine.reader", "mine.pictures")
BRIEF = ("--max-steps", "2", "--set", "tracker=none", "--set", "optimization.evaluations=1")
TINY = {
    "tiny-shakespeare": ("tokenizer.vocabulary_size=280", "optimization.batch_size=4", "model.width=32"),
    "ag-news": ("tokenizer.vocabulary_size=300", "optimization.batch_tokens=64", "model.width=32"),
    "cifar10": ("optimization.batch_size=4", "model.width=16"),
}
"""What makes the page's runs take a moment."""


def blocks(kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == kind]


def commands(program: str, about: str) -> list[list[str]]:
    """The page's commands of a program on modules of `mine`, or on what they became."""
    lines = "\n".join(block for block in blocks("") if about in block).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split()[:1] == [program]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands run: the modules with random weights, a tokenizer, pictures."""
    made = tmp_path_factory.mktemp("worked")
    (made / "mine").mkdir()
    for block in blocks("python"):
        if found := re.match(r"# (mine/\w+\.py)\n", block):
            (made / found[1]).write_text(block, encoding="utf-8")
    [preprocessing] = blocks("json")
    (made / "preprocessing.json").write_text(preprocessing, encoding="utf-8")
    words = [*SPECIAL, *(f"w{number}" for number in range(77))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(made / "tokenizer.json"))
    for number, name in enumerate(("photo.jpg", COPY)):
        Image.linear_gradient("L").resize(PHOTO).rotate(180 * number).convert("RGB").save(made / name)
    for part in ("", "-valid"):
        (made / f"story{part}.txt").write_text("once upon a time there was a king and he was old\n" * 40)
        rows = [f"{number} {film},{label}" for number in range(8) for film, label in (("good", "yes"), ("bad", "no"))]
        (made / f"reviews{part}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        for label, colour in (("red", "darkred"), ("blue", "navy")):
            (made / f"photos{part}" / label).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40 + number, 40), colour).save(made / f"photos{part}" / label / f"{number}.png")
    return made


def train_and_export(folder):
    """Runs the page's commands that train modules, each tiny, and export their checkpoints."""
    for about in TRAINED:
        [arguments] = commands("headway-train", about)
        given = [word for setting in TINY[arguments[1]] for word in ("--set", setting)]
        result = CliRunner().invoke(training_app, [*arguments, *given, *BRIEF])
        assert result.exit_code == 0, result.output
        [arguments] = commands("headway-export", about)
        result = CliRunner().invoke(export_app, [*arguments, "--precision", "fp32"])
        assert result.exit_code == 0, result.output
    assert {file.name for file in (folder / "store").iterdir()} >= {"my-gpt", "my-reader", "my-pictures"}


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    exported = [
        arguments
        for about in ("mine.clip", "mine.captions", "mine.segmenter")
        for arguments in commands("headway-export", about)
    ]
    assert len(exported) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        torch.manual_seed(0)
        for arguments in exported:
            given = dict(zip(arguments[::2], arguments[1::2], strict=True))
            module, build = given["--model"].split(":")
            save_model(getattr(importlib.import_module(module), build)(), given["--weights"])
            result = CliRunner().invoke(export_app, arguments)
            assert result.exit_code == 0, result.output
        train_and_export(folder)
        yield from serve(folder / "store", "fp32", tmp_path_factory.mktemp("log") / "server.log")


@pytest.fixture
def call(address, folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(about: str, *more: str) -> list[list[str]]:
        """Runs the page's commands, and returns the lines of each."""
        printed = []
        for arguments in commands("headway", about):
            files = [sorted(map(str, Path().glob(part))) if "*" in part else [part] for part in arguments]
            given = [file for some in files for file in some]
            result = CliRunner().invoke(client_app, [*given, *more, "--server", address])
            assert result.exit_code == 0, result.output
            printed.append(result.output.splitlines())
        return printed

    return run


def test_a_clip_chooses_among_labels_and_ranks(call):
    chosen, ranked = call("mine.clip", "--json")
    labels = json.loads(chosen[0])["labels"]
    assert {label["label"] for label in labels} == {"dog", "horse"}
    assert sum(label["probability"] for label in labels) == pytest.approx(1, abs=1e-4)
    assert {json.loads(line)["input"] for line in ranked} == {"photo.jpg", COPY}


def test_a_captioner_writes_and_shows_what_it_looked_at(call, folder):
    [[caption]] = call("mine.captions")
    assert set(caption.split()) <= {f"w{number}" for number in range(77)}
    with Image.open(folder / "map.png") as drawn:
        assert drawn.width > 0


def test_a_segmenter_cuts_out_what_is_pointed_at(call, folder):
    [lines] = call("mine.segmenter")
    assert len(lines) == 1 + 3  # the masks of one point
    with Image.open(folder / "overlay.png") as drawn:
        assert drawn.size == PHOTO


def test_modules_that_a_recipe_trained_answer(call):
    [lines] = call("mine.gpt", "--json")
    assert json.loads(lines[-1])["model"]["name"] == "my-gpt"
    [[text]] = call("mine.reader", "--json")
    assert {label["label"] for label in json.loads(text)["labels"]} == {"yes", "no"}
    [[image]] = call("mine.pictures", "--json")
    assert {label["label"] for label in json.loads(image)["labels"]} == {"red", "blue"}
