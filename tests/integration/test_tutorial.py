"""The commands and programs of docs/tutorial.md and the asyncio example of docs/clients.md run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway_client import Client
from headway_client.cli import app as client_app
from headway_export.cli import app as export_app
from headway_training.cli import app as training_app

from .conftest import serve

DOCS = Path(__file__).parents[2] / "docs"
ADDRESS = "127.0.0.1:50051"
APPS = {"headway-train": training_app, "headway-export": export_app, "headway": client_app}
BRIEF = {
    "run": ("--set", "tracker=none", "--set", "optimization.evaluations=1", "--max-steps", "2"),
    "load": ("--duration", "1", "--warmup", "0", "--slo", "p99<60s", "--max-probes", "1"),
}
"""What makes a command take a moment. Of flags that are given twice the last counts, and objectives add up."""


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == kind]


def commands(*programs: str) -> list[list[str]]:
    """The tutorial's commands of these programs, but for those of the published weights, which are not here."""
    lines = "\n".join(blocks("tutorial.md", "")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ ")]
    return [words for words in found if words[0] in programs and not any("minilm" in word for word in words)]


def run(words: list[str], *more: str) -> str:
    program, *arguments = words
    result = CliRunner().invoke(APPS[program], [*arguments, *more])
    assert result.exit_code == 0, (words, result.output)
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tutorial has been followed up to its server."""
    made = tmp_path_factory.mktemp("tutorial")
    for block in blocks("tutorial.md", "python"):
        if found := re.match(r"# (\w+\.py)\n", block):
            (made / found[1]).write_text(block, encoding="utf-8")
    subprocess.run([sys.executable, "make_messages.py"], cwd=made, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        for words in commands("headway-train", "headway-export"):
            if words[1] != "evaluate":
                run(words, *BRIEF.get(words[1], ("--precision", "fp32")))
    return made


@pytest.fixture
def address(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    yield from serve(folder / "store", "fp32", tmp_path / "server.log")


def test_the_tutorial_can_be_followed(address):
    called = commands("headway")
    assert len(called) > 3
    for words in called:
        run(words, *BRIEF.get(words[1], ()), "--server", address)
    environment = os.environ | {"HEADWAY_SERVER": address}
    assert subprocess.run([sys.executable, "call.py"], env=environment, stdout=subprocess.PIPE, check=True).stdout
    [evaluated] = [words for words in commands("headway-train") if words[1] == "evaluate"]
    assert "accuracy" in run([word.replace(ADDRESS, address) for word in evaluated])


def test_the_example_with_asyncio_runs(shipped_client: Client, tmp_path):
    [example] = [block for block in blocks("clients.md", "python") if "AsyncClient" in block]
    file = tmp_path / "example.py"
    file.write_text(example.replace(ADDRESS, shipped_client.server), encoding="utf-8")
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert "Ein Mann" in ran.stdout
    assert len(ran.stdout.splitlines()) > 3
