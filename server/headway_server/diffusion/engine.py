"""The thread that removes noise, one step after another, of images that are at different steps (docs/engine.md).

A step: take in what has been submitted; drop what nobody waits for; choose whose turn it is (`turns.py`); run the
denoiser once for all rows, each at its own time; move each latent on (`samplers.py`); hand out what has finished.
An image that is guided takes two rows. Images join and leave between any two steps.
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
VELOCITY: Final = "velocity"
LEAST_ROOM: Final = 2
"""Rows that a step has room for at least: those of an image that is guided."""

Denoise = Callable[[Mapping[str, NDArray[Any]]], Latent]
"""Velocities (R, C, S, S) of rows: `latent` (R, C, S, S) float32, `timestep` (R,) float32, and what is drawn."""
Condition = Mapping[str, NDArray[Any]]
"""A condition, as a row of the denoiser's inputs: `label` () int64, or `text` (T, D) float32 with `text_mask` (T,)
int64. All images of an engine have the same inputs, of the same shapes."""

_log = structlog.get_logger(__name__)


class DenoisingError(ModelRunError):
    """The model could not be run; the log says why. A bug or a broken machine, never the caller's fault."""


class Progress(NamedTuple):
    """How far an image is."""

    num_made: int
    """Steps that were made."""
    image: Latent
    """The latent of the image as it is predicted now."""


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
        """Makes what can be submitted.

        Args:
            trajectory: At its beginning.
            condition: What the image is conditioned on.
            other_condition: The negative condition of guidance.
            guidance: Scale of classifier-free guidance; at 1 there is none, and `other_condition` is not read.
            deadline: When the caller stops waiting, by `time.monotonic`.
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
        """See `Pending`; wakes who reads its progress."""
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
    """Runs drawings through a denoiser."""

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
            max_rows: Most rows of a step, `LEAST_ROOM` at least.
            model: For the thread, the log and the observer.
            busy_lanes: Counts the engine among those that share the cores; None: it shares them with nobody.
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
        """True if there is any drawing."""
        return len(self._turns) > 0

    def usage(self) -> ModelUsage:
        """Returns how many images wait for their first step, and the rows of the present one."""
        return ModelUsage(num_waiting=self._num_waiting, num_slots=self._max_rows, num_used_slots=self._num_running)

    @property
    def _num_waiting(self) -> int:
        return max(0, len(self._turns) - self._num_started)

    async def run(self, drawings: Sequence[Denoising], caller: str = "") -> list[Latent]:
        """Waits for the latents of a call's images. When one fails, or the caller goes, all of them end.

        Raises:
            DeadlineError: The deadline passed.
            DrainingError: The engine was closed.
            DenoisingError: The model could not be run.
        """
        self._submit_drawings(drawings, caller)
        try:
            return await asyncio.gather(*(drawing.result for drawing in drawings))
        finally:
            _cancel(drawings)

    async def stream(self, drawing: Denoising, caller: str = "") -> AsyncGenerator[Progress, None]:
        """Yields the progress of an image; a slow reader gets the newest step alone. Its `result` is done afterwards.

        Errors are those of `run`.
        """
        self._submit_drawings([drawing], caller)
        try:
            while not drawing.result.done():
                await drawing.arrival.wait()
                drawing.arrival.clear()
                progress, drawing.progress = drawing.progress, None
                if progress is not None:
                    yield progress
            drawing.result.result()
        finally:
            _cancel([drawing])

    def _submit_drawings(self, drawings: Sequence[Denoising], caller: str) -> None:
        """Hands drawings to the thread; on the event loop."""
        now = time.monotonic()
        for drawing in drawings:
            drawing.arrived_at = now
        self._submit(drawings, (list(drawings), caller))

    def _take_in(self, message: tuple[list[Denoising], str]) -> None:
        self._turns.add(*message)

    def _release(self) -> None:
        self._turns.remove(self._turns.members())

    def _step(self) -> None:
        """Drops what nobody waits for, and makes one step of those whose turn it is."""
        self._drop_unwanted()
        chosen = self._turns.take(self._max_rows)
        if not chosen:
            return
        started = time.monotonic()
        for drawing in chosen:
            if not drawing.started_at:
                drawing.started_at = started
                self._num_started += 1
                self._report_left(drawing, "started", started)
        self._num_running = sum(drawing.num_rows for drawing in chosen)
        ends: list[tuple[Denoising, Latent | Exception]] = []
        parts: list[tuple[Denoising, Progress]] = []
        try:
            velocities = self._velocities(chosen)
        except BaseException as error:  # whatever it is, the callers of this step get it, and the thread goes on
            if not is_failure(error):
                raise
            _log.error("a denoising step failed", model=self._model.name, num_images=len(chosen), exc_info=error)
            ends = [(drawing, run_error(DenoisingError)) for drawing in chosen]
        else:
            finished = time.monotonic()
            self._report_step(finished - started)
            for drawing, velocity in zip(chosen, velocities, strict=True):
                self._move(drawing, velocity, parts, ends, finished)
        self._num_running = 0
        self._leave([drawing for drawing, _ in ends])
        if parts or ends:
            self._post(_deliver, parts, ends)

    def _velocities(self, chosen: Sequence[Denoising]) -> list[Latent]:
        """Runs the model once for all rows, and applies guidance; returns a velocity for each image."""
        rows = [(drawing, drawing.condition) for drawing in chosen]
        rows += [(drawing, drawing.other_condition) for drawing in chosen if drawing.is_guided]
        found = self._denoise(
            {
                LATENT: np.stack([drawing.trajectory.latent for drawing, _ in rows]),
                TIMESTEP: np.array([drawing.trajectory.time for drawing, _ in rows], np.float32),
                **{name: np.stack([condition[name] for _, condition in rows]) for name in rows[0][1]},
            }
        )
        others = iter(found[len(chosen) :])
        return [
            guide(velocity, next(others), drawing.guidance) if drawing.is_guided else velocity
            for drawing, velocity in zip(chosen, found, strict=False)
        ]

    def _move(
        self,
        drawing: Denoising,
        velocity: Latent,
        parts: list[tuple[Denoising, Progress]],
        ends: list[tuple[Denoising, Latent | Exception]],
        now: float,
    ) -> None:
        """Moves a drawing on by a step, and notes what is to be handed out."""
        trajectory = drawing.trajectory
        image = trajectory.advance(velocity)
        if not np.isfinite(trajectory.latent).all():
            _log.error("a latent is not finite", model=self._model.name, step=trajectory.num_made)
            ends.append((drawing, run_error(DenoisingError)))
            return
        if drawing.wants_progress:
            parts.append((drawing, Progress(trajectory.num_made, image)))
        if trajectory.is_finished:
            drawing.finished_at = now
            ends.append((drawing, trajectory.latent))

    def _drop_unwanted(self) -> None:
        """Takes out drawings whose caller has gone or whose deadline has passed."""
        now = time.monotonic()
        late: list[tuple[Denoising, Latent | Exception]] = []
        gone: list[Denoising] = []
        for drawing in self._turns.members():
            if drawing.cancelled:
                gone.append(drawing)
            elif drawing.deadline <= now:
                made, count = drawing.trajectory.num_made, drawing.trajectory.num_steps
                error = DeadlineError(f"the deadline passed after {made} of {count} steps")
                late.append((drawing, error))
        for drawing in (*gone, *(one for one, _ in late)):
            if not drawing.started_at:
                self._report_left(drawing, "cancelled" if drawing.cancelled else "expired", now)
        self._leave([*gone, *(drawing for drawing, _ in late)])
        if late:
            self._post(_deliver, [], late)

    def _leave(self, drawings: Sequence[Denoising]) -> None:
        self._num_started -= sum(1 for drawing in drawings if drawing.started_at)
        self._turns.remove(drawings)

    def _report_left(self, drawing: Denoising, reason: Literal["started", "expired", "cancelled"], now: float) -> None:
        if self._observer is not NO_OBSERVER:
            waited = now - drawing.arrived_at
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
    """Hands out what steps have brought; on the event loop."""
    for drawing, progress in parts:
        drawing.progress = progress
        drawing.arrival.set()
    for drawing, outcome in ends:
        drawing.end(outcome)


def _cancel(drawings: Iterable[Denoising]) -> None:
    """Makes drawings that are not finished leave the engine before its next step."""
    for drawing in drawings:
        drawing.cancelled = True
        drawing.result.cancel()  # nobody reads a result that comes now; one that is there stays
