"""Runs a program of `benchmarks/` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_benchmark(*arguments: str, module: str = "benchmarks") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, env=environment, cwd=ROOT)
