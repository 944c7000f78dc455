"""Child processes: servers, and workers that answer a line of JSON with a line of JSON.

Everything that is measured runs in a process of its own. This module imports the standard library alone, because workers
also run in the environments of other libraries (environments.py).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_TAIL_LINES = 4
_DISTRIBUTIONS = ("proto", "server", "client", "training", "export")


class ContestantError(Exception):
    """A contestant cannot be installed, started or measured; the message says why."""


def tree_environment(tree: Path) -> dict[str, str]:
    """Returns the variables with which Python imports headway from a checkout.

    Settings of the user's own servers (`HEADWAY_*`) are left out: they must not change what is measured.
    """
    folders = [str(tree / name) for name in _DISTRIBUTIONS]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return inherited | {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [inherited.get("PYTHONPATH")])])}


def foreign_environment(**variables: str) -> dict[str, str]:
    """Returns the variables for a Python that has its libraries in an environment of its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


class Process:
    """A child process with everything that it starts. What it logs is kept for the message of an error."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], has_lines: bool = True) -> None:
        """Starts it in the repository's root.

        Args:
            command: Program and arguments.
            environment: All of its variables.
            has_lines: True if its standard output is read by `read_line`; False if it is part of the log.
        """
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if has_lines else self._log,
            stderr=self._log,
            cwd=ROOT,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def read_line(self, prefix: str = "", *, timeout_s: float | None = None) -> str:
        """Waits for a line of standard output that begins with `prefix`.

        Raises:
            ContestantError: The process ended, or was killed because the time was over.
        """
        assert self._process.stdout is not None, "has_lines was given"
        timer = threading.Timer(timeout_s, self._process.kill) if timeout_s else None
        if timer:
            timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(prefix):
                    return line.strip()
        finally:
            if timer:
                timer.cancel()
        self._process.wait()
        raise self.failure()

    def write_line(self, line: str) -> None:
        """Writes a line to standard input; of a process that has ended, reading tells."""
        assert self._process.stdin is not None, "it is always opened"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def failure(self) -> ContestantError:
        """Describes how the process ended, with the last lines of its log."""
        self._log.seek(0)
        tail = " | ".join(line.strip() for line in self._log.read().strip().splitlines()[-_TAIL_LINES:])
        code = self._process.poll()
        return ContestantError(
            f"{'does not answer' if code is None else f'ended with code {code}'}: {tail or 'no log'}"
        )

    def close(self) -> None:
        """Ends the process and what it started: at first politely, so that a server drains."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Worker(Process):
    """A module of this package in a process of its own, which calls `serve`."""

    def __init__(
        self, module: str, *arguments: str, python: str | Path = sys.executable, environment: Mapping[str, str]
    ) -> None:
        """Starts `python -m benchmarks.<module>` and waits until it is ready.

        Raises:
            ContestantError: It did not start.
        """
        super().__init__([str(python), "-m", f"benchmarks.{module}", *arguments], environment=environment)
        try:
            self.versions: dict[str, str] = json.loads(self.read_line(timeout_s=START_TIMEOUT_S))
        except ContestantError:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the worker's answer.

        Raises:
            ContestantError: It failed.
        """
        self.write_line(json.dumps(request))
        answer: dict[str, Any] = json.loads(self.read_line())
        if "error" in answer:
            raise ContestantError(str(answer["error"]))
        return answer


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]], packages: Sequence[str]) -> None:
    """Answers requests until standard input ends: what the process of a `Worker` runs.

    The first line holds the versions of `packages`. What libraries print goes to standard error.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({name: importlib.metadata.version(name) for name in packages}), file=output, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # the report says what a contestant cannot do
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(reply), file=output, flush=True)
