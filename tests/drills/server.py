"""A server in a process of its own, and what the drills watch of it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
_READY_S = 60.0


class DrillError(Exception):
    """What must hold did not."""


class Server:
    """A server on loopback that a drill starts, kills and starts again at the same port."""

    def __init__(self, *arguments: str, store: Path | None = None, environment: dict[str, str] | None = None) -> None:
        """Takes the flags of the server; `start` starts it, on the shipped models unless there is a `store`."""
        self._arguments = arguments
        self._store = store or ROOT / "models"
        self._environment = environment or {}
        self.port = 0
        self.log = Path(tempfile.mkstemp(prefix="headway-drill-", suffix=".log")[1])
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    def start(self, stderr: IO[bytes] | None = None) -> float:
        """Starts it and waits until it serves; returns how many seconds that took."""
        began = time.monotonic()
        command = [sys.executable, "-m", "headway_server", "--store", str(self._store), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._arguments],
                stdout=subprocess.PIPE,
                stderr=stderr or log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **self._environment},
            )
        assert self.process.stdout is not None, "it is a pipe"
        line = self.process.stdout.readline()
        if "ready" not in line:
            raise DrillError(f"the server did not start: {self.log.read_text()[-2000:]}")
        self.port = int(line.split()[3].rpartition(":")[2])
        return time.monotonic() - began

    def kill(self) -> None:
        """Kills it as the kernel does where memory runs out."""
        assert self.process is not None, "it was started"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> tuple[int, float]:
        """Sends SIGTERM and waits; returns the exit code and how many seconds it took."""
        assert self.process is not None, "it was started"
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s), time.monotonic() - began

    @property
    def rss_mib(self) -> float:
        """Memory that it has, in MiB."""
        assert self.process is not None, "it was started"
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used."""
        assert self.process is not None, "it was started"
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def num_descriptors(self) -> int:
        """Files and sockets that it has open."""
        assert self.process is not None, "it was started"
        return int(psutil.Process(self.process.pid).num_fds())


@contextmanager
def running(*arguments: str, store: Path | None = None, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Runs a server for as long as the block does."""
    server = Server(*arguments, store=store, environment=environment)
    server.start()
    try:
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
        server.log.unlink(missing_ok=True)


def check(holds: bool, what: str) -> None:
    """Fails the drill where `what` does not hold.

    Raises:
        DrillError: It does not.
    """
    if not holds:
        raise DrillError(what)
