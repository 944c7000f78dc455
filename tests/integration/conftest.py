"""Real servers in processes of their own, on the tiny bundles."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headway_client import Client
from headway_server.bundles import Manifest, read_manifest

COMPUTE_ALL = ("--max-image-outputs-mib", "0")
"""Flags of a server that computes an image each time it comes."""


@pytest.fixture(scope="session", autouse=True)
def _quick_exports(quick_exports: None) -> None:
    """For every test of the folder."""


def serve(store: Path, precision: str, log: Path, *flags: str) -> Iterator[str]:
    """Runs a server until the generator is closed; yields its address."""
    for line in serve_saying(store, log, "--precision", precision, *flags):
        yield line.split()[0]


def serve_saying(store: Path, log: Path, *flags: str) -> Iterator[str]:
    """Runs a server until the generator is closed; yields its address and what else it says when it is ready.

    `TESTED_SERVER` names another program that takes the flags and says the line: `tests/support/ray_server.py`.
    """
    program = os.environ.get("TESTED_SERVER", "-m headway_server").split()
    command = [sys.executable, *program, "--store", str(store), "--port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        line = process.stdout.readline()
        assert "ready on" in line, log.read_text()
        yield line.split("ready on ")[1]
    finally:
        process.terminate()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0, log.read_text()


@pytest.fixture(scope="session", params=["fp32", "int8"])
def server(request: pytest.FixtureRequest, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on the tiny bundles, once in each precision."""
    yield from serve(tiny_store, request.param, tmp_path_factory.mktemp("log") / "server.log")


@pytest.fixture(scope="session")
def fp32_server(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an fp32 server on the tiny bundles."""
    yield from serve(tiny_store, "fp32", tmp_path_factory.mktemp("log") / "server.log")


@pytest.fixture(scope="session")
def topic_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on classifiers known by hand: of several labels a text, of pairs, and of both."""
    from tiny_bundles import write_topic_bundle

    from headway_server.bundles import ClassificationScheme

    folder = tmp_path_factory.mktemp("topics")
    several = ClassificationScheme(kind="multi_label", temperature=2.0, thresholds=(0.6, 0.6, 0.6))
    write_topic_bundle(folder / "store", name="several", classification=several)
    write_topic_bundle(folder / "store", name="pairs", text_pairs="required", has_token_types=True)
    write_topic_bundle(
        folder / "store", name="both", classification=several, text_pairs="optional", has_token_types=True
    )
    yield from serve(folder / "store", "fp32", folder / "server.log")


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as connected:
        yield connected


@pytest.fixture
def fp32_client(fp32_server: str) -> Iterator[Client]:
    with Client(fp32_server) as connected:
        yield connected


@pytest.fixture(scope="session")
def chat_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on the tiny model that has a chat template, and on nothing else."""
    from tiny_chat_model import chat_checkpoint, write_chat_bundle

    folder = tmp_path_factory.mktemp("chat")
    write_chat_bundle(folder / "store", chat_checkpoint(folder / "checkpoint"))
    for address in serve(folder / "store", "fp32", folder / "server.log"):
        with Client(address) as connected:
            yield connected


@pytest.fixture(scope="session")
def voice_client(voice_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of an fp32 server on the tiny model that speaks, and on nothing else."""
    for address in serve(voice_store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


@pytest.fixture(scope="session", params=["fp32", "int8"])
def llama_server(
    request: pytest.FixtureRequest, llama_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Precision and address of a server on the tiny Llama, once in each precision."""
    for address in serve(llama_store, request.param, tmp_path_factory.mktemp("log") / "server.log"):
        yield request.param, address


@pytest.fixture(scope="session")
def shipped_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on the models of this repository, int8."""
    store = Path(__file__).parents[2] / "models"
    for address in serve(store, "int8", tmp_path_factory.mktemp("log") / "server.log", *COMPUTE_ALL):
        with Client(address) as connected:
            yield connected


@pytest.fixture(scope="session")
def shipped_alone_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on the same that runs each text and each image in a batch of its own."""
    store = Path(__file__).parents[2] / "models"
    flags = ("--max-batch-images", "1", "--max-batch-tokens", "1", *COMPUTE_ALL)
    for address in serve(store, "int8", tmp_path_factory.mktemp("log") / "server.log", *flags):
        with Client(address) as connected:
            yield connected


@dataclass(frozen=True, kw_only=True)
class Doors:
    """The ways into a server that has a model of every task."""

    address: str
    """Of gRPC."""
    http: str
    manifests: dict[str, Manifest]
    """Of the models that answer, by name."""
    folder: Path
    """With files to call it with: `picture.png`, `speech.wav`."""


@pytest.fixture(scope="session")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """A server with a model of every task, the shipped ones among them."""
    import every_task
    from PIL import Image
    from tiny_transcriber import tones, write_wav

    if not (every_task.MODELS / "shakespeare").is_dir():
        pytest.skip("needs the shipped models")
    folder = tmp_path_factory.mktemp("doors")
    every_task.write_every_task(folder / "store")
    Image.new("RGB", (32, 32), (200, 60, 60)).save(folder / "picture.png")
    Image.new("L", (32, 32), 255).save(folder / "mask.png")
    write_wav(folder / "speech.wav", tones("low high"))
    (folder / "page.json").write_text('{"words": ["Ada"], "boxes": [[0, 0, 9, 9]]}')
    found = {path.parent.parent.name: read_manifest(path.parent) for path in (folder / "store").glob("*/1/bundle.json")}
    flags = ("--http-port", "0", "--log-level", "warning")
    for line in serve_saying(folder / "store", folder / "server.log", *flags):
        address, http = line.split()[0], line.partition("http=")[2].split()[0]
        yield Doors(address=address, http=f"http://{http}", manifests=found, folder=folder)


@pytest.fixture(scope="session")
def towers(made_once: Callable[..., Path]) -> Path:
    """The checkpoint of a tiny model of two towers."""
    from tiny_towers import towers_checkpoint

    return made_once("towers", lambda folder: towers_checkpoint(folder / "checkpoint")) / "checkpoint"


@pytest.fixture(scope="session")
def towers_store(towers: Path, made_once: Callable[..., Path]) -> Path:
    """A store with its two bundles in fp32."""

    def write(folder: Path) -> None:
        from typer.testing import CliRunner

        from headway_export.cli import app

        command = [str(towers), "--store", str(folder), "--precision", "fp32"]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    return made_once("towers-store", write)


@pytest.fixture(scope="session")
def towers_client(towers_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a server on its two bundles, and on nothing else."""
    for address in serve(towers_store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected
