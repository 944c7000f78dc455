"""What needs an NVIDIA GPU. Without one these tests are skipped and say why.

`HEADWAY_GPU_TESTS_DEVICE=cpu` runs those that can on the CPU, to try the tests themselves (benchmarks/gpu.sh does).
"""

import os
from pathlib import Path

import pytest

from headway_server.errors import RuntimeUnavailableError
from headway_server.runtime import Runtime


@pytest.fixture(scope="session")
def cuda() -> None:
    """Skips where CUDA cannot be used."""
    try:
        Runtime(device="cuda")
    except RuntimeUnavailableError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where to serve."""
    if os.environ.get("HEADWAY_GPU_TESTS_DEVICE") == "cpu":
        return "cpu"
    request.getfixturevalue("cuda")
    return "cuda"


@pytest.fixture(scope="session")
def fp16_store(device: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny bundles of both decoding tasks, in fp32 and in fp16."""
    from headway_export.exporter import ExportOptions, export
    from headway_export.source import from_checkpoint
    from headway_server.bundles import Precision

    checkpoints = request.getfixturevalue("tiny_checkpoints")  # not before it is known that they are needed
    store = tmp_path_factory.mktemp("fp16") / "store"
    for task in ("generation", "translation"):
        export(
            from_checkpoint(checkpoints[task]),
            ExportOptions(store=store, precisions=(Precision.FP32, Precision.FP16)),
        )
    return store
