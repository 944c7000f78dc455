"""A client that is tried: its program and versions, the environment they are installed in, and what became of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
_RESOLVED_ON = "2026-11-27"
"""Day of which the packages are that a client's own packages need."""
_INSTALLED_IN_S = 1200
_ENOUGH_S = 540

SILENT = {
    "ANONYMIZED_TELEMETRY": "False",  # Chroma
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DISABLE_TELEMETRY": "1",  # lm-eval
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
    "SCARF_NO_ANALYTICS": "true",
}
"""Variables that keep clients from calling anyone but the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that a client was tried on."""

    name: str
    error: str
    """Empty if the client did as it should."""
    fails: str
    """Why it is known to fail; empty if it is to pass."""

    @property
    def is_expected(self) -> bool:
        """True if the case passed, or failed for a known reason; a reason with a case that passes is out of date."""
        return bool(self.error) == bool(self.fails)


class ClientError(Exception):
    """A client could not be installed or has not ended."""


@dataclass(frozen=True)
class Client:
    """A program of `programs/`, whose head names the packages that it needs."""

    path: Path

    def __repr__(self) -> str:
        return f"Client({self.name!r}, {', '.join(self.packages)})"

    @property
    def name(self) -> str:
        """Name of the program without its ending."""
        return self.path.stem

    @property
    def title(self) -> str:
        """Name for people: the first line of the program."""
        return self._source.split("\n", 1)[0].strip('/" .')

    @cached_property
    def packages(self) -> tuple[str, ...]:
        """Packages with their versions: `name==version`, or `name@version` of npm."""
        if self.path.suffix == ".mjs":
            found = re.search(r"^// npm: (.+)$", self._source, flags=re.MULTILINE)
            return tuple(found[1].split()) if found else ()
        found = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", self._source, flags=re.MULTILINE)
        header = re.sub(r"^# ?", "", found[1], flags=re.MULTILINE) if found else ""
        return tuple(tomllib.loads(header).get("dependencies", ()))

    @property
    def versions(self) -> str:
        """Packages and versions for people."""
        return ", ".join(f"`{name}` {version}" for name, version in (_parted(package) for package in self.packages))

    @cached_property
    def _source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def install(self, folder: Path) -> Path:
        """Installs the packages into an environment below `folder`, unless they are there; returns it.

        Raises:
            ClientError: They cannot be installed.
        """
        key = hashlib.sha256(repr((self.packages, _RESOLVED_ON, sys.version_info[:2])).encode()).hexdigest()[:12]
        environment = folder / f"{self.name}-{key}"
        done = environment / "installed"
        if not done.exists():
            for old in folder.glob(f"{self.name}-*"):
                shutil.rmtree(old)
            environment.mkdir(parents=True)
            for command in self._installation(environment):
                _call(command, environment, _INSTALLED_IN_S)
            done.touch()
        return environment

    def _installation(self, environment: Path) -> list[list[str]]:
        if self.path.suffix == ".mjs":
            (environment / "package.json").write_text("{}")
            options = ["--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps", f"--before={_RESOLVED_ON}"]
            return [["npm", "install", *options, *self.packages]]
        uv = str(uv) if (uv := Path(sys.executable).with_name("uv")).exists() else "uv"
        install = [uv, "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
        return [
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(environment)],
            [*install, f"--exclude-newer={_RESOLVED_ON}", *self.packages],
        ]

    def run(self, environment: Path, variables: dict[str, str]) -> list[Case]:
        """Runs the program with the variables beside those that silence clients; returns its cases.

        Raises:
            ClientError: It has not ended in time, or not well.
        """
        home = environment / "home"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        for shared in PROGRAMS.glob("cases.*"):
            shutil.copy(shared, home)
        program = Path(shutil.copy(self.path, home))  # Node looks for packages above the program
        search = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": search, "HOME": str(home), "LANG": "C.UTF-8", **SILENT, **variables}
        interpreter = "node" if self.path.suffix == ".mjs" else str(environment / "bin/python")
        output = _call([interpreter, str(program)], home, _ENOUGH_S, variables)
        return [
            Case(name=line["case"], error=line["detail"], fails=line["fails"])
            for line in map(json.loads, output.splitlines())
        ]


def _parted(package: str) -> tuple[str, str]:
    name, _, version = package.rpartition("@") if "==" not in package else package.partition("==")
    return name, version


def _call(command: list[str], folder: Path, timeout_s: float, variables: dict[str, str] | None = None) -> str:
    """Runs a command, whose errors go to the file `log` in the folder; returns what it printed."""
    log = folder / "log"
    with log.open("ab") as errors:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        except OSError as error:
            raise ClientError(f"{command[0]} cannot be started: {error}") from error
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ClientError(f"{command[0]} has not ended after {timeout_s:.0f} s; {log} has its output") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
            process.wait()
    if process.returncode:
        raise ClientError(f"{command[0]} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return output


def clients(folder: Path = PROGRAMS) -> list[Client]:
    """All of them, in the order of the table."""
    paths = (path for path in folder.iterdir() if path.suffix in {".py", ".mjs"} and path.stem != "cases")
    return [Client(path) for path in sorted(paths)]
