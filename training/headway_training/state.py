"""The state of a run on disk: everything that a resumed run needs to go on exactly where it was.

A state is the file `state/step-<number>.pt`. It is written under another name and renamed, so it is whole or not there;
then older ones are removed. Random numbers are functions of the step and need no state.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from headway_training.errors import ResumeError


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
        self._parts: list[nn.Module | Optimizer] = [model, *optimizers, *([] if average is None else [average])]

    def __repr__(self) -> str:
        return f"RunState({self.folder}, latest={latest_state(self.folder.parent)})"

    def save(self, progress: Progress) -> None:
        """Writes the state, then removes older ones."""
        target = self.folder / f"step-{progress.step}.pt"
        if target.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        staging = self.folder / "writing.pt"
        torch.save({"progress": asdict(progress), "parts": [part.state_dict() for part in self._parts]}, staging)
        staging.rename(target)
        for path in self.folder.glob("step-*.pt"):
            if path != target:
                path.unlink()

    def load(self) -> Progress:
        """Puts the last state into model, optimizers and average; without one, nothing is changed.

        Raises:
            ResumeError: The state cannot be read, or belongs to another model.
        """
        path = latest_state(self.folder.parent)
        if path is None:
            return Progress()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            for part, stored in zip(self._parts, state["parts"], strict=True):
                part.load_state_dict(stored)
            return Progress(**state["progress"])
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ResumeError(
                f"{path} cannot be resumed: {reason}. Remove {self.folder.parent} and start over"
            ) from error

    def save_best(self, model: nn.Module) -> None:
        """Keeps the weights as the best so far."""
        self.best_file.parent.mkdir(parents=True, exist_ok=True)
        staging = self.best_file.with_suffix(".writing")
        save_model(model, str(staging))
        staging.replace(self.best_file)

    def load_best(self, model: nn.Module) -> None:
        """Puts the best weights into the model."""
        load_model(model, self.best_file)


def latest_state(folder: Path) -> Path | None:
    """The file of the last state of the run in a folder; None where there is none."""
    states = (folder / "state").glob("step-*.pt")
    return max(states, key=lambda path: int(path.stem.removeprefix("step-")), default=None)
