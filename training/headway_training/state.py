"""The state of a run on disk: everything that a resumed run needs to go on exactly where it was.

Weights that are not trained, those that LoRA leaves as they are, come from elsewhere and are not in it.

A state is the file `state/step-<number>.pt`. It is whole and on the disk before older ones are removed, and so are the
best weights that it tells of. Random numbers are functions of the step and need no state.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from headway_training.durable import replacing
from headway_training.errors import ResumeError

_UNREADABLE = (OSError, ValueError, EOFError, pickle.UnpicklingError)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    """Optimizer steps that are done."""
    wall_time_s: float = 0.0
    """Time spent so far, over all parts of the run."""
    best_value: float | None = None
    """The best validation metric so far."""
    best_step: int = 0
    """The step it was reached at."""
    history: list[dict[str, float]] = field(default_factory=list)
    """One entry a validation: step, training loss and validation metrics."""
    loss_sum: float = 0.0
    """Training loss summed since the last validation, in nats a target."""
    loss_count: int = 0
    """Steps it was summed over."""


class RunState:
    """Reads and writes the state of the run in a folder.

    Args:
        folder: The run's folder.
        model: Its model.
        optimizers: Its optimizers.
        average: The average of the weights, where there is one.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], average: AveragedModel | None
    ) -> None:
        self.folder = folder / "state"
        self.best_file = folder / "best.safetensors"
        self.damaged: list[str] = []
        """States that `load` found and could not read, and why."""
        self._step: int | None = None  # of the state that was last written or read
        self._parts: list[nn.Module | Optimizer] = [model, *optimizers, *([] if average is None else [average])]

    def __repr__(self) -> str:
        return f"RunState({self.folder}, latest={latest_state(self.folder.parent)})"

    def save(self, progress: Progress) -> None:
        """Writes the state, unless it is written already, and then removes others."""
        if progress.step == self._step:
            return
        target = self.folder / f"step-{progress.step}.pt"
        with replacing(target) as staging:
            torch.save({"progress": asdict(progress), "parts": [_state_of(part) for part in self._parts]}, staging)
        self._step = progress.step
        for path in (*_states(self.folder.parent), *self.folder.glob("*.writing")):  # the latter of a killed run
            if path != target:
                path.unlink()

    def load(self) -> Progress:
        """Puts the last state into model, optimizers and average; without one, nothing is changed.

        Where the last one cannot be read and an earlier one is still there, that one is taken.

        Raises:
            ResumeError: No state can be read, or it belongs to another model.
        """
        paths = _states(self.folder.parent)
        for path in paths:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except (*_UNREADABLE, RuntimeError) as error:
                self.damaged.append(f"{path} cannot be resumed: {_reason(error)}")
                continue
            try:  # an earlier one would fit no better
                for part, stored in zip(self._parts, state["parts"], strict=True):
                    _put(part, stored)
                state["progress"].pop("ended", None)  # of earlier versions, which stored what the history tells
                progress = Progress(**state["progress"])
            except (*_UNREADABLE, RuntimeError, KeyError, TypeError) as error:
                raise self._error(f"{path} cannot be resumed: {_reason(error)}") from error
            self._step = progress.step
            return progress
        if paths:
            raise self._error("; ".join(self.damaged))
        return Progress()

    def _error(self, what: str) -> ResumeError:
        return ResumeError(f"{what}. Remove {self.folder.parent} and start over")

    def save_best(self, model: nn.Module) -> None:
        """Keeps the weights as the best so far."""
        with replacing(self.best_file) as staging:
            save_file(_distinct(_state_of(model)), str(staging))

    def load_best(self, model: nn.Module) -> None:
        """Puts the best weights into the model.

        Raises:
            ResumeError: They are not there, or cannot be read.
        """
        own = model.state_dict()
        try:
            best = load_file(self.best_file)
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self.best_file} cannot be read: {_reason(error)}") from error
        with torch.no_grad():
            for name, tensor in best.items():
                own[name].copy_(tensor)


def _state_of(part: nn.Module | Optimizer) -> dict[str, Any]:
    """What changes in training: an optimizer's state, or a module's trained weights and its buffers."""
    state = part.state_dict()
    if isinstance(part, nn.Module):
        frozen = {name for name, weight in part.named_parameters(remove_duplicate=False) if not weight.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def _put(part: nn.Module | Optimizer, state: dict[str, Any]) -> None:
    """Loads what `_state_of` gave.

    Raises:
        RuntimeError: It is of another module.
    """
    if isinstance(part, nn.Module):
        state = {**{name: value for name, value in part.state_dict().items() if name not in _state_of(part)}, **state}
    part.load_state_dict(state)


def _distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which a tied one comes once, as the file format asks for."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(state.items()) if tensor.numel()}
    return {name: tensor.contiguous() for name, tensor in state.items() if first.get(tensor.data_ptr(), name) == name}


def latest_state(folder: Path) -> Path | None:
    """The file of the last state of the run in a folder; None where there is none."""
    return next(iter(_states(folder)), None)


def _states(folder: Path) -> list[Path]:
    """The files of the states of a run, the last one first."""
    states = (folder / "state").glob("step-*.pt")
    return sorted(states, key=lambda path: int(path.stem.removeprefix("step-")), reverse=True)


def _reason(error: Exception) -> str:
    """The first line of what is wrong."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
