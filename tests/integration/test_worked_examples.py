"""The whole modules of docs/bring-your-own.md: exported by the page's commands, served, and called by them."""

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

from .conftest import serve

PAGE = (Path(__file__).parents[2] / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
SPECIAL = ("<pad>", "<bos>", "<eos>")
PHOTO, COPY = (320, 240), "photo-2.jpg"


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
    return made


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
