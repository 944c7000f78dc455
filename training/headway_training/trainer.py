"""The training loop: one task, one model, any number of devices, and a state on disk to resume from."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from rich.console import Console
from torch import Tensor, nn

from headway_training.batches import StepPlan, step_seed
from headway_training.checkpoint import HUGGINGFACE
from headway_training.errors import RecipeError, StoppedError
from headway_training.hardware import device_peak_flops
from headway_training.models import Model
from headway_training.optimization import checkpoint_activations, learning_rate, make_average, make_optimizers
from headway_training.processes import agree, exchange
from headway_training.progress import TrainingDisplay
from headway_training.recipes import OptimizationSettings, Recipe
from headway_training.sizing import attention_kind
from headway_training.state import RunState
from headway_training.tasks import IGNORED, Task, TrainingBatch

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that see all rows of a batch at once; no model of the kit has one."""


class Objective(nn.Module):
    """Model and loss in one forward call, which is what data parallelism and autocast wrap."""

    def __init__(self, task: Task, model: nn.Module, settings: OptimizationSettings, device_type: str) -> None:
        super().__init__()
        self.model = model
        self._task = task
        self._settings = settings
        self._device_type = device_type

    def forward(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The loss summed over the targets of a batch, a scalar."""
        bf16 = self._settings.precision == "bf16"
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=bf16):
            return self._task.loss(self.model, tensors, self._settings.label_smoothing)


class StopSignal:
    """Takes note of SIGINT and SIGTERM inside its `with` block, so that the step under way can be finished.

    A second signal has its usual effect.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __repr__(self) -> str:
        return f"StopSignal(received={self.received})"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other thread
            self._handlers = {
                number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the signature of handlers)
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class Trainer:
    """Trains a model until the plan's last step, and keeps the weights with the best validation.

    Args:
        task: Data, loss and metrics.
        model: The model, fp32, before the task has wrapped it.
        recipe: How the weights are found.
        folder: The run's folder.
        seed: Seed of the run.
        console: Where progress is shown.
        accelerator: The devices and trackers; None: the devices found, or set up by `accelerate launch` or `torchrun`.
        flops_per_unit: Floating-point operations for a token or an image, from which a GPU's utilisation is shown.

    Raises:
        RecipeError: The model cannot be trained by these settings.
        ResumeError: The state in the folder cannot be read, or belongs to another model.
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
        # The recipe decides the precision (`Objective`), whatever the configuration of `accelerate` says.
        self.accelerator = accelerator or Accelerator(mixed_precision="no")
        device = self.accelerator.device
        self.task = task
        self._seed = seed
        self._console = console
        self._flops_per_unit = flops_per_unit
        settings = self._settings = recipe.optimization
        self.model = task.wrap(model).use_attention(attention_kind(device, recipe.model)).to(device)
        self._average = make_average(self.model, settings.average_decay)
        if settings.activation_checkpointing:
            try:
                checkpoint_activations(self.model)
            except ValueError as error:
                raise RecipeError(str(error)) from error
        self.objective = Objective(task, self.model, settings, device.type)
        self._check_rows()
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(
            find_unused_parameters=not task.uses_all_weights or recipe.architecture == HUGGINGFACE
        )
        self._module = self.accelerator.prepare(self.objective)
        self._optimizers = make_optimizers(self.model, settings)
        self._plan = StepPlan(task.num_batches, task.epoch_batches, settings, seed)
        self._state = RunState(folder, self.model, self._optimizers, self._average)
        self._stop = StopSignal()
        self._is_over = self._is_told_to_stop = False
        self._clock_s = time.perf_counter()
        self._data_wait_s = 0.0
        self.progress = self._state.load()
        if self._state.damaged and self.accelerator.is_main_process:
            found = f"{'; '.join(self._state.damaged)}. The run goes on from step {self.progress.step:,}"
            console.print(found, highlight=False)

    def __repr__(self) -> str:
        return f"Trainer(step={self.progress.step}, num_steps={self.num_steps}, device={self.accelerator.device})"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._plan.num_steps

    @property
    def num_epochs(self) -> float:
        """Passes over the data so far."""
        return self._plan.epochs_at(self.progress.step)

    def fit(self, until_step: int | None = None) -> None:
        """Trains, from where the state stands, to the last step or to `until_step`; then loads the best weights.

        Raises:
            StoppedError: SIGINT or SIGTERM came; the state was written after the step that was under way.
        """
        end = self.num_steps if until_step is None else min(until_step, self.num_steps)
        with self._display() as display, StopSignal() as self._stop:
            self._clock_s = time.perf_counter()
            (self._is_over,) = agree(self._is_enough())
            for step, batch in self._batches(end if self._is_over else self.progress.step, end):
                self._train_step(step, batch, display)
                self._after_step(display)
                if self._is_over:
                    break
                if self._is_stopped() and self.progress.step < self.num_steps:
                    self._save()
                    name = self._stop.received or "a signal to another process"
                    raise StoppedError(f"stopped by {name} after step {self.progress.step:,} of {self.num_steps:,}")
        if self._is_over or self.progress.step >= self.num_steps:
            self._save()
            agree()  # the first process writes the best weights, and all read them
            self._state.load_best(self.model)

    def _check_rows(self) -> None:
        """Checks that processes and parts of a batch learn what the whole batch teaches.

        Raises:
            RecipeError: A loss or a layer looks at several rows of a batch at once, of which it would see a part.
        """
        parts, processes = self._settings.gradient_accumulation, self.accelerator.num_processes
        if self.task.compares_rows and parts > 1:
            raise RecipeError(
                f"optimization.gradient_accumulation is {parts}, and must be 1: the loss compares all rows of a batch "
                "with each other, and parts would not see each other's. Memory is saved by more processes, by "
                "optimization.activation_checkpointing=true, and by a smaller optimization.batch_size"
            )
        norms = [name for name, module in self.model.named_modules() if isinstance(module, _BATCH_NORMS)]
        if norms and parts * processes > 1:
            raise RecipeError(
                f"the model normalises by the mean of a batch's rows ({norms[0]}), of which {processes} processes and "
                f"optimization.gradient_accumulation={parts} would see parts: train it in one process, and with "
                "optimization.gradient_accumulation=1"
            )

    def _display(self) -> TrainingDisplay:
        peak = device_peak_flops(self.accelerator.device)
        return TrainingDisplay(
            self._console,
            self.accelerator,
            unit=self.task.unit,
            num_steps=self.num_steps,
            first_step=self.progress.step,
            flops_per_unit=self._flops_per_unit,
            peak_flops=None if peak is None else peak * self.accelerator.num_processes,
        )

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
        return self.task.collate(self._plan.batch(step), self._plan.generator(step))

    def _is_stopped(self) -> bool:
        """True if any process received a signal; all of them learn of it after the same step."""
        is_alone = self.accelerator.num_processes == 1
        return self._stop.received is not None if is_alone else self._is_told_to_stop

    def _train_step(self, step: int, batch: TrainingBatch, display: TrainingDisplay) -> None:
        """One optimizer step over the whole batch, of which every process takes its rows."""
        self.objective.train()
        rate = learning_rate(self._settings, step, self.num_steps)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate
        torch.manual_seed(step_seed(self._seed, step, 1 + self.accelerator.process_index))
        with exchange():
            self.task.before_step(self.model, step, self.num_steps)
            loss = self._backward(batch)
            if self._settings.gradient_clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_clip)
            for optimizer in self._optimizers:
                optimizer.step()
            self.task.after_step(self.model, step, self.num_steps)
        if self._average is not None:
            self._average.update_parameters(self.model)
        found = torch.stack((loss, loss.new_tensor(float(self._stop.received is not None))))
        value, stopped = self.accelerator.reduce(found, reduction="mean").tolist()
        self._is_told_to_stop = stopped > 0
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

    def _backward(self, batch: TrainingBatch) -> Tensor:
        """Computes the gradient of the whole batch, part by part, and the loss, a scalar in nats a target.

        Data parallelism averages gradients over processes, so a process's loss is scaled to make that average the mean
        over all targets.
        """
        shares = self._shares(batch)
        scale = self.accelerator.num_processes / max(1, batch.num_targets)
        total = torch.zeros((), device=self.accelerator.device)
        for number, tensors in enumerate(shares, start=1):
            # Gradients are exchanged with the last part alone.
            with nullcontext() if number == len(shares) else self.accelerator.no_sync(self._module):
                loss = self._module(tensors) * scale
                self.accelerator.backward(loss)
                total += loss.detach()
        return total

    def _shares(self, batch: TrainingBatch) -> list[dict[str, Tensor]]:
        """This process's rows of a batch, on its device, in the parts they are worked through in.

        All processes have equally many rows, and so equally many parts: one that would have a row less than others has
        the first row again, whose targets are ignored.
        """
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        own = {name: tensor[rank::count] for name, tensor in batch.tensors.items()}
        if rank and len(own["targets"]) * count < len(batch.tensors["targets"]):
            again = {name: tensor[:1] for name, tensor in batch.tensors.items()}
            again["targets"] = torch.full_like(again["targets"], IGNORED)
            own = {name: torch.cat((tensor, again[name])) for name, tensor in own.items()}
        parts = min(self._settings.gradient_accumulation, len(own["targets"]))
        shares = [{name: tensor[part::parts] for name, tensor in own.items()} for part in range(parts)]
        device = self.accelerator.device
        return [{name: tensor.to(device, non_blocking=True) for name, tensor in share.items()} for share in shares]

    def _after_step(self, display: TrainingDisplay) -> None:
        """Validates and saves where the plan says so; the first process validates, and the others wait for it."""
        step = self.progress.step
        if step in self._plan.evaluation_steps:
            if self.accelerator.is_main_process:
                self._validate(display)
            is_stopped = self._stop.received is not None or self._is_told_to_stop
            self._is_over, self._is_told_to_stop = agree(self._is_enough(), is_stopped)
            self._lap()
            self.progress.loss_sum, self.progress.loss_count = 0.0, 0
        if step % self._settings.state_every_steps == 0:
            self._save()

    def _is_enough(self) -> bool:
        """True if the last validations were no better than one before them, as many in a row as the recipe waits for.

        The first process knows: only it validates.
        """
        since = [entry for entry in self.progress.history if entry["step"] > self.progress.best_step]
        return 0 < self._settings.patience <= len(since)

    def _lap(self) -> float:
        """Seconds since the last call, which are added to the run's wall time."""
        now_s = time.perf_counter()
        duration_s, self._clock_s = now_s - self._clock_s, now_s
        self.progress.wall_time_s += duration_s
        return duration_s

    def _validate(self, display: TrainingDisplay) -> None:
        """Measures the model, or the average of its weights, in the precision of training; keeps the best."""
        model = (self.model if self._average is None else self._average.module).eval()
        bf16 = self._settings.precision == "bf16"
        with torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16, enabled=bf16):
            measured = self.task.evaluate(model, "valid")
        metrics = {name: value for name, value in measured.items() if isinstance(value, float)}
        value = metrics[self.task.metric]
        best = self.task.is_better(value, self.progress.best_value)
        if best:
            self.progress.best_value, self.progress.best_step = value, self.progress.step
            self._state.save_best(model)
        metrics = {"train_loss": self.progress.loss_sum / max(1, self.progress.loss_count), **metrics}
        self.progress.history.append({"step": self.progress.step, **metrics})
        display.validation(self.progress.step, metrics, best=best)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            self._state.save(self.progress)
