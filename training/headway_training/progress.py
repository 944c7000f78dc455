"""Shows how a run goes, as a bar on a terminal or as lines in a log, and hands scalars to the run's trackers."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_INTERVAL_S = 10.0
"""Time between two lines where the output is no terminal."""
SCALARS_EVERY_STEPS = 10
_WINDOW = 50


class TrainingDisplay:
    """Shows one run; on other processes than the first it does nothing.

    Args:
        console: Where to write.
        accelerator: Has the trackers.
        unit: What the throughput counts.
        num_steps: Steps of the run.
        first_step: The step it starts from.
        flops_per_unit: Floating-point operations for a unit.
        peak_flops: Matrix peak of the devices, in operations a second; None if unknown.
    """

    def __init__(
        self,
        console: Console,
        accelerator: Accelerator,
        *,
        unit: str,
        num_steps: int,
        first_step: int,
        flops_per_unit: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._console = console
        self._accelerator = accelerator
        self._unit = unit
        self._num_steps = num_steps
        self._enabled = bool(accelerator.is_main_process)
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
            disable=not self._enabled or not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=first_step, status="")
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # units and seconds of the last steps
        self._trained_units = 0
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
        if self._enabled and self._trained_s:
            rate = self._trained_units / self._trained_s
            self._console.print(
                f"trained on {rate:,.0f} {self._unit}/s; {self.data_wait_share:.1%} of the training time was spent "
                "waiting for data"
            )

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
            duration_s: How long it took, the wait for its batch included.
            data_wait_s: How long that wait was.
        """
        if not self._enabled:
            return
        self._recent.append((num_units, duration_s))
        self._trained_units += num_units
        self._trained_s += duration_s
        self._waited_s += data_wait_s
        status = f"loss {loss:.3f}  {self.throughput:,.0f} {self._unit}/s  data {self.data_wait_share:.0%}"
        if self.utilisation is not None:
            status += f"  {self.utilisation:.0%} of the matrix peak"
        self._bar.update(self._task, completed=step, status=status)
        if step % SCALARS_EVERY_STEPS == 0:
            scalars = {"train/loss": loss, "train/learning_rate": learning_rate, "train/throughput": self.throughput}
            self._accelerator.log(scalars, step=step)
        if not self._console.is_terminal and time.monotonic() - self._last_line_s >= LOG_INTERVAL_S:
            self._last_line_s = time.monotonic()
            self._console.print(f"step {step:,}/{self._num_steps:,}  {status}  {self._left(step)} left")

    def validation(self, step: int, metrics: dict[str, float], *, best: bool) -> None:
        """Shows and records a validation."""
        if self._enabled:
            self._accelerator.log({f"valid/{name}": value for name, value in metrics.items()}, step=step)
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self._console.print(f"step {step:,}/{self._num_steps:,}  validation: {shown}{'  (best)' if best else ''}")

    @property
    def throughput(self) -> float:
        """Units a second over the last steps, without validation."""
        return sum(units for units, _ in self._recent) / max(1e-9, sum(seconds for _, seconds in self._recent))

    @property
    def data_wait_share(self) -> float:
        """Share of the training time that was spent waiting for batches."""
        return self._waited_s / max(1e-9, self._trained_s)

    @property
    def utilisation(self) -> float | None:
        """Share of the devices' matrix peak that the model's matrix products reach; None if it is unknown."""
        if self._peak_flops is None or self._flops_per_unit is None:
            return None
        return self.throughput * self._flops_per_unit / self._peak_flops

    def _left(self, step: int) -> str:
        """Time left at the pace of the last steps, as minutes and seconds."""
        pace_s = sum(seconds for _, seconds in self._recent) / max(1, len(self._recent))
        minutes, seconds = divmod(round(pace_s * (self._num_steps - step)), 60)
        return f"{minutes}:{seconds:02d}"
