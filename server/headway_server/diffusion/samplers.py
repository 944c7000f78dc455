"""Samplers: from noise to an image's latent, step by step, in NumPy.

At a time t from 0 to 1, a latent x and noise e are mixed as a(t) x + s(t) e. Here a(t) = cos(pi t / 2) and s(t) =
sin(pi t / 2). A model predicts the velocity v = a(t) e - s(t) x (Salimans and Ho 2022, appendix D), which is dx(t) /
d(angle) too. Each sampler solves that differential equation its own way. None of them draws random numbers after the
first, and each row is computed by itself, so an image follows from its seed alone.

Shapes: a latent is (C, S, S) float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Latent: TypeAlias = NDArray[np.float32]

_QUARTER_TURN: Final = math.pi / 2


class DiffusionSampler(StrEnum):
    """How a step is made."""

    DDIM = "ddim"
    """Song et al. 2021 (equation 12, without noise): the image and the noise that are predicted are mixed anew."""
    DPM_SOLVER_PP_2M = "dpm_solver_pp_2m"
    """Lu et al. 2022, "DPM-Solver++", algorithm 2: of second order, by the prediction of the step before."""
    EULER = "euler"
    """Euler's method along the angle."""


def step_times(num_steps: int, strength: float = 1.0) -> list[float]:
    """Returns the times of steps, from the first's beginning to the last's end, which is 0: evenly spaced.

    Args:
        num_steps: Steps from noise, whose time is 1.
        strength: Share of the steps that are made, the last ones; at least one is. Of an image that noise is added to.
    """
    num_made = max(1, round(num_steps * strength))
    return [left / num_steps for left in range(num_made, -1, -1)]


def draw_noise(seed: int, shape: tuple[int, ...]) -> Latent:
    """Draws noise in the shape of a latent, deterministically from `seed`, 0 to 2^64 - 1."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    return generator.standard_normal(shape, np.float32)


def mix(latent: Latent, noise: Latent, time: float) -> Latent:
    """Adds the noise of a time to a latent."""
    return _scale(latent, _signal(time)) + _scale(noise, _noise(time))


def guide(conditional: Latent, unconditional: Latent, scale: float) -> Latent:
    """Returns the guided velocity (Ho and Salimans 2022, equation 6, whose w is scale - 1)."""
    return unconditional + _scale(conditional - unconditional, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreservedArea:
    """Where a latent is replaced by that of an image, with the noise of its time (Lugmayr et al. 2022, 4.1)."""

    is_preserved: NDArray[np.bool_]
    """(1, S, S)"""
    latent: Latent
    noise: Latent

    def put_into(self, latent: Latent, time: float) -> Latent:
        """Returns a latent at a time, with the area as it was in the image."""
        return np.where(self.is_preserved, mix(self.latent, self.noise, time), latent)


class Trajectory:
    """A latent on its way through the steps of a sampler."""

    def __init__(
        self, latent: Latent, times: list[float], sampler: DiffusionSampler, preserved: PreservedArea | None = None
    ) -> None:
        """Begins.

        Args:
            latent: At the first of the times.
            times: Times of the steps (`step_times`), at least two.
            sampler: Makes them.
            preserved: Area restored after each step; None: none.
        """
        self.latent = latent
        self._preserved = preserved
        self._times = times
        self._sampler = sampler
        self._image: Latent | None = None  # as it was predicted in the step before
        self.num_made = 0
        """Steps that were made."""

    @property
    def num_steps(self) -> int:
        """Steps from beginning to end."""
        return len(self._times) - 1

    @property
    def is_finished(self) -> bool:
        """True if every step was made: the latent is an image's."""
        return self.num_made == self.num_steps

    @property
    def time(self) -> float:
        """Where the latent is, 1 for noise and 0 for an image."""
        return self._times[self.num_made]

    @property
    def next_time(self) -> float:
        """Where the next step leads to."""
        return self._times[self.num_made + 1]

    def advance(self, velocity: Latent) -> Latent:
        """Makes a step.

        Args:
            velocity: Velocity of the latent at its time.

        Returns:
            Latent of the current prediction.
        """
        time, following = self.time, self.next_time
        image = _scale(self.latent, _signal(time)) - _scale(velocity, _noise(time))
        match self._sampler:
            case DiffusionSampler.DDIM:
                # a(t') x + s(t') e, of the image and the noise that velocity and latent say: a turn by the angle.
                turn = (time - following) * _QUARTER_TURN
                self.latent = _scale(self.latent, math.cos(turn)) - _scale(velocity, math.sin(turn))
            case DiffusionSampler.EULER:
                self.latent = self.latent - _scale(velocity, (time - following) * _QUARTER_TURN)
            case DiffusionSampler.DPM_SOLVER_PP_2M:
                self.latent = self._second_order(image, time, following)
        if self._preserved is not None:
            self.latent = self._preserved.put_into(self.latent, following)
        self._image = image
        self.num_made += 1
        return image

    def _second_order(self, image: Latent, time: float, following: float) -> Latent:
        """A step of DPM-Solver++(2M).

        It is of first order at infinite signal-to-noise ratios: the first step has no earlier prediction, and the last
        one gives the predicted image.
        """
        estimate = image
        if self._image is not None and following > 0:
            last, now, then = (_log_ratio(one) for one in (self._times[self.num_made - 1], time, following))
            change = (then - now) / (2 * (now - last))  # 0 where the last step began at pure noise
            estimate = image + _scale(image - self._image, change)
        # exp(-h) of the half log ratio's step h, written so that pure noise and the image itself are finite
        decay = _noise(following) * _signal(time) / (_signal(following) * _noise(time))
        ratio = _noise(following) / _noise(time)
        return _scale(self.latent, ratio) + _scale(estimate, _signal(following) * (1 - decay))

    def __repr__(self) -> str:
        return f"Trajectory({self._sampler}, {self.num_made} of {self.num_steps} steps)"


def _signal(time: float) -> float:
    return math.cos(time * _QUARTER_TURN) if time < 1 else 0.0


def _noise(time: float) -> float:
    return math.sin(time * _QUARTER_TURN)


def _log_ratio(time: float) -> float:
    """Returns log(a / s), minus infinity for pure noise."""
    return math.log(_signal(time) / _noise(time)) if time < 1 else -math.inf


def _scale(latent: Latent, factor: float) -> Latent:
    scaled: Latent = latent * np.float32(factor)
    return scaled
