"""Noise schedules: how much of a latent is image and how much noise at each time, and the times of a sampler's steps.

At a time t a latent x and noise e are mixed as a(t) x + s(t) e, with a(t)^2 + s(t)^2 = 1. The kit's own models have the
trigonometric schedule of times from 0 to 1, published ones a discrete one of numbered steps (Ho et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import Diffusion, DiscreteNoise

_LEAST_SIGNAL: Final = 2.0**-24
"""Square of the signal at the end of a schedule that is rescaled to none, so that its ratios are finite."""
_LEAST_SHARE: Final = 1e-4
"""Share of a step that float32 may lack of a whole one, of at most 250 steps."""
_KARRAS_POWER: Final = 7
"""Karras et al. 2022, equation 5."""
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
    EULER_ANCESTRAL = "euler_ancestral"
    """Ho et al. 2020, equation 7, between any two times: noise is drawn anew in each step."""
    DDPM = "ddpm"
    """The same step at other times, and from other noise."""
    PNDM = "pndm"
    """Liu et al. 2022, "Pseudo Numerical Methods", of linear multistep alone: fourth order after a doubled step."""
    UNIPC = "unipc"
    """Zhao et al. 2023, "UniPC", algorithms 1 and 2 of second order with B(h) = exp(h) - 1."""
    LCM = "lcm"
    """Luo et al. 2023, "Latent Consistency Models", algorithm 3: an image is predicted and noised anew."""


EVERYWHERE: Final = frozenset({DiffusionSampler.DDIM, DiffusionSampler.DPM_SOLVER_PP_2M, DiffusionSampler.EULER})
"""Samplers of every schedule; the others are for discrete ones."""
DRAWING: Final = frozenset({DiffusionSampler.EULER_ANCESTRAL, DiffusionSampler.DDPM, DiffusionSampler.LCM})
"""Samplers that draw noise in each step."""


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
    """Where the denoiser is run, and the end; at least two."""
    solver: DiffusionSampler
    """Makes them."""
    noise_scale: float = 1.0
    """Factor of noise of unit variance that an image begins with."""
    strides: tuple[tuple[Point, Point], ...] = ()
    """Of each step a whole stride of training before and after it, where the solver counts in these; else nothing."""

    @property
    def ends(self) -> tuple[Point, ...]:
        """Where the solver has each step end."""
        return tuple(after for _, after in self.strides) or self.points[1:]

    def last(self, num_left_out: int) -> Steps:
        """Returns the steps without the first ones, of an image that noise is added to."""
        return self._replace(points=self.points[num_left_out:], strides=self.strides[num_left_out:])


class Schedule(Protocol):
    """A noise schedule."""

    @property
    def last_time(self) -> float:
        """Time of the noisiest latents; the least noisy ones have 0."""

    def point(self, time: float) -> Point:
        """Returns the point of a time."""

    def steps(self, num_steps: int, sampler: DiffusionSampler) -> Steps:
        """Returns the steps from noise to an image."""

    def max_steps(self, sampler: DiffusionSampler) -> int | None:
        """Returns how many steps a sampler can make: 0 if it is not for this schedule, None for any number."""


def num_made_steps(num_steps: int, strength: float) -> int:
    """Returns how many steps of so many are made of an image that noise is added to: rounded down, at least one."""
    return max(1, math.floor(num_steps * strength + _LEAST_SHARE))


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

    def max_steps(self, sampler: DiffusionSampler) -> int | None:
        """See `Schedule`."""
        return None if sampler in EVERYWHERE else 0


_END: Final = Point(0.0, 1.0, 0.0)
"""An image."""


class DiscreteSchedule:
    """Numbered steps of training, each of which adds noise of a variance beta: a(t)^2 is the product of 1 - beta.

    Between two numbers the ratio of noise to signal is interpolated. Times are spaced as Lin et al. 2024 (table 2) name
    it, and rounded to numbers except for Euler's method of even spacing. DPM-Solver++ and UniPC divide the times into a
    step more and leave out the last of these. Consistency models have times of their own (Luo et al. 2023, section
    4.3). Karras' spacing is even in the seventh root of the ratio (Karras et al. 2022, equation 5).

    Euler's method along the ratio of noise to signal makes the same step as DDIM (Song et al. 2021, section 4.3), and
    its ancestral form the same as DDPM. They differ by their times, by what they begin with and by where they end.
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
        return _point(time, float(np.interp(time, np.arange(len(self._ratios)), self._ratios)))

    def steps(self, num_steps: int, sampler: DiffusionSampler) -> Steps:
        """See `Schedule`."""
        times = self._times(num_steps, sampler)
        points = [self.point(time) for time in times]
        if self._noise.has_karras_times and sampler in _WITH_KARRAS:
            points = self._karras_points(points, sampler)
        if sampler is DiffusionSampler.PNDM:
            points = points[:2] + points[1:]
        end = self.point(0.0) if sampler in _WHOLE_STRIDES and not self._noise.ends_at_image else _END
        strides: tuple[tuple[Point, Point], ...] = ()
        if sampler in _WHOLE_STRIDES:
            stride = self._noise.num_train_steps // num_steps
            strides = tuple(
                (self.point(now.time + stride), self.point(now.time - stride) if now.time >= stride else end)
                for now in points
            )
        is_scaled = sampler in _SCALED and self._noise.spacing != "leading"
        return Steps((*points, end), _SAME_STEPS.get(sampler, sampler), points[0].noise if is_scaled else 1.0, strides)

    def max_steps(self, sampler: DiffusionSampler) -> int | None:
        """See `Schedule`."""
        return self._noise.num_consistent_steps if sampler is DiffusionSampler.LCM else None

    def _times(self, num_steps: int, sampler: DiffusionSampler) -> list[float]:
        """Returns the times of the steps' beginnings."""
        count, extra = self._noise.num_train_steps, int(sampler in _WITH_STEP_MORE)
        places = np.arange(num_steps + extra - 1, extra - 1, -1, dtype=np.float64)  # (num_steps,)
        if sampler is DiffusionSampler.LCM:
            known = self._noise.num_consistent_steps
            chosen = known - np.floor(np.arange(num_steps) * (known / num_steps))
            return [float(place * (count // known) - 1) for place in chosen]
        match self._noise.spacing:
            case "leading":
                times = places * (count // (num_steps + extra)) + self._noise.steps_offset
            case "trailing":
                times = np.rint(count - np.arange(num_steps) * (count / num_steps)) - 1
            case "linspace":
                between = max(1, num_steps + extra - 1)
                times = (count - 1) * (places / between if num_steps + extra > 1 else np.ones(1))
                if sampler not in _SCALED:
                    times = np.rint(times)
        return [min(float(time), count - 1.0) for time in times]

    def _karras_points(self, points: Sequence[Point], sampler: DiffusionSampler) -> list[Point]:
        """Returns as many points, from the same first to the same last one for Euler, else from all of training."""
        first, last = (point.noise / point.signal for point in (points[0], points[-1]))
        if sampler is not DiffusionSampler.EULER:
            first, last = float(self._ratios[-1]), float(self._ratios[0])
        ramp = np.linspace(0, 1, len(points))
        ratios = (first ** (1 / _KARRAS_POWER) * (1 - ramp) + last ** (1 / _KARRAS_POWER) * ramp) ** _KARRAS_POWER
        times = np.interp(np.log(ratios), np.log(self._ratios), np.arange(len(self._ratios)))
        is_exact = sampler is DiffusionSampler.EULER
        return [
            _point(float(time if is_exact else np.rint(time)), float(ratio))
            for time, ratio in zip(times, ratios, strict=True)
        ]


_WITH_STEP_MORE: Final = frozenset({DiffusionSampler.DPM_SOLVER_PP_2M, DiffusionSampler.UNIPC})
_WITH_KARRAS: Final = _WITH_STEP_MORE | {DiffusionSampler.EULER}
_WHOLE_STRIDES: Final = frozenset({DiffusionSampler.DDIM, DiffusionSampler.PNDM})
_SCALED: Final = frozenset({DiffusionSampler.EULER, DiffusionSampler.EULER_ANCESTRAL})
_SAME_STEPS: Final = {
    DiffusionSampler.EULER: DiffusionSampler.DDIM,
    DiffusionSampler.EULER_ANCESTRAL: DiffusionSampler.DDPM,
}


def _point(time: float, ratio: float) -> Point:
    """Returns a point of a ratio of noise to signal."""
    signal = 1 / math.hypot(1, ratio)
    return Point(time, signal, signal * ratio)


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
