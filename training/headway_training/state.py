"""The state of a run, on disk: everything that a resumed run needs to go on exactly where it was.

A state is a folder `state/step-<number>/`, written under another name and renamed, so that one is either whole or not
there; the one before it is removed afterwards. Random numbers are functions of the step and need no state.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from headway_training.averaging import WeightAverage
from headway_training.errors import ResumeError

_PROGRESS_FILE = "progress.json"
_TENSORS_FILE = "tensors.safetensors"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    """Optimizer steps that are done."""
    wall_time_s: float = 0.0
    """Time spent so far, of every part of the run."""
    best_value: float | None = None
    """The best validation metric so far."""
    best_step: int = 0
    """The step it was reached at."""
    history: list[dict[str, float]] = field(default_factory=list)
    """A record of every validation: step, training loss and validation metrics."""
    loss_sum: float = 0.0
    """Training loss summed since the last validation, in nats a target."""
    loss_count: int = 0
    """Steps it was summed over."""


class RunState:
    """Reads and writes the state of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.best_file = folder / "best.safetensors"

    def __repr__(self) -> str:
        return f"RunState({self.folder}, latest={self.latest()})"

    def latest(self) -> Path | None:
        """The folder of the last whole state."""
        states = sorted(self.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        return states[-1] if states else None

    def save(self, progress: Progress, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
        """Writes the state, then removes older ones."""
        target = self.folder / f"step-{progress.step}"
        if target.exists():
            return
        staging = self.folder / f".writing-{os.getpid()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file(_gather(model, optimizer, average), staging / _TENSORS_FILE)
        (staging / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        staging.rename(target)
        for path in self.folder.iterdir():
            if path != target:
                shutil.rmtree(path, ignore_errors=True)

    def load(self, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> Progress:
        """Puts the last state into model, optimizer and average; without one, nothing is changed.

        Raises:
            ResumeError: The state cannot be read, or belongs to another model.
        """
        path = self.latest()
        if path is None:
            return Progress()
        try:
            tensors = load_file(path / _TENSORS_FILE)
            progress = Progress(**json.loads((path / _PROGRESS_FILE).read_text(encoding="utf-8")))
            _scatter(tensors, model, optimizer, average)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            raise ResumeError(
                f"{path} cannot be resumed: {error}. Remove {self.folder.parent} and start over"
            ) from error
        return progress

    def save_best(self, model: nn.Module) -> None:
        """Keeps the weights as the best so far."""
        staging = self.best_file.with_suffix(".writing")
        save_file({name: tensor.contiguous() for name, tensor in state_tensors(model).items()}, staging)
        staging.replace(self.best_file)

    def load_best(self, model: nn.Module) -> None:
        """Puts the best weights into the model."""
        _load_tensors(model, load_file(self.best_file))


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The distinct tensors of a module by their first names, buffers included: a tied weight comes once."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = tensor
    return tensors


def _gather(model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> dict[str, Tensor]:
    """All tensors of a state under one naming."""
    tensors = {f"model.{name}": tensor for name, tensor in state_tensors(model).items()}
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in values.items()}
    if average is not None:
        tensors |= {f"average.{name}": tensor for name, tensor in average.tensors.items()}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _scatter(tensors: dict[str, Tensor], model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
    """The inverse of `_gather`."""
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}}
    for key, tensor in tensors.items():
        group, _, name = key.partition(".")
        groups[group][name] = tensor
    _load_tensors(model, groups["model"])
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in groups["optimizer"].items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if average is not None:
        for name, tensor in average.tensors.items():
            tensor.copy_(groups["average"][name])


@torch.no_grad()
def _load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies weights and buffers by name; a tied weight is stored once."""
    own = state_tensors(model)
    if own.keys() != tensors.keys():
        raise ValueError(f"the stored weights are of another model: {sorted(own.keys() ^ tensors.keys())[:4]}")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
