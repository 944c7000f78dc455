"""The training loop: one task, one model, any number of devices, and a state on disk to resume from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn

from headway_training.averaging import WeightAverage
from headway_training.errors import StoppedError
from headway_training.hardware import device_peak_flops
from headway_training.interruption import StopSignal
from headway_training.models import Model
from headway_training.objective import DropoutSchedule, Objective, load_teacher
from headway_training.optimizers import make_optimizer
from headway_training.plan import StepPlan, step_seed
from headway_training.progress import TrainingDisplay
from headway_training.recipes import Recipe
from headway_training.schedule import learning_rate
from headway_training.sizing import Sizing, attention_kind, expected_throughput
from headway_training.state import RunState
from headway_training.tasks.base import IGNORED, Metrics, Task, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    """What a finished training says of itself."""

    step_count: int
    epoch_count: float
    wall_time_s: float
    best_step: int
    history: list[dict[str, float]]


class Trainer:
    """Trains a model until the plan's last step, and keeps the weights that validated best.

    Args:
        task: Data, loss and metrics.
        model: The model, with fresh weights, fp32.
        recipe: How the weights are found.
        folder: The run's folder.
        seed: Seed of the run.
        console: Where progress is shown.
        accelerator: The devices; None: what is found, or what `accelerate launch` or `torchrun` set up.
        flops_per_unit: Floating-point operations for a token or an image, to tell how much of a GPU is used.
    """

    def __init__(
        self,
        *,
        task: Task,
        model: Model,
        recipe: Recipe,
        folder: Path,
        seed: int,
        console: Console,
        accelerator: Accelerator | None = None,
        flops_per_unit: float | None = None,
    ) -> None:
        # Precision is this package's own business (LossModule), whatever `accelerate`'s configuration says.
        self.accelerator = accelerator or Accelerator(mixed_precision="no")
        self._task = task
        settings = self._settings = recipe.optimization
        self._seed = seed
        self._folder = folder
        self._console = console
        self.model = model.use_attention(attention_kind(self.accelerator.device)).to(self.accelerator.device)
        teacher = load_teacher(recipe, task)
        if teacher is not None:
            teacher.to(self.accelerator.device)
        self._objective = Objective(task, model, recipe, self.accelerator.device.type, teacher)
        self._module = self.accelerator.prepare(self._objective)
        self._optimizer = make_optimizer(model, settings)
        self._average = WeightAverage(model, settings.average_decay) if settings.average_decay else None
        self._plan = StepPlan(task, settings, seed)
        self._dropout = DropoutSchedule(model, recipe.regularization, self._plan.num_steps)
        self._state = RunState(folder)
        self._flops_per_unit = flops_per_unit
        self._clock_s = time.perf_counter()
        self._data_wait_s = 0.0
        self.progress = self._state.load(model, self._optimizer, self._average)

    def __repr__(self) -> str:
        return f"Trainer(step={self.progress.step}, num_steps={self.num_steps}, device={self.accelerator.device})"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._plan.num_steps

    def fit(self, until_step: int | None = None) -> TrainingSummary:
        """Trains, from where the state stands, to the last step or to `until_step`; then loads the best weights.

        Raises:
            StoppedError: SIGINT or SIGTERM came; the state was written after the step that was under way.
        """
        end = self.num_steps if until_step is None else min(until_step, self.num_steps)
        with self._display() as display, StopSignal() as stop:
            self._clock_s = time.perf_counter()
            for step, batch in self._batches(self.progress.step, end):
                self._train_step(step, batch, display)
                self._after_step(display)
                if stop.received and self.progress.step < self.num_steps:
                    self._save()
                    raise StoppedError(
                        f"stopped by {stop.received} after step {self.progress.step:,} of {self.num_steps:,}"
                    )
        if self.progress.step >= self.num_steps:
            self._save()
            self.accelerator.wait_for_everyone()  # the first process writes the best weights, and all read them
            self._state.load_best(self.model)
        return TrainingSummary(
            step_count=self.progress.step,
            epoch_count=self._plan.epochs_at(self.progress.step),
            wall_time_s=self.progress.wall_time_s,
            best_step=self.progress.best_step,
            history=self.progress.history,
        )

    def calibrate(self) -> None:
        """Fits, on validation data, what the task needs beside the weights to answer."""
        self.model.eval()
        self._task.calibrate(self.model)

    def evaluate(self, part: Literal["valid", "test"]) -> Metrics:
        """Measures the model as it is, in fp32, on a part of the data."""
        self.model.eval()
        return self._task.evaluate(self.model, part)

    def expected_throughput(self, sizing: Sizing) -> tuple[float, str]:
        """About how many units a second a process will train on, and how that is known."""
        bf16 = self._settings.precision == "bf16"
        return expected_throughput(sizing, self._objective, bf16=bf16, device=self.accelerator.device)

    def _display(self) -> TrainingDisplay:
        return TrainingDisplay(
            self._console,
            self._folder,
            unit=self._task.unit,
            num_steps=self.num_steps,
            first_step=self.progress.step,
            enabled=self.accelerator.is_main_process,
            flops_per_unit=self._flops_per_unit,
            peak_flops=self._peak_flops(),
        )

    def _peak_flops(self) -> float | None:
        """Matrix peak of all devices together, where it is known."""
        peak = device_peak_flops(self.accelerator.device)
        return None if peak is None else peak * self.accelerator.num_processes

    def _batches(self, start: int, end: int) -> Iterator[tuple[int, TrainingBatch]]:
        """Steps with their batches; the next batch is made while the model works on the one at hand."""
        with ThreadPoolExecutor(max_workers=1) as worker:
            coming = worker.submit(self._make_batch, start) if start < end else None
            for step in range(start, end):
                assert coming is not None
                asked_s = time.perf_counter()
                batch = coming.result()
                self._data_wait_s = time.perf_counter() - asked_s
                coming = worker.submit(self._make_batch, step + 1) if step + 1 < end else None
                yield step, batch

    def _make_batch(self, step: int) -> TrainingBatch:
        return self._task.collate(self._plan.batch(step), self._plan.generator(step))

    def _train_step(self, step: int, batch: TrainingBatch, display: TrainingDisplay) -> None:
        """One optimizer step over the whole batch, of which every process takes its rows."""
        self.model.train()
        self._objective.train()
        self._dropout.apply(step)
        rate = learning_rate(self._settings, step, self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(step_seed(self._seed, step, 1 + self.accelerator.process_index))
        self._optimizer.zero_grad(set_to_none=True)
        # Data parallelism averages gradients over processes, so each loss is scaled to make that the mean over targets.
        loss = self._module(self._share(batch)) * (self.accelerator.num_processes / batch.num_targets)
        self.accelerator.backward(loss)
        if self._settings.gradient_clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_clip)
        self._optimizer.step()
        if self._average is not None:
            self._average.update(step)
        value = float(self.accelerator.reduce(loss.detach(), reduction="mean"))
        self.progress.step = step + 1
        self.progress.loss_sum += value
        self.progress.loss_count += 1
        display.step(
            step + 1,
            loss=value,
            learning_rate=rate,
            num_units=batch.num_units,
            duration_s=self._lap(),
            data_wait_s=self._data_wait_s,
        )

    def _share(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """This process's rows of a batch, on its device; without any, a row whose targets are ignored."""
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        shares = {name: tensor[rank::count] for name, tensor in batch.tensors.items()}
        if not len(shares["targets"]):
            shares = {name: tensor[:1].clone() for name, tensor in batch.tensors.items()}
            shares["targets"].fill_(IGNORED)
        return {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in shares.items()}

    def _after_step(self, display: TrainingDisplay) -> None:
        """Validates and saves where the plan says so."""
        step = self.progress.step
        if step in self._plan.evaluation_steps(self._settings.evaluations):
            if self.accelerator.is_main_process:
                self._validate(display)
            self._lap()
            self.progress.loss_sum, self.progress.loss_count = 0.0, 0
        if step % self._settings.state_every_steps == 0:
            self._save()

    def _lap(self) -> float:
        """Seconds since the last call, which are added to the run's wall time."""
        now_s = time.perf_counter()
        duration_s, self._clock_s = now_s - self._clock_s, now_s
        self.progress.wall_time_s += duration_s
        return duration_s

    def _validate(self, display: TrainingDisplay) -> None:
        """Measures the averaged weights on the validation part and keeps them if they are the best."""
        with self._averaged_weights():
            metrics = self._measure_valid()
            value = metrics[self._task.metric]
            best = self._task.is_better(value, self.progress.best_value)
            if best:
                self.progress.best_value, self.progress.best_step = value, self.progress.step
                self._state.save_best(self.model)
        loss = self.progress.loss_sum / max(1, self.progress.loss_count)
        self.progress.history.append({"step": self.progress.step, "train_loss": loss, **metrics})
        display.validation(self.progress.step, {"train_loss": loss, **metrics}, best=best)

    def _measure_valid(self) -> dict[str, float]:
        """The numbers among the validation metrics, measured in the precision of training."""
        self.model.eval()
        enabled = self._settings.precision == "bf16"
        with torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16, enabled=enabled):
            metrics = self._task.evaluate(self.model, "valid")
        return {name: value for name, value in metrics.items() if isinstance(value, float)}

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        with self._average.applied() if self._average is not None else nullcontext():
            yield

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            self._state.save(self.progress, self.model, self._optimizer, self._average)
