"""Tensors that stay bound to a graph from run to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Binding:
    """What the inputs and outputs of a graph are bound to, whichever of its sessions runs. For one thread.

    A session is told what has changed when it runs: the one that never does is never told.
    """

    def __init__(self, sessions: Sequence[Any], choose: Callable[[], int]) -> None:
        """Starts with nothing bound.

        Args:
            sessions: `onnxruntime.InferenceSession`s of one graph.
            choose: Says which of them a run takes.
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
        """Binds host arrays, which are kept alive."""
        for name, array in inputs.items():
            self._note("bind_cpu_input", name, np.ascontiguousarray(array))

    def run(self) -> None:
        """Runs the graph on what is bound. Lets other threads run."""
        index = self._choose()
        self._tell(index)
        self._sessions[index].run_with_iobinding(self._bindings[index])

    def _tell(self, index: int) -> None:
        """Binds to a session what has changed since it ran."""
        binding, changes = self._bindings[index], self._changes[index]
        for name, (method, arguments) in changes.items():
            getattr(binding, method)(name, *arguments)
        changes.clear()

    def _note(self, method: str, name: str, *arguments: Any) -> None:
        for changes in self._changes:
            changes[name] = (method, arguments)
