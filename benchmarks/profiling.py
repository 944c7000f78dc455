"""Where a server's time goes, thread by thread: py-spy's samples, put into a few kinds of work."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.environment import PeerError

_RATE_HZ = 100
_START_S = 1.0
"""py-spy reads the process's symbols before its first sample."""
_KINDS = (
    ("run (headway_server/runtime/binding", "the model (ONNX Runtime)"),
    ("headway_server/runtime/binding", "binding inputs"),
    ("headway_server/decoding/runner", "binding inputs"),
    ("headway_server/decoding/speculation", "guessing ahead"),
    ("headway_server/decoding/sampling", "choosing tokens"),
    ("headway_server/decoding/sampling", "choosing tokens"),
    ("headway_server/decoding/output", "text of tokens"),
    ("headway_server/decoding/output", "text of tokens"),
    ("headway_server/decoding/core/outbox", "handing out"),
    ("headway_server/decoding/core/prefix_cache", "keeping prompts"),
    ("headway_server/runtime/memory", "moving slots"),
    ("headway_server/decoding/core/step", "the step around these"),
    ("headway_server/decoding/core/scheduler", "the step around these"),
    ("headway_server/decoding/core/engine", "the step around these"),
    ("headway_server/transports", "services"),
    ("headway_server/preprocessing", "tokenizing"),
    ("headway_server", "other parts of headway"),
    ("grpc/", "gRPC"),
    ("cython", "gRPC"),
    ("asyncio/", "the event loop itself"),
)
"""What a function of a file belongs to; the first that matches, from the innermost frame outwards."""
_WAITING = ("select (selectors", "_worker (concurrent", "wait (threading", "_poll_wrapper", "_receive (headway_server")
"""Innermost frames of threads that wait, which py-spy may take for running."""
_THREAD = re.compile(r"thread \((\d+)\)(?:: )?(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Processor time of a process by thread and by what the thread did."""

    seconds: float
    parts: list[tuple[str, str, float]]
    """Thread, kind of work, processor seconds a second."""
    figures: dict[str, Any]
    """Of the load meanwhile."""

    def lines(self) -> Iterator[str]:
        """The table."""
        yield ""
        yield f"{self.seconds:.0f} s at {self.figures['tokens_per_s']:.0f} tokens/s; processor seconds a second:"
        for thread, kind, cores in self.parts:
            yield f"  {thread:<28} {kind:<28} {cores:6.3f}"

    def as_record(self) -> dict[str, Any]:
        """For the JSON object."""
        return {
            "seconds": round(self.seconds, 1),
            "parts": [{"thread": t, "kind": k, "cores": round(c, 4)} for t, k, c in self.parts],
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
        names, samples = _read(stacks.read_text(encoding="utf-8"))
    cores = {thread: (after[thread] - before.get(thread, 0.0)) / seconds for thread in after}
    return Profile(seconds=seconds, parts=sorted(_parts(cores, names, samples), key=_order), figures=figures)


def _read(folded: str) -> tuple[dict[int, str], dict[int, Counter[str]]]:
    """Reads py-spy's folded stacks, `thread (id): name;outermost;...;innermost samples`: names and samples by kind."""
    names: dict[int, str] = {}
    samples: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        found = _THREAD.match(thread)
        if found is None or not frames or frames[-1].startswith(_WAITING):
            continue
        names[int(found[1])] = found[2]
        samples[int(found[1])][_kind(frames)] += int(count)
    return names, samples


def _parts(
    cores: dict[int, float], names: dict[int, str], samples: dict[int, Counter[str]]
) -> Iterator[tuple[str, str, float]]:
    """Divides each thread's processor time by its samples; threads of libraries are put together."""
    yield "threads of libraries", "all", sum(used for thread, used in cores.items() if thread not in samples)
    for thread, counts in samples.items():
        total = counts.total()
        for kind, count in counts.items():
            yield names[thread], kind, cores.get(thread, 0.0) * count / total


def _order(part: tuple[str, str, float]) -> tuple[str, float]:
    """By thread, what takes most of it first."""
    return part[0], -part[2]


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
