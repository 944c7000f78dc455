"""The Python environments of other libraries: made on demand, kept below `runs/benchmarks` and used again."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.worker import ROOT, ContestantError

SCRATCH = ROOT / "runs" / "benchmarks"
"""Holds environments, random models and what is converted from them."""
_OWN = ("onnxruntime", "pillow", "tokenizers")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "libraries": (*_OWN, "ctranslate2==4.8.5", "grpcio", "onnx", "onnx-ir", "onnxruntime-genai==0.18.0", "safetensors",
                  "sentence-transformers==6.2.0", "sentencepiece", "torch", "transformers==5.23.0"),
    "faster_whisper": ("ctranslate2==4.8.5", "faster-whisper==1.2.1", "numpy", "onnxruntime", "tokenizers", "torch",
                       "transformers==5.23.0"),
    # Built from its source here, for this processor and by clang if there is one.
    "llama": ("gguf==0.19.0", "llama-cpp-python==0.3.36", "numpy", "safetensors"),
    # Optimum needs an older transformers.
    "optimum": ("onnx", "onnxruntime", "onnxscript", "optimum==2.1.0", "optimum-onnx==0.1.0", "pillow", "safetensors",
                "tokenizers==0.22.2", "torch", "transformers==4.57.6"),
    # 0.43 will have no pipeline for ONNX Runtime.
    "litserve": (*_OWN, "litserve==0.2.19"),
    "bentoml": (*_OWN, "bentoml==1.4.39"),  # 1.4.40 asks for a certifi that the package index does not have
    "triton": (*_OWN, "nvidia-pytriton==0.7.0"),
    "piper": ("onnx", "onnxruntime", "piper-tts==1.8.0", "torch"),
    "openvino": ("nncf==3.4.0", "openvino==2026.4.1", "pillow", "tokenizers"),
    # It asks for a BetterTransformer that later versions of both do not have.
    "infinity": ("click==8.1.8", "infinity-emb[server,torch]==0.0.77", "optimum==1.24.0", "torch",
                 "transformers==4.48.3"),
}  # fmt: skip
"""By environment. A name without a version gets the one that constraints.txt pins, so that it is headway's."""


def python_of(name: str) -> Path:
    """Returns the Python of an environment, which is made if it is missing.

    Raises:
        ContestantError: It cannot be made; the message holds the end of pip's.
    """
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    wanted = [f"{one}=={pins[one]}" if one in pins else one for one in REQUIREMENTS[name]]
    base = sys.executable
    if name == "triton":
        # Its wheel carries an interpreter that reads the environment's standard library. With that of CPython 3.11.7 it
        # fails ("'_thread.RLock' object has no attribute '_recursion_count'"), with that of Debian's 3.11.2 it starts.
        base = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path=os.defpath) or base
    variables = dict(os.environ)
    if name == "llama" and (compiler := shutil.which("clang") or shutil.which("clang-16")):
        # GCC 12 takes `ldtilecfg` for a reader of 8 bytes and leaves the rest of the 64 unwritten, so that the first
        # product on AMX ends the process.
        variables |= {"CC": compiler, "CXX": compiler.replace("clang", "clang++")}
    key = hashlib.sha256("\n".join([*wanted, base, sys.version]).encode()).hexdigest()[:12]
    folder = SCRATCH / "environments" / f"{name}-{key}"
    python, is_whole = folder / "bin" / "python", folder / "installed"
    if not is_whole.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        for command in ([base, "-m", "venv", str(folder)], [*pip, *wanted]):
            ended = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
            if ended.returncode:
                raise ContestantError(f"cannot be installed: {' | '.join(ended.stderr.strip().splitlines()[-3:])}")
        is_whole.touch()
    return python
