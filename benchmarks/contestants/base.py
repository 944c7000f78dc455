"""The kinds of contestants, as the driver sees them: libraries in-process, servers, and servers that have many setups."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.measure import Figures, Load
from benchmarks.worker import START_TIMEOUT_S, ContestantError, Process, Worker, foreign_environment

Kind = Literal["served", "bare", "peer"]
_PACKAGES = {"triton": "nvidia-pytriton"}
_TRIAL_SHARE = 0.4
"""Of a measurement's time that each setup of a server is tried for."""


class InProcess:
    """A worker that runs a library in-process."""

    def __init__(
        self, name: str, worker: Worker, *, kind: Kind = "peer", cases: Collection[str] | None = None, **request: Any
    ) -> None:
        """Takes the name of the row and the worker.

        Args:
            name: Of the row.
            worker: Runs the library.
            kind: How the row is drawn.
            cases: Names of those that it is measured with; None for all.
            request: What the worker is asked besides.
        """
        self.name = name
        self.kind = kind
        self._worker = worker
        self._cases = cases
        self._request = request

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the library."""
        return self._worker.versions

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Asks the worker.

        Raises:
            ContestantError: It failed.
        """
        for load in (load for load in loads if self._cases is None or load.case in self._cases):
            asked = {"case": str(load.file), "callers": load.callers, "seconds": load.seconds}
            yield load, self._worker.ask(**asked, **self._request)


