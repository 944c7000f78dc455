"""Child processes: servers, and workers that answer a line of JSON with a line of JSON.

Everything that is measured runs in a process of its own. This module imports the standard library alone, since workers
also run in the environments of other libraries (environments.py).
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0


class ContestantError(Exception):
    """A contestant cannot be installed, started or measured; the message says why."""


def tree_environment(tree: Path) -> dict[str, str]:
    """Returns the variables with which Python imports headway from a checkout, without the user's own HEADWAY_*."""
    folders = [str(tree / name) for name in ("proto", "server", "client", "training", "export")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    path = os.pathsep.join([*folders, *filter(None, [inherited.get("PYTHONPATH")])])
    # The same few images are sent over and over, and what is measured is the model.
    return inherited | {"PYTHONPATH": path, "HEADWAY_MAX_IMAGE_OUTPUTS_MIB": "0"}


def foreign_environment(**variables: str) -> dict[str, str]:
    """Returns the variables for a Python that has its libraries in an environment of its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables


class Process:
    """A child process, with everything that it starts, in the repository's root.

    Its standard output is read by lines, or is part of its log, which is kept for the message of an error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, has_lines: bool = True) -> None:
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
        self.process_id = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process and what it started: at first politely, so that a server drains."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(_STOP_TIMEOUT_S)
        for pipe in filter(None, (self._process.stdin, self._process.stdout, self._log)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def wait_for(self, port: int) -> None:
        """Waits until it listens on a port; raises `ContestantError` if it does not."""
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with socket.socket() as caller:
                if caller.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise self.failure()
            time.sleep(0.1)

    def read_line(self, prefix: str = "", *, timeout_s: float | None = None) -> str:
        """Waits for a line that begins with `prefix`; a process that is late is killed.

        Raises:
            ContestantError: The process has ended.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, self._process.kill)
        timer.daemon = True
        timer.start()
        line = next((line for line in self._process.stdout if line.startswith(prefix)), None)
        timer.cancel()
        if line is None:
            self._process.wait()
            raise self.failure()
        return line.strip()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the answer of a process that answers a line of JSON with another.

        Raises:
            ContestantError: It failed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has ended shows in reading
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.read_line())
        if "error" in answer:
            raise ContestantError(str(answer["error"]))
        return answer

    def failure(self) -> ContestantError:
        """Says how the process ended, with the end of its log."""
        self._log.seek(0)
        tail = " | ".join(line.strip() for line in self._log.read().strip().splitlines()[-4:])
        code = self._process.poll()
        return ContestantError(f"{'is running' if code is None else f'ended with code {code}'}: {tail or 'no log'}")


class Worker(Process):
    """A module of this package in a process of its own, which calls `serve`."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str], python: str | Path = sys.executable
    ) -> None:
        """Starts `python -m benchmarks.<module>`."""
        super().__init__([str(python), "-m", f"benchmarks.{module}", *arguments], environment)
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Waits until it is ready.

        Raises:
            ContestantError: It did not start.
        """
        try:
            self.versions = json.loads(self.read_line(timeout_s=START_TIMEOUT_S))
        except ContestantError:
            self.__exit__()
            raise
        return self


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]], packages: Sequence[str]) -> None:
    """Answers requests until standard input ends: what the process of a `Worker` runs.

    The first line holds the versions of `packages`. What libraries print goes to standard error.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    output.write(json.dumps({name: importlib.metadata.version(name) for name in packages}) + "\n")
    output.flush()
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # the report says what a contestant cannot do
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        output.write(json.dumps(reply) + "\n")
        output.flush()
