"""Noise schedules: how much of a latent is image and how much noise at each time, and the times of a sampler's steps.

At a time t a latent x and noise e are mixed as a(t) x + s(t) e, with a(t)^2 + s(t)^2 = 1. The kit's own models have the
trigonometric schedule of times from 0 to 1, published ones a discrete one of numbered steps (Ho et al. 2020).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Diffusion, DiscreteNoise

_LEAST_SIGNAL: Final = 2.0**-24
"""Square of the signal at the end of a schedule that is rescaled to none, so that its ratios are finite."""
_COSINE_OFFSET: Final = 0.008
_LARGEST_BETA: Final = 0.999
"""Both of Nichol and Dhariwal 2021, equation 17."""


class DiffusionSampler(StrEnum):
    """How a step is made."""

    DDIM = "ddim"
    """Song et al. 2021 (equation 12, without noise): the image and the noise that are predicted are mixed anew."""
    DPM_SOLVER_PP_2M = "dpm_solver_pp_2m"
    """Lu et al. 2022, "DPM-Solver++", algorithm 2: of second order, by the prediction of the step before."""
    EULER = "euler"
    """Euler's method: along the angle, or of a discrete schedule along the ratio of noise to signal."""


class Point(NamedTuple):
    """A time, as the denoiser reads it, with what a latent consists of then."""

    time: float
    signal: float
    """a(t), 0 for pure noise."""
    noise: float
    """s(t), 0 for an image."""


class Steps(NamedTuple):
    """The steps of an image."""

    points: tuple[Point, ...]
    """From the first's beginning to the last's end, at least two."""
    solver: DiffusionSampler
    """Makes them."""
    noise_scale: float = 1.0
    """Factor of noise of unit variance that an image begins with."""

    def last(self, strength: float) -> Steps:
        """Returns a share of the steps, the last ones; at least one. Of an image that noise is added to."""
        return self._replace(points=self.points[-1 - num_made_steps(len(self.points) - 1, strength) :])


class Schedule(Protocol):
    """A noise schedule."""

    @property
    def last_time(self) -> float:
        """Time of the noisiest latents; the least noisy ones have 0."""

    def point(self, time: float) -> Point:
        """Returns the point of a time."""

    def steps(self, num_steps: int, sampler: DiffusionSampler) -> Steps:
        """Returns the steps from noise to an image."""


def num_made_steps(num_steps: int, strength: float) -> int:
    """Returns how many steps of so many are made of an image that noise is added to."""
    return max(1, round(num_steps * strength))


def schedule_of(diffusion: Diffusion) -> Schedule:
    """Returns the schedule that a manifest describes."""
    return TrigonometricSchedule() if diffusion.discrete is None else DiscreteSchedule(diffusion.discrete)


class TrigonometricSchedule:
    """a(t) = cos(pi t / 2) and s(t) = sin(pi t / 2), at times from 0, an image, to 1, noise; steps are even."""

    last_time = 1.0

    def point(self, time: float) -> Point:
        """See `Schedule`."""
        angle = time * math.pi / 2
        return Point(time, math.cos(angle) if time < 1 else 0.0, math.sin(angle))

    def steps(self, num_steps: int, sampler: DiffusionSampler) -> Steps:
        """See `Schedule`."""
        return Steps(tuple(self.point(left / num_steps) for left in range(num_steps, -1, -1)), sampler)


class DiscreteSchedule:
    """Numbered steps of training, each of which adds noise of a variance beta: a(t)^2 is the product of 1 - beta.

    Between two numbers the ratio of noise to signal is interpolated. Times are spaced as Lin et al. 2024 (table 2) name
    it, and rounded to numbers except for Euler's method of even spacing. DPM-Solver++ divides the times into a step
    more and leaves out the last of these.

    Euler's method along the ratio of noise to signal makes the same step as DDIM (Song et al. 2021, section 4.3). The
    two differ by their times, by what they begin with and by where they end.
    """

    def __init__(self, noise: DiscreteNoise) -> None:
        self._noise = noise
        squares = _squared_signals(noise)
        self._ratios = np.sqrt((1 - squares) / squares)  # (T,)

    @property
    def last_time(self) -> float:
        """See `Schedule`."""
        return float(self._noise.num_train_steps - 1)

    def point(self, time: float) -> Point:
        """See `Schedule`."""
        ratio = float(np.interp(time, np.arange(len(self._ratios)), self._ratios))
        signal = 1 / math.hypot(1, ratio)
        return Point(time, signal, signal * ratio)

    def steps(self, num_steps: int, sampler: DiffusionSampler) -> Steps:
        """See `Schedule`."""
        points = [self.point(time) for time in self._times(num_steps, sampler)]
        is_euler = sampler is DiffusionSampler.EULER
        solver = DiffusionSampler.DDIM if is_euler else sampler
        end = Point(0.0, 1.0, 0.0)
        if sampler is DiffusionSampler.DDIM and not self._noise.ends_at_image:
            end = self.point(0.0)
        scale = points[0].noise if is_euler and self._noise.spacing != "leading" else 1.0
        return Steps((*points, end), solver, scale)

    def _times(self, num_steps: int, sampler: DiffusionSampler) -> list[float]:
        """Returns the times of the steps' beginnings."""
        count, extra = self._noise.num_train_steps, int(sampler is DiffusionSampler.DPM_SOLVER_PP_2M)
        places = np.arange(num_steps + extra - 1, extra - 1, -1, dtype=np.float64)  # (num_steps,)
        match self._noise.spacing:
            case "leading":
                times = places * (count // (num_steps + extra)) + self._noise.steps_offset
            case "trailing":
                times = np.rint(count - np.arange(num_steps) * (count / num_steps)) - 1
            case "linspace":
                between = max(1, num_steps + extra - 1)
                times = (count - 1) * (places / between if num_steps + extra > 1 else np.ones(1))
                if sampler is not DiffusionSampler.EULER:
                    times = np.rint(times)
        return [min(float(time), count - 1.0) for time in times]


def _squared_signals(noise: DiscreteNoise) -> NDArray[np.float64]:
    """Returns a(t)^2 of each step of training."""
    count = noise.num_train_steps
    match noise.betas:
        case "linear":
            betas = np.linspace(noise.beta_start, noise.beta_end, count)
        case "scaled_linear":
            betas = np.linspace(noise.beta_start**0.5, noise.beta_end**0.5, count) ** 2
        case "squared_cosine":
            shares = (np.arange(count + 1) / count + _COSINE_OFFSET) / (1 + _COSINE_OFFSET)
            levels = np.cos(shares * math.pi / 2) ** 2
            betas = np.minimum(1 - levels[1:] / levels[:-1], _LARGEST_BETA)
    squares = np.cumprod(1 - betas, dtype=np.float64)
    if noise.has_zero_terminal_snr:  # Lin et al. 2024, algorithm 1
        signals = np.sqrt(squares)
        squares = ((signals - signals[-1]) * signals[0] / (signals[0] - signals[-1])) ** 2
        squares[-1] = _LEAST_SIGNAL
    return squares
