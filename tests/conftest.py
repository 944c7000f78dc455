"""Fixtures that every test may use: tiny trained models, as checkpoints and as bundles."""

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before any test imports ONNX Runtime

# An example that takes longer than Hypothesis likes, on a busy machine, is no failure.
hypothesis.settings.register_profile("headway", deadline=None)
hypothesis.settings.load_profile("headway")


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained checkpoint of each task, by task."""
    import tiny_models

    folder = tmp_path_factory.mktemp("checkpoints")
    return {task: write(folder / task) for task, write in tiny_models.WRITERS.items()}


@pytest.fixture(scope="session")
def tiny_store(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a bundle of each task, exported in fp32 and int8 with the graph of the attention weights."""
    from headway_export.exporter import ExportOptions, export
    from headway_export.source import from_checkpoint
    from headway_server.bundles import Precision

    store = tmp_path_factory.mktemp("store")
    options = ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8), attention=True)
    for checkpoint in tiny_checkpoints.values():
        export(from_checkpoint(checkpoint), options)
    return store


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained checkpoint of a tiny Llama."""
    import tiny_models

    return tiny_models.llama_checkpoint(tmp_path_factory.mktemp("checkpoints") / "llama")


@pytest.fixture(scope="session")
def llama_store(llama_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a bundle of that Llama, exported in fp32 and int8."""
    from headway_export.exporter import ExportOptions, export
    from headway_export.source import from_checkpoint
    from headway_server.bundles import Precision

    store = tmp_path_factory.mktemp("store")
    export(from_checkpoint(llama_checkpoint), ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8)))
    return store
