"""The environment of the peers, and their processes.

An environment is made on demand from `requirements-peers.txt`, once for each content of that file. What cannot be
installed or run is told with its reason, never left out silently.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parent / "requirements-peers.txt"
"""With this project's own versions of what both need."""
OPTIMUM_REQUIREMENTS = HERE.parent / "requirements-optimum.txt"
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
_TAIL_LINES = 3


class PeerError(Exception):
    """A peer cannot be installed, or cannot do what it was asked for; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library in one precision."""

    name: str
    """Of its row."""
    script: str
    """In this folder."""
    precision: str
    """Class it is compared in: fp32, bf16 or int8."""
    arguments: tuple[str, ...] = ()
    """Of the script, after folders and threads."""
    requirements: Path = REQUIREMENTS
    """Of the environment it runs in."""


PEERS = (
    Peer(name="CTranslate2 int8", script="run_ctranslate2.py", precision="int8"),
    Peer(name="onnxruntime-genai int8", script="run_genai.py", precision="int8", arguments=("int8",)),
    Peer(name="onnxruntime-genai fp32", script="run_genai.py", precision="fp32", arguments=("fp32",)),
    Peer(name="transformers bf16", script="run_transformers.py", precision="bf16", arguments=("bf16",)),
    Peer(name="transformers fp32", script="run_transformers.py", precision="fp32", arguments=("fp32",)),
)

TRANSLATORS = (
    Peer(name="CTranslate2 int8", script="run_ctranslate2_translation.py", precision="int8"),
    Peer(
        name="Optimum-ONNX fp32",
        script="run_optimum_translation.py",
        precision="fp32",
        requirements=OPTIMUM_REQUIREMENTS,
    ),
    Peer(name="transformers bf16", script="run_transformers_translation.py", precision="bf16", arguments=("bf16",)),
    Peer(name="transformers fp32", script="run_transformers_translation.py", precision="fp32", arguments=("fp32",)),
)


def ensure_environment(scratch: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Returns the Python of an environment of peers, made in `scratch` where it is missing.

    Raises:
        PeerError: It cannot be made.
    """
    constraints = ["--constraint", str(CONSTRAINTS)] if requirements == REQUIREMENTS else []
    pins = CONSTRAINTS.read_bytes() if constraints else b""
    inputs = requirements.read_bytes() + pins + sys.version.encode()
    key = hashlib.sha256(inputs).hexdigest()[:12]
    folder = scratch / f"peers-{key}"
    python = folder / "bin" / "python"
    is_whole = folder / "installed"
    if is_whole.is_file():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), *pip, "--requirement", str(requirements), *constraints],
    ):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise PeerError(f"not installed: {_tail(ended.stderr)}")
    is_whole.touch()
    return python


class PeerProcess:
    """A library that has loaded the model and waits for batches."""

    def __init__(self, peer: Peer, *, python: Path, model: Path, bundle: Path, scratch: Path, threads: int) -> None:
        """Starts it and waits until the model is loaded.

        Args:
            peer: What to run.
            python: Of the peers' environment.
            model: Folder of the weights and the tokenizer.
            bundle: Folder of the bundle, for peers that run its graph.
            scratch: Folder for converted models, which are kept.
            threads: Threads to compute with.

        Raises:
            PeerError: It does not start.
        """
        self.peer = peer
        scratch.mkdir(parents=True, exist_ok=True)
        folders = [str(model), str(bundle), str(scratch)]
        command = [str(python), str(HERE / peer.script), *folders, str(threads), *peer.arguments]
        self._log: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (kept open)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.versions: dict[str, str] = self._read()["versions"]
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(
        self,
        key: str,
        batches: Sequence[Sequence[Sequence[int]]],
        new_tokens: int,
        seconds: float,
        **more: Any,
    ) -> Any:
        """Generates for batch after batch; a key's first measurement also finds the best way to run such batches.

        `more` is what else worker.py describes of a request.

        Returns:
            `tokens_per_s`, `settings` and the `answers` to the first batch.

        Raises:
            PeerError: It failed.
        """
        assert self._process.stdin is not None
        request = {"key": key, "batches": batches, "new_tokens": new_tokens, "seconds": seconds, **more}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading says why
        return self._read()

    def close(self) -> None:
        """Ends it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise PeerError(f"ended with code {self._process.returncode}: {_tail(self._log.read())}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer


def _tail(text: str) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-_TAIL_LINES:]) or "it says nothing"
