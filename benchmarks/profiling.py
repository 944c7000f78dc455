"""Where a server's time goes, thread by thread: py-spy's samples, put into a few kinds of work."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.environment import PeerError

_RATE_HZ = 100
_START_S = 1.0
"""py-spy reads the process's symbols before its first sample."""
_KINDS = (
    ("run_bound (headway_server", "the model (ONNX Runtime)"),
    ("headway_server/engine/runner", "binding inputs"),
    ("headway_server/engine/speculation", "guessing ahead"),
    ("headway_server/engine/sampl", "choosing tokens"),
    ("headway_server/engine/candidates", "choosing tokens"),
    ("headway_server/engine/text", "text of tokens"),
    ("headway_server/engine/detokenizer", "text of tokens"),
    ("headway_server/engine/outbox", "handing out"),
    ("headway_server/engine/prefix_cache", "keeping prompts"),
    ("headway_server/runtime/memory", "moving slots"),
    ("headway_server/engine/stepper", "the step around these"),
    ("headway_server/engine/scheduler", "the step around these"),
    ("headway_server/engine/engine", "the step around these"),
    ("headway_server/services", "services"),
    ("headway_server/preprocessing", "tokenizing"),
    ("headway_server", "other parts of headway"),
    ("grpc/", "gRPC"),
    ("cython", "gRPC"),
    ("asyncio/", "the event loop itself"),
)
"""What a function of a file belongs to; the first that matches, from the innermost frame outwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Samples of the threads that were running Python or what it called, and processor time of all threads."""

    seconds: float
    shares: list[tuple[str, str, float]]
    """Thread, kind of work, part of the time."""
    thread_cores: list[float]
    """Processor seconds a second of every thread of the process, those of libraries included; the main one first."""
    figures: dict[str, Any]
    """Of the load meanwhile."""

    def lines(self) -> Iterator[str]:
        """The table."""
        yield ""
        yield f"{self.seconds:.0f} s at {self.figures['tokens_per_s']:.0f} tokens/s; parts of the time a thread ran:"
        for thread, kind, share in self.shares:
            yield f"  {thread:<28} {kind:<28} {100 * share:6.1f} %"
        cores = ", ".join(f"{value:.2f}" for value in self.thread_cores)
        yield f"processor seconds a second, by thread (the main one, then the busiest): {cores}"

    def as_record(self) -> dict[str, Any]:
        """For the JSON object."""
        return {
            "seconds": round(self.seconds, 1),
            "shares": [{"thread": t, "kind": k, "share": round(s, 4)} for t, k, s in self.shares],
            "thread_cores": self.thread_cores,
            "load": {name: round(value, 3) for name, value in self.figures.items()},
        }


def profile_server(python: Path, process_id: int, run_load: Callable[[], dict[str, Any]]) -> Profile:
    """Samples a process while `run_load` runs.

    Args:
        python: Of the environment that holds py-spy.
        process_id: The server.
        run_load: Returns the load's figures.

    Raises:
        PeerError: py-spy may not look into the process.
    """
    with tempfile.TemporaryDirectory() as folder:
        stacks = Path(folder) / "stacks"
        options = ["--format", "raw", "--threads", "--rate", str(_RATE_HZ), "--duration", "unlimited"]
        command = [str(python.parent / "py-spy"), "record", "--pid", str(process_id), *options, "--output", str(stacks)]
        sampler = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(_START_S)
        before = _thread_seconds(process_id)
        begun_s = time.perf_counter()
        figures = run_load()
        seconds = time.perf_counter() - begun_s
        after = _thread_seconds(process_id)
        sampler.send_signal(signal.SIGINT)
        _, errors = sampler.communicate()
        if not stacks.is_file():
            raise PeerError(f"py-spy cannot look into the server: {errors.strip()}")
        shares = _shares(stacks.read_text(encoding="utf-8"), seconds)
    used = {thread: (after[thread] - before.get(thread, 0.0)) / seconds for thread in after}
    main = used.pop(process_id, 0.0)
    busiest = sorted((value for value in used.values() if value > 0.005), reverse=True)
    return Profile(
        seconds=seconds,
        shares=shares,
        thread_cores=[round(value, 3) for value in (main, *busiest)],
        figures=figures,
    )


def _shares(folded: str, seconds: float) -> list[tuple[str, str, float]]:
    """Reads py-spy's folded stacks: `thread;outermost;...;innermost samples`."""
    samples: Counter[tuple[str, str]] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        samples[re.sub(r"thread \(0x[0-9a-fA-F]+\)(: )?", "", thread) or "thread", _kind(frames)] += int(count)
    found = [(thread, kind, count / _RATE_HZ / seconds) for (thread, kind), count in samples.items()]
    return sorted(found, key=lambda row: (row[0], -row[2]))


def _kind(frames: list[str]) -> str:
    for frame in reversed(frames):
        for part, kind in _KINDS:
            if part in frame:
                return kind
    return "other"


def _thread_seconds(process_id: int) -> dict[int, float]:
    """Processor seconds of every thread so far."""
    ticks_per_s = 100  # what Linux tells user programs, whatever it counts in
    seconds = {}
    for task in Path(f"/proc/{process_id}/task").iterdir():
        fields = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        seconds[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    return seconds
