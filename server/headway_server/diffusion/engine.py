"""The thread that removes noise, one step after another, of images that are at different steps (docs/engine.md).

A step takes submitted images, drops cancelled ones, and chooses whose turn it is (`turns.py`). It runs the denoiser
once for all rows, each at its own time, advances each latent (`samplers.py`), and sends finished ones. An image that is
guided takes two rows. Images join and leave between any two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.diffusion.samplers import Latent, Trajectory, guide
from headway_server.diffusion.turns import Turns
from headway_server.errors import DeadlineError, ModelRunError, is_failure
from headway_server.observers import NO_OBSERVER, ModelId, ModelUsage, Observer, QueueEvent, StepEvent
from headway_server.runtime import BusyLanes
from headway_server.runtime.worker import Pending, SteppingWorker, run_error

LATENT: Final = "latent"
TIMESTEP: Final = "timestep"
LABEL: Final = "label"
TEXT: Final = "text"
TEXT_MASK: Final = "text_mask"
POOLED: Final = "pooled"
INPAINTING: Final = "inpainting"
GUIDANCE: Final = "guidance"
LEAST_ROOM: Final = 2
"""Minimum rows of a step: those of one guided image."""

Denoise = Callable[[Mapping[str, NDArray[Any]]], Latent]
"""Predictions (R, C, S, S) of rows: `latent` (R, C, S, S) float32, `timestep` (R,) float32, and conditions."""
Condition = Mapping[str, NDArray[Any]]
"""A condition, as a row of the denoiser's inputs: `label` () int64, or `text` (T, D) float32 with `text_mask` (T,)
int64; and what else it reads: `pooled` (P,), `inpainting` (1 + C, S, S) and `guidance` (), float32. All images of an
engine have the same inputs, of the same shapes."""

_log = structlog.get_logger(__name__)


class DenoisingError(ModelRunError):
    """The model could not be run; the log says why. A bug or a broken machine, never the caller's fault."""


class Progress(NamedTuple):
    """How far an image is."""

    num_made: int
    """Steps that were made."""
    image: Latent
    """Latent of the current prediction."""


