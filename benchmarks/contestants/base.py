"""The kinds of contestants, as the driver sees them: those that a worker measures, and servers with many setups."""

import json
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import REQUIREMENTS, python_of
from benchmarks.measure import Figures, Kind, Load
from benchmarks.worker import ContestantError, Process, Worker, foreign_environment

_TRIAL_SHARE = 0.4
"""Of a measurement's time that each setup of a server is tried for."""
_PROGRAMS: dict[str, tuple[str, dict[str, str]]] = {
    "infinity": (
        "infinity_emb v2 --model-id {weights} --served-model-name benchmark --url-prefix /v1 --host 127.0.0.1 "
        "--port {port} --device cpu --engine torch --no-bettertransformer --no-model-warmup",
        {
            f"{dtype}, batches of {size}": f"--dtype {dtype} --batch-size {size}"
            for dtype in ("float32", "bfloat16")
            for size in (8, 32)
        },
    ),
}
"""Servers that are programs of their own, which take a folder of Hugging Face: the command, and its setups."""


@dataclass(kw_only=True)
class Measured:
    """A worker measures it: it runs a library in-process, or calls a server."""

    name: str
    kind: Kind
    worker: Worker
    request: dict[str, Any]
    """What the worker is asked besides the load."""
    cases: Collection[str] | None = None
    """Names of the cases that it is measured with; None for all."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the library, or of the caller."""
        return self.worker.versions

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Asks the worker; raises `ContestantError` if it failed."""
        for load in (load for load in loads if self.cases is None or load.case in self.cases):
            asked = {"case": str(load.file), "callers": load.callers, "seconds": load.seconds}
            yield load, self.worker.ask(**asked, **self.request)


class Framework:
    """A serving framework: each load is measured in the setup that was the fastest when all were tried with it.

    The choice is kept in a file if `choices` names one, because trying takes minutes; delete it to try again.
    """

    kind: Kind = "peer"
    choices: Path | None = None

    def __init__(self, name: str, module: str, caller: Worker, precision: str, threads: int) -> None:
        """Takes the name of the row, its environment and module (which is also its protocol), and what it runs with.

        Raises:
            ContestantError: It cannot be installed.
        """
        self.name = name
        environment, self._module = module.split()
        self._caller, self._precision = caller, precision
        self._python = str(python_of(environment))
        pinned = dict(one.split("==") for one in REQUIREMENTS[environment] if "==" in one)
        library = self._module.removesuffix("_served")
        self.versions: Mapping[str, str] = {library: pinned[library]} if library in pinned else pinned
        wait_ms = 2 if self._module == "litserve" else 0  # the others batch what came while their workers were busy
        batches: tuple[tuple[int, int | str, str], ...] = (
            (1, 0, ""),
            (8, wait_ms, ""),
            (32, 2 * wait_ms, ""),
        )
        if self._module == "ctranslate2_served":
            batches = ((16, "examples", ""), (32, "examples", ""), (256, "tokens", " tokens"))
        self._setups: dict[str, tuple[int, int, int, int | str]] = {
            f"workers {workers}, threads of each {each}, batches of {size}{unit}": (workers, each, size, last)
            for workers, each in ((1, threads), (threads, 1))
            for size, last, unit in batches
        }
        """By description: numbers of workers and their threads, the batch size, and how long a batch waits to fill or
        what its size counts, or the options of a program."""
        if self._module in _PROGRAMS:
            self._setups = {
                described: (1, threads, 1, options) for described, options in _PROGRAMS[self._module][1].items()
            }
        self._known: dict[str, str] = {}

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        """Starts the server in each setup that was chosen for some of the loads, which must be of one case.

        Raises:
            ContestantError: It cannot be started in any setup, or does not answer.
        """
        chosen = self._choose(loads)
        for name in dict.fromkeys(chosen.values()):
            with self._running(loads[0].file, self._setups[name]) as address:
                for load in (load for load in loads if chosen[load.callers] == name):
                    yield load, self._ask(address, load, load.seconds) | {"setting": name}

    def _choose(self, loads: Sequence[Load]) -> dict[int, str]:
        """Returns the setup for each number of callers, tried now if it is not known."""
        if self.choices and self.choices.is_file():
            self._known = json.loads(self.choices.read_text(encoding="utf-8")) | self._known
        keys = {load.callers: f"{self.name}, {load.case}, {load.callers} callers" for load in loads}
        if not all(self._known.get(key) in self._setups for key in keys.values()):
            rates: dict[int, dict[str, float]] = {load.callers: {} for load in loads}
            for name, setup in self._setups.items():
                worth = [load for load in loads if self._is_worth(setup, load.callers)]
                if not worth:
                    continue
                try:
                    with self._running(loads[0].file, setup) as address:
                        for load in worth:
                            figures = self._ask(address, load, _TRIAL_SHARE * load.seconds)
                            rates[load.callers][name] = figures[load.rate]
                except ContestantError as error:
                    failure = error
            if not all(rates.values()):
                raise failure
            self._known |= {keys[callers]: max(found, key=found.__getitem__) for callers, found in rates.items()}
            if self.choices:
                self.choices.write_text(json.dumps(self._known, indent=2) + "\n", encoding="utf-8")
        return {callers: self._known[key] for callers, key in keys.items()}

    def _is_worth(self, setup: tuple[int, int, int, int | str], callers: int) -> bool:
        """Returns False for a batch that so many callers cannot fill, if a smaller one holds them all."""
        sizes = [size for _, _, size, last in self._setups.values() if last != "tokens"]
        return setup[3] == "tokens" or setup[2] <= min((size for size in sizes if size >= callers), default=setup[2])

    def _ask(self, address: str, load: Load, seconds: float) -> Figures:
        target = {"protocol": self._module, "address": address}
        return self._caller.ask(case=str(load.file), callers=load.callers, seconds=seconds, **target)

    @contextmanager
    def _running(self, file: Path, setup: tuple[int, int, int, int | str]) -> Iterator[str]:
        """Runs the server on a case and gives its address once it listens."""
        case = json.loads(file.read_text(encoding="utf-8"))
        bundle = case["bundle"]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        sizes = list(map(str, setup))
        variables = {"OMP_NUM_THREADS": sizes[1], "BENTOML_DO_NOT_TRACK": "true"}
        if self._module == "bentoml":
            variables["BENCHMARK_ARGUMENTS"] = json.dumps([bundle, self._precision, *sizes])
            command = ["bentoml", "serve", "benchmarks.contestants.bentoml:Classify", "--host", "127.0.0.1"]
            command += ["--port", str(port)]
        elif self._module in _PROGRAMS:
            program = _PROGRAMS[self._module][0].format(weights=case["weights"], port=port)
            command = [*program.split(), *str(setup[3]).split()]
            variables |= {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
        elif self._module == "ctranslate2_served":
            command = [f"benchmarks.contestants.{self._module}", str(file), str(port), *sizes]
        else:
            command = [f"benchmarks.contestants.{self._module}", bundle, self._precision, str(port), *sizes]
        if self._module in _PROGRAMS:
            command[0] = str(Path(self._python).with_name(command[0]))
        else:
            command = [self._python, "-m", *command]
        with Process(command, foreign_environment(**variables), has_lines=False) as process:
            process.wait_for(port)
            try:
                yield f"127.0.0.1:{port}"
            except ContestantError as error:
                raise ContestantError(f"{error}; its server {process.failure()}") from None
