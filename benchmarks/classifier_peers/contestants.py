"""Measures the peers: each in the setups that were fastest when tried with a model, now or in an earlier run."""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from peers.environment import PeerError

from classifier_peers.environment import PEERS, Peer, RunningPeer, Setup, ensure_environment, run_script, running_peer

_TRIAL_SHARE = 0.4
"""Of a measurement's time that a setup is tried for."""
_OPENVINO = "OpenVINO"
_OPENVINO_WAYS = (("fp32", "f32"), ("fp32", "bf16"), ("int8", "f32"))
"""Graph, and the precision that OpenVINO is to compute in."""
_PACKAGES = {
    "litserve": ("litserve",),
    "bentoml": ("bentoml",),
    "triton": ("nvidia-pytriton", "tritonclient"),
    "openvino": ("openvino",),
}


class Measured(Protocol):
    """A model with its inputs."""

    name: str
    bundle: Path
    inputs: tuple[str | bytes, ...]


Choices = Mapping[tuple[str, str, int], str]
"""The name of the setup to take, by peer, model and number of callers."""


def read_choices(report: Mapping[str, Any]) -> Choices:
    """The setups that an earlier run chose, from its JSON object.

    Raises:
        KeyError: It is the object of something else.
    """
    peers = {peer.name for peer in PEERS}
    return {
        (row["name"], load["model"], load["callers"]): load["setting"]
        for row in report["rows"]
        if row["name"] in peers
        for load in row["loads"]
    }


class PeerMeasurer:
    """The peers that were asked for.

    Args:
        names: Of their rows.
        scratch: Folder of their environments.
        threads: Of every side.
        precision: Variant that is run.
        choices: Setups that need not be looked for; where one is missing, all of its peer and model are tried.
    """

    def __init__(
        self, names: Sequence[str], scratch: Path, *, threads: int, precision: str, choices: Choices | None = None
    ) -> None:
        self._names = names
        self._choices = choices or {}
        self._scratch = scratch
        self._threads = threads
        self._precision = precision
        self._best: dict[tuple[str, str, int], Setup] = {}
        self._broken_ways: set[tuple[str, str]] = set()

    def names(self) -> list[str]:
        """Rows' names, or what they begin with."""
        return list(self._names)

    def measure(
        self, name: str, model: Measured, callers: Sequence[int], seconds: float
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Measures a peer once.

        Yields:
            The row, the number of callers, and `inputs_per_s` with what else was measured.

        Raises:
            PeerError: It cannot be installed or run.
        """
        if name == _OPENVINO:
            yield from self._measure_openvino(model, callers, seconds)
            return
        peer = next(peer for peer in PEERS if peer.name == name)
        python = ensure_environment(peer.kind, self._scratch)
        if (name, model.name, callers[0]) not in self._best and not self._take_over(peer, model, callers):
            self._choose(peer, python, model, callers, seconds)
        for setup in dict.fromkeys(self._best[name, model.name, number] for number in callers):
            with self._running(peer, setup, python, model) as running:
                for number in callers:
                    if self._best[name, model.name, number] == setup:
                        figures = running.measure(model.inputs, number, seconds, 2 * number)
                        figures["inputs_per_s"] = figures.pop("requests_per_s")
                        yield name, number, figures | {"setting": setup.name}

    def versions(self) -> dict[str, str]:
        """Of the peers that were installed."""
        found = {}
        for kind in [peer.kind for peer in PEERS if peer.name in self._names] + (
            ["openvino"] if _OPENVINO in self._names else []
        ):
            for package in _PACKAGES[kind]:
                code = f"import importlib.metadata as m; print(m.version({package!r}))"
                try:
                    python = ensure_environment(kind, self._scratch)
                except PeerError:
                    continue
                ended = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
                if ended.returncode == 0:
                    found[package] = ended.stdout.strip()
        return found

    def _running(self, peer: Peer, setup: Setup, python: Path, model: Measured) -> AbstractContextManager[RunningPeer]:
        return running_peer(peer, setup, python=python, bundle=model.bundle, precision=self._precision)

    def _take_over(self, peer: Peer, model: Measured, callers: Sequence[int]) -> bool:
        """Takes the setups that were chosen earlier, if there is one for every number of callers."""
        setups = {setup.name: setup for setup in peer.setups(self._threads)}
        keys = [(peer.name, model.name, number) for number in callers]
        found = {key: setups[self._choices[key]] for key in keys if self._choices.get(key) in setups}
        if len(found) < len(keys):
            return False
        self._best |= found
        return True

    def _choose(self, peer: Peer, python: Path, model: Measured, callers: Sequence[int], seconds: float) -> None:
        """Tries every setup with every number of callers."""
        rates: dict[int, dict[Setup, float]] = {number: {} for number in callers}
        errors: list[PeerError] = []
        for setup in peer.setups(self._threads):
            try:
                with self._running(peer, setup, python, model) as running:
                    for number in callers:
                        tried = running.measure(model.inputs, number, _TRIAL_SHARE * seconds, number)
                        rates[number][setup] = tried["requests_per_s"]
            except PeerError as error:
                errors.append(error)
        if not all(rates.values()):
            raise errors[0]
        for number, found in rates.items():
            self._best[peer.name, model.name, number] = max(found, key=found.__getitem__)

    def _measure_openvino(
        self, model: Measured, callers: Sequence[int], seconds: float
    ) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yields, for each way and number of callers, the best batch of at most so many inputs."""
        python = ensure_environment("openvino", self._scratch)
        texts = [value if isinstance(value, str) else base64.b64encode(value).decode() for value in model.inputs]
        errors = []
        for graph, hint in _OPENVINO_WAYS:
            row = f"{_OPENVINO} {hint if graph == 'fp32' else 'on the int8 graph'}"
            if (model.name, row) in self._broken_ways:
                continue
            with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
                file.write(json.dumps(texts))
                file.flush()
                arguments = [str(model.bundle), graph, str(self._threads), hint, file.name, str(seconds / 4)]
                try:
                    figures = run_script(python, ["run_openvino.py", *arguments])
                except PeerError as error:
                    self._broken_ways.add((model.name, row))
                    errors.append(error)
                    continue
            for number in callers:
                fitting = [one for one in figures if one["batch_size"] <= number]
                best = max(fitting, key=lambda one: one["inputs_per_s"])
                setting = f"batches of {best['batch_size']}, {best['order']}"
                yield row, number, {"inputs_per_s": best["inputs_per_s"], "setting": setting}
        if len(errors) == len(_OPENVINO_WAYS):
            raise errors[0]
