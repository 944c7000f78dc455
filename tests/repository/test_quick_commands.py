"""What the commands import before they know what they are asked for."""

import subprocess
import sys

import pytest

_SLOW = {
    "datasets",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "nltk",
    "sacrebleu",
    "scipy",
    "sklearn",
    "sympy",
    "torch",
    "transformers",
}
_PROGRAM = """
import importlib, sys
module, name = sys.argv.pop(1).split(":")
try:
    getattr(importlib.import_module(module), name)()
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "command",
    [
        "headway_client.cli:app",
        "headway_export.cli:app",
        "headway_export.signing:app",
        "headway_server.cli:main",
        "headway_training.cli:app",
    ],
)
def test_help_comes_without_the_libraries_that_take_seconds_to_import(command):
    run = [sys.executable, "-c", _PROGRAM, command, "--help"]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert "--help" in ended.stdout
    assert not _SLOW & set(ended.stderr.split())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_client_lists_its_commands_without_what_calls_need(flag):
    run = [sys.executable, "-c", _PROGRAM, "headway_client.cli:app", flag]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert "headway" in ended.stdout
    assert not {"asyncio", "google", "grpc", "headway", "headway_load", "numpy", "rich"} & set(ended.stderr.split())
