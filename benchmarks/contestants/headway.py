"""headway's server, of this checkout or of another one."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.worker import START_TIMEOUT_S, Process, tree_environment

_READY = "headway-server ready on "


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that answers."""

    address: str
    start_s: float
    """From the start of the process until it is ready."""
    process: Process

    def memory_mib(self) -> dict[str, float]:
        """Returns its resident memory, now and at its highest, in MiB."""
        lines = (
            Path(f"/proc/{self.process.process_id}/status").read_text(encoding="ascii", errors="replace").splitlines()
        )
        sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
        names = {"resident_mib": "VmRSS", "peak_resident_mib": "VmHWM"}
        return {name: round(int(sizes[key].split()[0]) / 1024, 1) for name, key in names.items()}


@contextmanager
def running_server(
    tree: Path, store: Path, flags: Sequence[str], module: Sequence[str] = ("headway_server",)
) -> Iterator[Server]:
    """Runs the server of a checkout on a free port of this machine, by a module with its own arguments.

    Raises:
        ContestantError: It did not start.
    """
    command = [sys.executable, "-m", *module, "--store", str(store.resolve()), "--host", "127.0.0.1"]
    command += ["--port", "0", "--log-level", "warning", *flags]
    begun_s = time.perf_counter()
    with Process(command, tree_environment(tree)) as process:
        line = process.read_line(_READY, timeout_s=START_TIMEOUT_S)
        start_s = time.perf_counter() - begun_s
        yield Server(address=line.removeprefix(_READY).split()[0], start_s=start_s, process=process)
