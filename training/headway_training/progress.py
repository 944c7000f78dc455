"""Shows and records how a training goes: a bar on a terminal, lines in a log, scalars for TensorBoard."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

LOG_INTERVAL_S = 10.0
"""Time between lines where the output is no terminal."""
SCALAR_EVERY_STEPS = 10
_WINDOW = 50


class TrainingDisplay:
    """The face of one training; on other processes than the first it shows nothing.

    Args:
        console: Where to write.
        folder: The run's folder; scalars go below it.
        unit: What the throughput counts.
        num_steps: Steps of the run.
        first_step: The step it starts from.
        enabled: Whether this process shows anything.
    """

    def __init__(
        self, console: Console, folder: Path, *, unit: str, num_steps: int, first_step: int, enabled: bool
    ) -> None:
        self._console = console
        self._unit = unit
        self._num_steps = num_steps
        self._enabled = enabled
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not enabled or not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=first_step, status="")
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1) if enabled else None
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # units and seconds of the last steps
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def step(self, step: int, *, loss: float, learning_rate: float, num_units: int, duration_s: float) -> None:
        """Takes note of a finished step: its loss in nats a target, its units and its duration."""
        if not self._enabled:
            return
        self._recent.append((num_units, duration_s))
        status = f"loss {loss:.3f}  {self.throughput:,.0f} {self._unit}/s"
        self._bar.update(self._task, completed=step, status=status)
        if step % SCALAR_EVERY_STEPS == 0:
            scalars = {"train/loss": loss, "train/learning_rate": learning_rate, "train/throughput": self.throughput}
            self.scalars(step, scalars)
        if not self._console.is_terminal and time.monotonic() - self._last_line_s >= LOG_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._console.print(f"step {step:,}/{self._num_steps:,}  {status}  {self._left(step)} left")

    def validation(self, step: int, metrics: dict[str, float], *, best: bool) -> None:
        """Shows and records a validation."""
        if not self._enabled:
            return
        self.scalars(step, {f"valid/{name}": value for name, value in metrics.items()})
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._console.print(f"step {step:,}/{self._num_steps:,}  validation: {shown}{'  (best)' if best else ''}")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes scalars for TensorBoard."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    @property
    def throughput(self) -> float:
        """Units a second over the last steps, validation not counted."""
        return sum(units for units, _ in self._recent) / max(1e-9, sum(seconds for _, seconds in self._recent))

    def _left(self, step: int) -> str:
        """Time left at the pace of the last steps, as minutes and seconds."""
        pace_s = sum(seconds for _, seconds in self._recent) / max(1, len(self._recent))
        minutes, seconds = divmod(round(pace_s * (self._num_steps - step)), 60)
        return f"{minutes}:{seconds:02d}"
