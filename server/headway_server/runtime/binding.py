"""Tensors that stay bound to a graph from run to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Binding:
    """Bindings of a graph's inputs and outputs, for any of its sessions. For one thread.

    A change is handed to a session when it runs next, so that a session that never runs costs nothing.
    """

    def __init__(self, sessions: Sequence[Any], choose: Callable[[], int]) -> None:
        """Starts with nothing bound.

        Args:
            sessions: `onnxruntime.InferenceSession`s of one graph.
            choose: Returns the index of the one to run.
        """
        self._sessions = sessions
        self._choose = choose
        self._bindings = [session.io_binding() for session in sessions]
        self._changes: list[dict[str, tuple[str, tuple[Any, ...]]]] = [{} for _ in sessions]

    def bind_input(self, name: str, device: str, dtype: Any, shape: Sequence[int], address: int) -> None:
        """Binds memory that the caller keeps alive; `device` is `cpu` or `cuda`."""
        self._note("bind_input", name, device, 0, dtype, shape, address)

    def bind_output(self, name: str, device: str, dtype: Any, shape: Sequence[int], address: int) -> None:
        """Binds memory that the caller keeps alive; `device` is `cpu` or `cuda`."""
        self._note("bind_output", name, device, 0, dtype, shape, address)

    def bind_inputs(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        """Binds host arrays, and references them."""
        for name, array in inputs.items():
            self._note("bind_cpu_input", name, np.ascontiguousarray(array))

    def run(self) -> None:
        """Runs the graph on the bound tensors. Releases the GIL."""
        index = self._choose()
        binding, changes = self._bindings[index], self._changes[index]
        for name, (method, arguments) in changes.items():
            getattr(binding, method)(name, *arguments)
        changes.clear()
        self._sessions[index].run_with_iobinding(binding)

    def _note(self, method: str, name: str, *arguments: Any) -> None:
        for changes in self._changes:
            changes[name] = (method, arguments)
