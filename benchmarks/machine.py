"""What a benchmark ran on: hardware, versions, commit and command; and checkouts of other commits."""

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.worker import ROOT, ContestantError
from headway_server.runtime import has_exact_int8, usable_cores


def describe_run() -> dict[str, Any]:
    """Returns the part of the JSON object that says what ran, when and on what."""
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    libraries = ("onnxruntime", "onnxruntime-gpu", "grpcio", "numpy")
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    main = sys.modules["__main__"].__spec__
    module = main.name.removesuffix(".__main__") if main else "benchmarks"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", module, *sys.argv[1:]]),
        "git_commit": git_commit(ROOT),
        "hardware": {
            "processor": next(names, "") or platform.processor() or platform.machine(),
            "usable_cores": usable_cores(),
            "has_exact_int8": has_exact_int8(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "gpus": gpus.splitlines() if gpus else [],
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()}
        | {name: installed[name] for name in libraries if name in installed},
    }


def git_commit(tree: Path) -> str | None:
    """Returns a checkout's commit, with `+` if tracked files differ from it; None if it is no checkout."""
    commit = _output("git", "-C", str(tree), "rev-parse", "HEAD")
    return commit and commit + "+" * bool(_output("git", "-C", str(tree), "status", "--porcelain", "-uno"))


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Gives a temporary folder with the files of a commit of this repository.

    Raises:
        ContestantError: There is no such commit.
    """
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        command = [*worktree, "add", "--detach", str(tree), commit]
        added = subprocess.run(command, capture_output=True, text=True, check=False)
        if added.returncode:
            raise ContestantError(f"no files of commit {commit}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*worktree, "remove", "--force", str(tree)], capture_output=True, check=False)


def _output(*command: str) -> str | None:
    """Returns the standard output of a command; None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None
