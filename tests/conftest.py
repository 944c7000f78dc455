"""Fixtures that every test may use: tiny trained models, as checkpoints and as bundles.

Two processes may share the tests of a run between them (`make test`): a file's tests stay together, and what several
files need and takes seconds to make is made by one process for both.
"""

import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before any test imports ONNX Runtime
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before any test imports gRPC
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as PyTorch: threads of tiny models mostly wait for each other

# Without bytecode each process of a test, and the second that collects the tests, compiles what it imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An example that takes longer than Hypothesis likes, on a busy machine, is no failure.
hypothesis.settings.register_profile("headway", deadline=None)
hypothesis.settings.load_profile("headway")


_FIRST = (
    "integration/test_equals_pytorch.py",  # one process makes the store of tiny bundles meanwhile,
    "integration/test_served_huggingface.py",  # and the other has what to do without it
    "integration",
    "export",
    "benchmarks",
    "repository",
    "demo",
    "training",
    "server/transports/http/test_page.py",
)
"""What two processes take up first: what takes longest, so that both end at the same time."""


def pytest_collection_finish() -> None:
    """Has the garbage collector pass over what was imported, and come less often: a tenth of a trace was its work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    name = item.path.relative_to(Path(__file__).parent).as_posix()
    return next((place for place, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))


MadeOnce = Callable[[str, Callable[[Path], Any]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Makes a folder once in a run, by whichever process needs it first: `made_once("store", write)` returns it.

    Nothing changes it afterwards.
    """

    def get(name: str, make: Callable[[Path], Any]) -> Path:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            folder = tmp_path_factory.mktemp(name)
            make(folder)
            return folder
        import fcntl

        folder = tmp_path_factory.getbasetemp().parent / name
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                unfinished = folder.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return get


@pytest.fixture(scope="session", autouse=True)
def _commands_built_once() -> Iterator[None]:
    """Has a process build the commands of a program once, and not for each call: nine tenths of a short call."""
    import typer.testing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def quick_exports() -> Iterator[None]:
    """Has a process trace equal modules once, and hold the tokenizer of a model folder to the original on fewer lines.

    `test_huggingface_translators.py` holds converted tokenizers to their originals on thousands.
    """
    import shared_traces

    from headway_export.huggingface.tokenizers import sample_lines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway_export.exporter.trace", shared_traces.trace)
        for module in ("towers", "translators"):
            patch.setattr(f"headway_export.huggingface.{module}.sample_lines", functools.partial(sample_lines, 500))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoints(made_once: MadeOnce) -> dict[str, Path]:
    """A trained checkpoint of each task, by task."""
    import tiny_models

    def write(folder: Path) -> None:
        for task, write_one in tiny_models.WRITERS.items():
            write_one(folder / task)

    folder = made_once("checkpoints", write)
    return {task: folder / task for task in tiny_models.WRITERS}


def _store(made_once: MadeOnce, name: str, *checkpoints: Path, attention: bool | None = None) -> Path:
    """A store with a bundle of each checkpoint, exported in fp32 and int8."""

    def write(folder: Path) -> None:
        from headway_export.exporter import ExportOptions, export
        from headway_export.source import from_checkpoint
        from headway_server.bundles import Precision

        options = ExportOptions(store=folder, precisions=(Precision.FP32, Precision.INT8), attention=attention)
        for checkpoint in checkpoints:
            export(from_checkpoint(checkpoint), options)

    return made_once(name, write)


@pytest.fixture(scope="session")
def tiny_store(tiny_checkpoints: dict[str, Path], made_once: MadeOnce) -> Path:
    """A store with a bundle of each task, exported in fp32 and int8 with the graph of the attention weights."""
    return _store(made_once, "store", *tiny_checkpoints.values(), attention=True)


@pytest.fixture(scope="session")
def voice_checkpoint(made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny model that speaks."""
    import tiny_voice

    return made_once("voice-checkpoint", tiny_voice.write_voice_checkpoint) / "speech" / "checkpoint"


@pytest.fixture(scope="session")
def voice_store(voice_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with that model in fp32 and int8."""
    return _store(made_once, "voice-store", voice_checkpoint)


@pytest.fixture(scope="session")
def diffusion_checkpoint(made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny model that draws squares."""
    import tiny_diffusion

    write = tiny_diffusion.write_diffusion_checkpoint
    return made_once("diffusion-checkpoint", lambda folder: write(folder / "own")) / "own"


@pytest.fixture(scope="session")
def text_diffusion_checkpoint(diffusion_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny model that draws squares as a text says."""
    import tiny_diffusion

    write = tiny_diffusion.write_text_diffusion_checkpoint
    return made_once("text-diffusion-checkpoint", lambda folder: write(folder / "own", diffusion_checkpoint)) / "own"


@pytest.fixture(scope="session")
def text_diffusion_store(text_diffusion_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with that model, exported in fp32 and int8."""
    return _store(made_once, "text-diffusion-store", text_diffusion_checkpoint)


@pytest.fixture(scope="session")
def diffusion_store(diffusion_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with that model, exported in fp32 and int8."""
    return _store(made_once, "diffusion-store", diffusion_checkpoint)


@pytest.fixture(scope="session")
def captioner_checkpoint(made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny model that names colours in two languages."""
    import tiny_captioner

    write = tiny_captioner.captioner_checkpoint
    return made_once("captioner-checkpoint", lambda folder: write(folder / "own")) / "own"


@pytest.fixture(scope="session")
def captioner_store(captioner_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with that model, exported in fp32 and int8."""
    return _store(made_once, "captioner-store", captioner_checkpoint)


@pytest.fixture(scope="session")
def llama_checkpoint(made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny Llama."""
    import tiny_models

    return made_once("llama-checkpoint", lambda folder: tiny_models.llama_checkpoint(folder / "llama")) / "llama"


@pytest.fixture(scope="session")
def llama_store(llama_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with a bundle of that Llama, exported in fp32 and int8."""
    return _store(made_once, "llama-store", llama_checkpoint)


@pytest.fixture(scope="session")
def transcriber_checkpoint(made_once: MadeOnce) -> Path:
    """A trained checkpoint of a tiny model that writes which tones it hears; `files` beside its run has recordings."""
    import tiny_transcriber

    write = tiny_transcriber.transcriber_checkpoint
    return made_once("transcriber-checkpoint", write) / "run" / "checkpoint"


@pytest.fixture(scope="session")
def transcriber_store(transcriber_checkpoint: Path, made_once: MadeOnce) -> Path:
    """A store with that model in fp32 and int8."""
    return _store(made_once, "transcriber-store", transcriber_checkpoint)


@pytest.fixture(scope="session")
def nllb(made_once: MadeOnce, quick_exports: None) -> Path:
    """A folder of a tiny NLLB of three languages as `transformers` saves it, `model`, and `store` with its bundle."""

    def write(folder: Path) -> None:
        from served_sequences import export
        from tiny_sequences import write_nllb

        export({"nllb": write_nllb(folder / "model")}, folder / "store")

    return made_once("nllb", write)
