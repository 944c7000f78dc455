"""A worker process: its assignment, its messages to the supervisor, and its end."""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import structlog

from headway_server.observers import Observer
from headway_server.runtime import Runtime, share_memory
from headway_server.serving.counts import Counts
from headway_server.serving.image_files import ImageFiles
from headway_server.serving.images import PreparedImages
from headway_server.settings import ServerSettings
from headway_server.workers.agreement import Agreement
from headway_server.workers.folder import IMAGES, lock_folder
from headway_server.workers.host import WorkerHost
from headway_server.workers.metrics import metrics_of_all, report_metrics

if TYPE_CHECKING:
    from headway_server.monitoring.metrics import Sample

_FAILED: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Index and resources of a worker."""

    index: int
    num_workers: int
    settings: ServerSettings
    cores: tuple[int, ...]
    """Its cores."""
    counts: int
    """File descriptor of the shared counts."""
    folder: Path
    """The private folder of the server's processes."""
    image_secret: bytes
    """Key of the ids of prepared images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Content of the ready line."""

    address: str
    num_models: int
    num_rejected: int
    device: str
    num_threads: int
    num_lanes: int
    http: str | None = None
    num_workers: int = 1

    def announce(self) -> None:
        """Writes the line to stdout, which has nothing else."""
        workers = f" workers={self.num_workers}" if self.num_workers > 1 else ""
        http = f" http={self.http}" if self.http else ""
        sys.stdout.write(
            f"headway-server ready on {self.address} models={self.num_models} rejected={self.num_rejected} "
            f"device={self.device} threads={self.num_threads} lanes={self.num_lanes}{workers}{http}\n"
        )
        sys.stdout.flush()


class Worker:
    """One of several processes of a server."""

    def __init__(self, supervisor: int) -> None:
        """Reads the assignment from stdin, and sets the cores; called before any thread starts.

        Args:
            supervisor: Process id.
        """
        self._supervisor = supervisor
        self._end_with_supervisor(signal.SIGKILL)
        try:
            self._assignment: Assignment = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the supervisor)
            self._folder_lock = lock_folder(self._assignment.folder)
        except (EOFError, OSError, pickle.UnpicklingError):  # the supervisor has gone
            raise SystemExit(_FAILED) from None
        self._report_fd = os.dup(sys.stdout.fileno())
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())  # for libraries' output
        os.set_inheritable(self._assignment.counts, False)
        os.sched_setaffinity(0, self._assignment.cores)
        share_memory(self._assignment.num_workers)
        self.index = self._assignment.index
        self.settings = self._assignment.settings
        self.counts = Counts(self._assignment.counts, index=self.index, num_workers=self._assignment.num_workers)

    def _end_with_supervisor(self, number: int) -> None:
        """Asks the kernel for a signal at the end of the supervisor."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != self._supervisor:
            raise SystemExit(_FAILED)

    def fail(self, message: str) -> NoReturn:
        """Reports the reason of a failed start to the supervisor, and exits."""
        self._report({"failed": message})
        raise SystemExit(_FAILED)

    def open_host(self, runtime: Runtime, observer: Observer) -> WorkerHost:
        """Loads the models by the shared state; errors are those of `ModelHost.open`."""
        settings, folder = self.settings, self._assignment.folder
        agreement = Agreement(folder, self.counts, index=self.index, supervisor=self._supervisor)
        agreed = agreement.begin()
        host = WorkerHost.open(
            runtime, settings, observer=observer, asked_for=agreed.asked_for, routes_over=agreed.routes_over
        )
        files = ImageFiles(
            folder / IMAGES,
            max_mib=settings.max_prepared_mib,
            ttl_s=settings.image_ttl,
            num_processes=self._assignment.num_workers,
        )
        images = PreparedImages(files, limits=settings.image_limits, secret=self._assignment.image_secret)
        host.join(agreement, agreed, images)
        return host

    async def report_metrics(self, collect: Callable[[], list[Sample]]) -> None:
        """Starts to serve its metrics, which `collect` returns."""
        self._reporting = await report_metrics(self._assignment.folder, self.index, collect)

    def write_metrics(self, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
        """Answers a scrape with the metrics of all workers; called from threads other than the event loop's."""
        return metrics_of_all(self._assignment.folder, self.counts).write(headers)

    def announce(self, ready: Ready) -> None:
        """Reports to the supervisor that this worker is ready; from now on its end drains this process."""
        self._end_with_supervisor(signal.SIGTERM)
        self._report({"serves": asdict(ready)})

    def _report(self, message: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the supervisor has ended, and the kernel signals it
            os.write(self._report_fd, json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Removes the folder if the supervisor was killed."""
        if os.getppid() != self._supervisor:
            _log.warning("the supervisor has gone")
            shutil.rmtree(self._assignment.folder, ignore_errors=True)

    def __repr__(self) -> str:
        return f"Worker({self.index})"
