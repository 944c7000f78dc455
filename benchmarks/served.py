"""The real `headway-server`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
_READY = "headway-server ready on "


class ServerFailedError(Exception):
    """The server ended, or was not ready in time; the message holds what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers."""

    address: str
    ready_line: str
    start_s: float
    """From the start of the process to its ready line."""
    process_id: int


@contextmanager
def running_server(store: Path, flags: Sequence[str]) -> Iterator[RunningServer]:
    """Runs a server on a free port of this machine and stops it in any case.

    Raises:
        ServerFailedError: It did not start.
    """
    # Settings of the user's own servers must not change what is measured.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, "-m", "headway_server", "--store", str(store), "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        begun_s = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--log-level", "warning", *flags],
            stdout=subprocess.PIPE, stderr=log, env=environment, text=True,
        )  # fmt: skip
        try:
            line = _ready_line(process)
            start_s = time.perf_counter() - begun_s
            if not line:
                _stop(process)
                log.seek(0)
                raise ServerFailedError(f"the server did not start (exit code {process.returncode}):\n{log.read()}")
            yield RunningServer(
                address=line.removeprefix(_READY).split()[0],
                ready_line=line,
                start_s=start_s,
                process_id=process.pid,
            )
        finally:
            _stop(process)


def _ready_line(process: subprocess.Popen[str]) -> str:
    """Waits for the line that announces the address; empty if the server ended or was killed for being late.

    Libraries that the server loads may write lines before it.
    """
    assert process.stdout is not None
    too_late = threading.Timer(START_TIMEOUT_S, process.kill)
    too_late.start()
    try:
        return next((line.strip() for line in process.stdout if line.startswith(_READY)), "")
    finally:
        too_late.cancel()


def _stop(process: subprocess.Popen[str]) -> None:
    """Lets the server drain, and ends it if it does not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
