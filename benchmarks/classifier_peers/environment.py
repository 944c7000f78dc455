"""The peers: their environments, made on demand, their servers and their callers, each in a process of its own.

What cannot be installed or run is told with its reason, never left out silently.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.environment import PeerError

HERE = Path(__file__).resolve().parent
_TAIL_LINES = 3
_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run a peer's server."""

    workers: int
    threads: int
    """Of each worker."""
    batch_size: int
    wait_ms: float
    """How long a batch waits to fill."""

    @property
    def name(self) -> str:
        """A description of it."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        parts = [f"{self.workers} worker{'s' if self.workers > 1 else ''} of {threads}"]
        parts += [f"batches of {self.batch_size}"] if self.batch_size > 1 else []
        parts += [f"wait {self.wait_ms:g} ms"] if self.wait_ms else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A serving framework."""

    name: str
    """Of its row."""
    kind: Literal["litserve", "bentoml", "triton"]

    def setups(self, threads: int) -> list[Setup]:
        """The ways that promise something: a call at a time on all threads, one a thread, and batches."""
        wait_ms = 2 if self.kind == "litserve" else 0  # the others batch what came while their workers were busy
        found = [
            Setup(workers=threads, threads=1, batch_size=1, wait_ms=0),
            Setup(workers=1, threads=threads, batch_size=8, wait_ms=wait_ms),
            Setup(workers=1, threads=threads, batch_size=32, wait_ms=2 * wait_ms),
        ]
        if threads > 1:
            found.insert(0, Setup(workers=1, threads=threads, batch_size=1, wait_ms=0))
            found.append(Setup(workers=threads, threads=1, batch_size=8, wait_ms=wait_ms))
        return found


PEERS = (
    Peer(name="LitServe", kind="litserve"),
    Peer(name="BentoML", kind="bentoml"),
    Peer(name="Triton (pytriton)", kind="triton"),
)


def ensure_environment(kind: str, scratch: Path) -> Path:
    """Returns the Python of a peer's environment, made in `scratch` where it is missing.

    Raises:
        PeerError: It cannot be made.
    """
    requirements = HERE / f"requirements-{kind}.txt"
    base = _base_python(kind)
    key = hashlib.sha256(requirements.read_bytes() + base.encode() + sys.version.encode()).hexdigest()[:12]
    folder = scratch / f"peer-{kind}-{key}"
    python, is_whole = folder / "bin" / "python", folder / "installed"
    if is_whole.is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    for command in (
        [base, "-m", "venv", str(folder)],
        [str(python), *pip, "--requirement", str(requirements)],
    ):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise PeerError(f"not installed: {_tail(ended.stderr)}")
    is_whole.touch()
    return python


def _base_python(kind: str) -> str:
    """Returns the Python that an environment is made of: this one, and for Triton the system's where there is one.

    Triton's wheel carries an interpreter of its own that reads the environment's standard library. With that of CPython
    3.11.7 it fails ("'_thread.RLock' object has no attribute '_recursion_count'"), with that of 3.11.2 it starts.
    """
    system = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path=os.defpath)
    return system if kind == "triton" and system is not None else sys.executable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPeer:
    """A peer's server."""

    peer: Peer
    python: Path
    port: int

    def measure(self, inputs: Sequence[str | bytes], callers: int, seconds: float, min_answers: int) -> dict[str, Any]:
        """Calls it from another process.

        Raises:
            PeerError: It does not answer.
        """
        texts = [value if isinstance(value, str) else base64.b64encode(value).decode() for value in inputs]
        arguments = [str(callers), str(seconds), str(min_answers)]
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write(json.dumps(texts if self.peer.kind == "triton" else [self._body(text) for text in texts]))
            file.flush()
            if self.peer.kind == "triton":
                command = ["call_triton.py", f"127.0.0.1:{self.port}", file.name, *arguments]
                command += ["IMAGES"] if isinstance(inputs[0], bytes) else []
            else:
                path = "predict" if self.peer.kind == "litserve" else "classify"
                command = ["call_http.py", f"http://127.0.0.1:{self.port}/{path}", file.name, *arguments]
            figures: dict[str, Any] = run_script(self.python, command)
            return figures

    def _body(self, text: str) -> dict[str, Any]:
        return {"input": text} if self.peer.kind == "litserve" else {"inputs": [text]}


def run_script(python: Path, command: Sequence[str]) -> Any:
    """Runs a script of this folder to its end and reads its last line as JSON.

    Raises:
        PeerError: It failed.
    """
    ended = subprocess.run([str(python), *command], capture_output=True, text=True, check=False, cwd=HERE)
    if ended.returncode:
        raise PeerError(f"{command[0]} ended with code {ended.returncode}: {_tail(ended.stderr)}")
    return json.loads(ended.stdout.splitlines()[-1])


@contextmanager
def running_peer(peer: Peer, setup: Setup, *, python: Path, bundle: Path, precision: str) -> Iterator[RunningPeer]:
    """Runs a peer's server, with all its processes, and stops it in any case; callers wait until it answers."""
    port = _free_port()
    sizes = [str(setup.workers), str(setup.threads), str(setup.batch_size), str(setup.wait_ms)]
    environment = dict(os.environ)
    # Threads are those of the setup; BentoML is asked for no telemetry, and none of them may reach the network.
    environment |= {"BENTOML_DO_NOT_TRACK": "true", "OMP_NUM_THREADS": str(setup.threads)}
    if peer.kind == "bentoml":
        environment["BENCHMARK_ARGUMENTS"] = json.dumps([str(bundle), precision, *sizes])
        address = ["--host", "127.0.0.1", "--port", str(port)]
        command = [str(python), "-m", "bentoml", "serve", "serve_bentoml:Classify", *address]
    else:
        command = [str(python), f"serve_{peer.kind}.py", str(bundle), precision, str(port), *sizes]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=HERE, start_new_session=True
        )  # so that it can be ended with the processes it starts
        try:
            _wait_until_listening(process, port)
            yield RunningPeer(peer=peer, python=python, port=port)
        except PeerError as error:
            log.seek(0)
            raise PeerError(f"{error}; its server says: {_tail(log.read())}") from None
        finally:
            _stop(process)


def _wait_until_listening(process: subprocess.Popen[Any], port: int) -> None:
    begun_s = time.monotonic()
    while process.poll() is None and time.monotonic() - begun_s < _START_TIMEOUT_S:
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    ending = "does not listen" if process.poll() is None else f"ended with code {process.returncode}"
    raise PeerError(f"it {ending} after {time.monotonic() - begun_s:.0f} s")


def _stop(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass  # it has ended, or is ended next
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that outlive their parent
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _tail(text: str) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-_TAIL_LINES:]) or "it says nothing"
