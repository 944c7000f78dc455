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
        flops_per_unit: Floating-point operations for a unit.
        peak_flops: Matrix peak of the devices, in operations a second; None where it is not known.
    """

    def __init__(
        self,
        console: Console,
        folder: Path,
        *,
        unit: str,
        num_steps: int,
        first_step: int,
        enabled: bool,
        flops_per_unit: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._console = console
        self._unit = unit
        self._num_steps = num_steps
        self._enabled = enabled
        self._flops_per_unit = flops_per_unit
        self._peak_flops = peak_flops
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
        self._trained_s = 0.0
        self._waited_s = 0.0
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
        if self._enabled and self._trained_s:
            self._console.print(f"{self.data_wait_share:.1%} of the training time was spent waiting for data")

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        num_units: int,
        duration_s: float,
        data_wait_s: float = 0.0,
    ) -> None:
        """Takes note of a finished step.

        Args:
            step: Its number, from 1.
            loss: In nats a target.
            learning_rate: That it was made with.
            num_units: Tokens or images of its batch.
            duration_s: What it took, the wait for its batch included.
            data_wait_s: What the wait for its batch took.
        """
        if not self._enabled:
            return
        self._recent.append((num_units, duration_s))
        self._trained_s += duration_s
        self._waited_s += data_wait_s
        status = f"loss {loss:.3f}  {self.throughput:,.0f} {self._unit}/s  data {self.data_wait_share:.0%}"
        if self.utilisation is not None:
            status += f"  {self.utilisation:.0%} of the matrix peak"
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

    @property
    def data_wait_share(self) -> float:
        """Share of the training time that was spent waiting for batches."""
        return self._waited_s / max(1e-9, self._trained_s)

    @property
    def utilisation(self) -> float | None:
        """Share of the devices' matrix peak that the last steps' matrix products made use of; None if unknown."""
        if self._peak_flops is None or self._flops_per_unit is None:
            return None
        return self.throughput * self._flops_per_unit / self._peak_flops

    def _left(self, step: int) -> str:
        """Time left at the pace of the last steps, as minutes and seconds."""
        pace_s = sum(seconds for _, seconds in self._recent) / max(1, len(self._recent))
        minutes, seconds = divmod(round(pace_s * (self._num_steps - step)), 60)
        return f"{minutes}:{seconds:02d}"