class Denoising(Pending[Latent]):
    """One image to be denoised, and its result.

    Made on the event loop. Its trajectory belongs to the engine's thread, once it was submitted, and its future to the
    event loop.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        condition: Condition,
        other_condition: Condition,
        guidance: float,
        deadline: float | None,
        wants_progress: bool = False,
    ) -> None:
        """Makes an image's denoising.

        Args:
            trajectory: At its beginning.
            condition: Condition of the image.
            other_condition: The negative condition of guidance.
            guidance: Scale of classifier-free guidance; 1 disables it, and `other_condition` is not read.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            wants_progress: True for progress after each step.
        """
        super().__init__()
        self.trajectory = trajectory
        self.condition = condition
        self.other_condition = other_condition
        self.guidance = guidance
        self.deadline = float("inf") if deadline is None else deadline
        self.wants_progress = wants_progress
        self.progress: Progress | None = None  # the newest that was not read yet; the event loop's
        self.arrival = asyncio.Event()
        self.cancelled = False
        self.arrived_at = self.started_at = self.finished_at = 0.0

    def end(self, outcome: Latent | BaseException) -> None:
        """See `Pending`; wakes the reader of its progress."""
        super().end(outcome)
        self.arrival.set()

    @property
    def is_guided(self) -> bool:
        """True if it takes classifier-free guidance, and so two rows of a step."""
        return self.guidance != 1

    @property
    def num_rows(self) -> int:
        """Rows that it takes of a step."""
        return 1 + self.is_guided

    @property
    def work(self) -> int:
        """Rows of all its steps together."""
        return self.num_rows * self.trajectory.num_steps

    def __repr__(self) -> str:
        return f"Denoising({self.trajectory!r}, {self.num_rows} rows{', cancelled' * self.cancelled})"


class DenoisingEngine(SteppingWorker[tuple[list[Denoising], str]]):
    """Runs images through a denoiser."""

    def __init__(
        self,
        denoise: Denoise,
        *,
        max_rows: int,
        model: ModelId,
        busy_lanes: BusyLanes | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Makes an engine; `start` lets it run.

        Args:
            denoise: Runs the model. Only the engine's thread calls it.
            max_rows: Maximum rows of a step, at least `LEAST_ROOM`.
            model: For the thread, the log and the observer.
            busy_lanes: Counter of the lanes that share the cores; None: the engine has them alone.
            observer: Notified of every step and of images that leave the queue.
        """
        assert max_rows >= LEAST_ROOM, "the settings check it"
        super().__init__(f"denoiser-{model.name}", DenoisingError, busy_lanes=busy_lanes)
        self._denoise = denoise
        self._max_rows = max_rows
        self._model = model
        self._observer = observer
        self._turns: Turns[Denoising] = Turns()
        self._num_running = 0  # rows of the present step
        self._num_started = 0

    def __repr__(self) -> str:
        return f"DenoisingEngine({self._model.name}, {self.state}, {self._turns!r}, at most {self._max_rows} rows)"

    @property
    def has_work(self) -> bool:
        """True if there are images."""
        return len(self._turns) > 0

    def usage(self) -> ModelUsage:
        """Returns the number of images waiting for their first step, and the rows of the current step."""
        return ModelUsage(num_waiting=self._num_waiting, num_slots=self._max_rows, num_used_slots=self._num_running)

    @property
    def _num_waiting(self) -> int:
        return max(0, len(self._turns) - self._num_started)

    async def run(self, denoisings: Sequence[Denoising], caller: str = "") -> list[Latent]:
        """Waits for the latents of a call's images. If one fails, or the caller disconnects, all are cancelled.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engine was closed.
            DenoisingError: The model could not be run.
        """
        self._submit_denoisings(denoisings, caller)
        try:
            return await asyncio.gather(*(denoising.result for denoising in denoisings))
        finally:
            _cancel(denoisings)

    async def stream(self, denoising: Denoising, caller: str = "") -> AsyncGenerator[Progress, None]:
        """Yields the progress of an image; a slow reader gets only the newest step. Its `result` is set afterwards.

        Errors are those of `run`.
        """
        self._submit_denoisings([denoising], caller)
        try:
            while not denoising.result.done():
                await denoising.arrival.wait()
                denoising.arrival.clear()
                progress, denoising.progress = denoising.progress, None
                if progress is not None:
                    yield progress
            denoising.result.result()
        finally:
            _cancel([denoising])

    def _submit_denoisings(self, denoisings: Sequence[Denoising], caller: str) -> None:
        """Hands denoisings to the thread; on the event loop."""
        now = time.monotonic()
        for denoising in denoisings:
            denoising.arrived_at = now
        self._submit(denoisings, (list(denoisings), caller))

    def _take_in(self, message: tuple[list[Denoising], str]) -> None:
        self._turns.add(*message)

    def _release(self) -> None:
        self._turns.remove(self._turns.members())

    def _step(self) -> None:
        """Drops cancelled images, and makes one step of the images whose turn it is."""
        self._drop_unwanted()
        chosen = self._turns.take(self._max_rows)
        if not chosen:
            return
        started = time.monotonic()
        for denoising in chosen:
            if not denoising.started_at:
                denoising.started_at = started
                self._num_started += 1
                self._report_left(denoising, "started", started)
        self._num_running = sum(denoising.num_rows for denoising in chosen)
        ends: list[tuple[Denoising, Latent | Exception]] = []
        parts: list[tuple[Denoising, Progress]] = []
        try:
            predictions = self._predictions(chosen)
        except BaseException as error:  # the step's callers get any error, and the thread continues
            if not is_failure(error):
                raise
            _log.error("a denoising step failed", model=self._model.name, num_images=len(chosen), exc_info=error)
            ends = [(denoising, run_error(DenoisingError)) for denoising in chosen]
        else:
            finished = time.monotonic()
            self._report_step(finished - started)
            for denoising, predicted in zip(chosen, predictions, strict=True):
                self._move(denoising, predicted, parts, ends, finished)
        self._num_running = 0
        self._leave([denoising for denoising, _ in ends])
        if parts or ends:
            self._post(_deliver, parts, ends)

    def _predictions(self, chosen: Sequence[Denoising]) -> list[Latent]:
        """Runs the model once for all rows, and applies guidance; returns a prediction for each image."""
        rows = [(denoising, denoising.condition) for denoising in chosen]
        rows += [(denoising, denoising.other_condition) for denoising in chosen if denoising.is_guided]
        found = self._denoise(
            {
                LATENT: np.stack([denoising.trajectory.latent for denoising, _ in rows]),
                TIMESTEP: np.array([denoising.trajectory.time for denoising, _ in rows], np.float32),
                **{name: np.stack([condition[name] for _, condition in rows]) for name in rows[0][1]},
            }
        )
        others = iter(found[len(chosen) :])
        return [
            guide(predicted, next(others), denoising.guidance) if denoising.is_guided else predicted
            for denoising, predicted in zip(chosen, found, strict=False)
        ]

    def _move(
        self,
        denoising: Denoising,
        predicted: Latent,
        parts: list[tuple[Denoising, Progress]],
        ends: list[tuple[Denoising, Latent | Exception]],
        now: float,
    ) -> None:
        """Advances a denoising by a step, and collects its results."""
        trajectory = denoising.trajectory
        image = trajectory.advance(predicted)
        if not np.isfinite(trajectory.latent).all():
            _log.error("a latent is not finite", model=self._model.name, step=trajectory.num_made)
            ends.append((denoising, run_error(DenoisingError)))
            return
        if denoising.wants_progress:
            parts.append((denoising, Progress(trajectory.num_made, image)))
        if trajectory.is_finished:
            denoising.finished_at = now
            ends.append((denoising, trajectory.latent))

    def _drop_unwanted(self) -> None:
        """Removes denoisings whose caller has disconnected or whose deadline has passed."""
        now = time.monotonic()
        late: list[tuple[Denoising, Latent | Exception]] = []
        gone: list[Denoising] = []
        for denoising in self._turns.members():
            if denoising.cancelled:
                gone.append(denoising)
            elif denoising.deadline <= now:
                made, count = denoising.trajectory.num_made, denoising.trajectory.num_steps
                error = DeadlineError(f"the deadline passed after {made} of {count} steps")
                late.append((denoising, error))
        for denoising in (*gone, *(one for one, _ in late)):
            if not denoising.started_at:
                self._report_left(denoising, "cancelled" if denoising.cancelled else "expired", now)
        self._leave([*gone, *(denoising for denoising, _ in late)])
        if late:
            self._post(_deliver, [], late)

    def _leave(self, denoisings: Sequence[Denoising]) -> None:
        self._num_started -= sum(1 for denoising in denoisings if denoising.started_at)
        self._turns.remove(denoisings)

    def _report_left(
        self, denoising: Denoising, reason: Literal["started", "expired", "cancelled"], now: float
    ) -> None:
        if self._observer is not NO_OBSERVER:
            waited = now - denoising.arrived_at
            self._observer.left_queue(
                QueueEvent(model=self._model, queue_s=waited, reason=reason, num_waiting=self._num_waiting)
            )

    def _report_step(self, run_s: float) -> None:
        if self._observer is not NO_OBSERVER:
            self._observer.step_finished(
                StepEvent(
                    model=self._model,
                    kind="denoise",
                    num_rows=self._num_running,
                    num_tokens=self._num_running,
                    num_waiting=self._num_waiting,
                    run_s=run_s,
                )
            )


def _deliver(parts: Sequence[tuple[Denoising, Progress]], ends: Sequence[tuple[Denoising, Latent | Exception]]) -> None:
    """Sends the results of steps; on the event loop."""
    for denoising, progress in parts:
        denoising.progress = progress
        denoising.arrival.set()
    for denoising, outcome in ends:
        denoising.end(outcome)


def _cancel(denoisings: Iterable[Denoising]) -> None:
    """Makes denoisings that are not finished leave the engine before its next step."""
    for denoising in denoisings:
        denoising.cancelled = True
        denoising.result.cancel()  # no effect on a finished result
