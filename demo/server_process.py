"""A real `headway-server` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
_READY = "headway-server ready on "


class ServerFailedError(Exception):
    """The server ended or was not ready in time. The message has what it logged."""


@contextmanager
def running_server(store: Path) -> Iterator[tuple[str, str]]:
    """Runs a server on the bundles of `store`; yields its address and its ready line, and stops it at the end.

    Raises:
        ServerFailedError: The server did not start.
    """
    # Settings of other servers in the environment must not change this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, "-m", "headway_server", "--store", str(store), "--host", "127.0.0.1", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        command += ["--routes-file", str(Path(folder) / "routes.json")]  # the store keeps its own
        process = subprocess.Popen(  # noqa: S603 (our own program; the store is one argument)
            command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
        )
        try:
            line = _ready_line(process)
            if line is None:
                _stop(process)
                log.seek(0)
                raise ServerFailedError(f"the server did not start (exit code {process.returncode}):\n{log.read()}")
            yield line.removeprefix(_READY).split()[0], line
        finally:
            _stop(process)


def _ready_line(process: subprocess.Popen[str]) -> str | None:
    """Waits for the line with the address; returns None if it did not come.

    The rest of the output is read and dropped, because a full pipe would block the server.
    """
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                if line.startswith(_READY):
                    lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, name="server-output", daemon=True).start()
    try:
        return lines.get(timeout=START_TIMEOUT_S)
    except Empty:
        return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Asks the server to drain, and kills it if it does not end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