class Served:
    """A server that runs all the time."""

    def __init__(
        self, name: str, caller: Worker, *, address: str, protocol: str = "headway", kind: Kind = "served"
    ) -> None:
        """Takes the name of the row and the worker that calls the server at an address."""
        self.name = name
        self.kind = kind
        self._caller = caller
        self._target = {"protocol": protocol, "address": address}

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the caller."""
        return self._caller.versions

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Lets the caller ask the server.

        Raises:
            ContestantError: It refuses such calls.
        """
        for load in loads:
            yield (
                load,
                self._caller.ask(case=str(load.file), callers=load.callers, seconds=load.seconds, **self._target),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One way to run a server."""

    workers: int
    threads: int
    """Of each worker."""
    batch_size: int = 1
    wait_ms: float = 0
    """How long a batch waits to fill."""

    def __str__(self) -> str:
        """Describes it for the table."""
        parts = [f"{self.workers} worker{'s'[: self.workers > 1]} of {self.threads} thread{'s'[: self.threads > 1]}"]
        parts += [f"batches of {self.batch_size}"] if self.batch_size > 1 else []
        return ", ".join(parts + ([f"wait {self.wait_ms:g} ms"] if self.wait_ms else []))


def setups_of(threads: int, *, wait_ms: float) -> list[Setup]:
    """Returns the setups worth trying: a call at a time on all threads, one a thread, and batches."""
    found = [Setup(workers=1, threads=threads)]
    found += [Setup(workers=threads, threads=1)] if threads > 1 else []
    found.append(Setup(workers=1, threads=threads, batch_size=8, wait_ms=wait_ms))
    found.append(Setup(workers=1, threads=threads, batch_size=32, wait_ms=2 * wait_ms))
    return found + ([Setup(workers=threads, threads=1, batch_size=8, wait_ms=wait_ms)] if threads > 1 else [])


class Framework:
    """A serving framework: each load is measured in the setup that was the fastest when all were tried with it.

    The choice is kept in a file, because trying takes minutes; delete it to try again.
    """

    kind: Kind = "peer"

    def __init__(
        self,
        name: str,
        caller: Worker,
        *,
        protocol: str,
        setups: Sequence[Setup],
        start: Callable[[Path, Setup], AbstractContextManager[str]],
        choices: Path,
        versions: Mapping[str, str],
    ) -> None:
        """Takes the name of the row and what it needs.

        Args:
            name: Of the row.
            caller: Calls the server.
            protocol: How, by its name in caller.py.
            setups: Worth trying.
            start: Starts a server on the case in a file, in a setup; gives the address.
            choices: File that keeps the chosen setups.
            versions: Of the framework.
        """
        self.name = name
        self.versions = versions
        self._caller = caller
        self._protocol = protocol
        self._setups = {str(setup): setup for setup in setups}
        self._start = start
        self._choices = choices

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Starts the server in each setup that was chosen for some of the loads, which must be of one case.

        Raises:
            ContestantError: It cannot be started in any setup, or does not answer.
        """
        chosen = self._choose(loads)
        for name in dict.fromkeys(chosen.values()):
            with self._start(loads[0].file, self._setups[name]) as address:
                for load in (load for load in loads if chosen[load.callers] == name):
                    yield load, self._ask(address, load, load.seconds) | {"setting": name}

    def _ask(self, address: str, load: Load, seconds: float) -> Figures:
        target = {"protocol": self._protocol, "address": address}
        return self._caller.ask(case=str(load.file), callers=load.callers, seconds=seconds, **target)

    def _choose(self, loads: Sequence[Load]) -> dict[int, str]:
        """Returns the setup for each number of callers, tried now if the file does not have it."""
        known = json.loads(self._choices.read_text(encoding="utf-8")) if self._choices.is_file() else {}
        keys = {load.callers: f"{self.name}, {load.case}, {load.callers} callers" for load in loads}
        if not all(known.get(key) in self._setups for key in keys.values()):
            rates: dict[int, dict[str, float]] = {load.callers: {} for load in loads}
            failures = []
            for name, setup in self._setups.items():
                try:
                    with self._start(loads[0].file, setup) as address:
                        for load in loads:
                            figures = self._ask(address, load, _TRIAL_SHARE * load.seconds)
                            rates[load.callers][name] = figures[load.rate]
                except ContestantError as error:
                    failures.append(error)
            if not all(rates.values()):
                raise failures[0]
            known |= {keys[callers]: max(found, key=found.__getitem__) for callers, found in rates.items()}
            self._choices.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        return {callers: known[key] for callers, key in keys.items()}


def framework(
    name: str, kind: str, caller: Worker, python: Path, precision: str, threads: int, choices: Path
) -> Framework:
    """Returns the contestant of a framework: `kind` is the name of its module and of its protocol."""

    def start(file: Path, setup: Setup) -> AbstractContextManager[str]:
        bundle, port = json.loads(file.read_text(encoding="utf-8"))["bundle"], free_port()
        sizes = [str(setup.workers), str(setup.threads), str(setup.batch_size), str(setup.wait_ms)]
        variables = {"OMP_NUM_THREADS": str(setup.threads)}
        if kind == "bentoml":
            variables |= {
                "BENCHMARK_ARGUMENTS": json.dumps([bundle, precision, *sizes]),
                "BENTOML_DO_NOT_TRACK": "true",
            }
            command = [str(python), "-m", "bentoml", "serve", "benchmarks.contestants.bentoml:Classify"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
        else:
            command = [str(python), "-m", f"benchmarks.contestants.{kind}", bundle, precision, str(port), *sizes]
        return listening(command, port, foreign_environment(**variables))

    code = f"import importlib.metadata as m; print(m.version({_PACKAGES.get(kind, kind)!r}))"
    version = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return Framework(
        name,
        caller,
        protocol=kind,
        setups=setups_of(threads, wait_ms=2 if kind == "litserve" else 0),  # others batch what came meanwhile
        start=start,
        choices=choices,
        versions={_PACKAGES.get(kind, kind): version},
    )


@contextmanager
def listening(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Runs a server and gives its address once it listens.

    Raises:
        ContestantError: It ended or does not listen; or what was done with it failed, and its log is told too.
    """
    begun_s = time.monotonic()
    with Process(command, environment=environment, has_lines=False) as process:
        while not _is_open(port):
            if not process.is_running or time.monotonic() - begun_s > START_TIMEOUT_S:
                raise process.failure()
            time.sleep(0.1)
        try:
            yield f"127.0.0.1:{port}"
        except ContestantError as error:
            raise ContestantError(f"{error}; its server {process.failure()}") from None


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0
