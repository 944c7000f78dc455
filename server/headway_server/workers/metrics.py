"""The metrics of all workers: each serves its own at a socket in the private folder; a scrape merges them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headway_server.serving.counts import Counts

if TYPE_CHECKING:
    from headway_server.monitoring.metrics import Sample, WorkersMetrics

_PREFIX: Final = "metrics-"
_TIMEOUT_S: Final = 5.0
"""Timeout of a worker's answer, in seconds."""
_READ_BYTES: Final = 2**16


async def report_metrics(folder: Path, index: int, collect: Callable[[], list[Sample]]) -> asyncio.Server:
    """Serves a worker's metrics at its socket.

    Args:
        folder: Folder of the server.
        index: Index of the worker.
        collect: Returns them; called in a thread.
    """

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(await asyncio.to_thread(collect)).encode())
        writer.close()

    path = folder / f"{_PREFIX}{index}"
    path.unlink(missing_ok=True)  # of its predecessor
    return await asyncio.start_unix_server(answer, path)


def metrics_of_all(folder: Path, counts: Counts) -> WorkersMetrics:
    """Returns a reader of the metrics of all workers, for threads other than their event loops."""
    from headway_server.monitoring.metrics import WorkersMetrics  # noqa: PLC0415 (where they are read alone)

    return WorkersMetrics(lambda: (_gather(folder), counts.num_restarts))


def _gather(folder: Path) -> dict[int, list[Sample]]:
    """Returns the metrics of each worker that answers in time, by its index."""
    sockets = {int(path.name.removeprefix(_PREFIX)): path for path in folder.glob(f"{_PREFIX}*")}
    if not sockets:
        return {}
    with ThreadPoolExecutor(len(sockets)) as threads:
        found = zip(sockets, threads.map(_ask, sockets.values()), strict=True)
        return {index: metrics for index, metrics in found if metrics is not None}


def _ask(path: Path) -> list[Sample] | None:
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_TIMEOUT_S)
            asking.connect(str(path))
            samples: list[Sample] = json.loads(b"".join(iter(lambda: asking.recv(_READ_BYTES), b"")))
            return samples
    except (OSError, ValueError):  # it is ending, or does not answer
        return None
