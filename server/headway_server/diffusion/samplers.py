"""Samplers: from noise to an image's latent, step by step, in NumPy.

At a time a latent x and noise e are mixed as a x + s e (`schedules.py`). What a model predicts, velocity, noise or
image, is turned into the velocity v = a e - s x (Salimans and Ho 2022, appendix D), which is dx / d(angle) too, where
a = cos(angle) and s = sin(angle). Each sampler solves that differential equation its own way, or the stochastic one of
the same distributions. Noise of a step follows from the seed and the step's number, and each row is computed by itself,
so an image follows from its seed alone.

Shapes: a latent is (C, S, S) float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.diffusion.schedules import DiffusionSampler, Point, Steps

Latent: TypeAlias = NDArray[np.float32]
Prediction: TypeAlias = Literal["velocity", "noise", "image"]


def draw_noise(seed: int, shape: tuple[int, ...], step: int = 0) -> Latent:
    """Draws noise in the shape of a latent, deterministically from `seed`, 0 to 2^64 - 1, and a step, 0 to begin."""
    generator = np.random.Generator(np.random.Philox(key=seed | step << 64))
    return generator.standard_normal(shape, np.float32)


def mix(latent: Latent, noise: Latent, point: Point) -> Latent:
    """Adds the noise of a time to a latent."""
    return _scale(latent, point.signal) + _scale(noise, point.noise)


def velocity_of(predicted: Latent, latent: Latent, point: Point, prediction: Prediction) -> Latent:
    """Returns the velocity of a latent at a time, by what a model predicts of it."""
    match prediction:
        case "velocity":
            return predicted
        case "noise":
            return _scale(predicted - _scale(latent, point.noise), 1 / point.signal)
        case "image":
            return _scale(_scale(latent, point.signal) - predicted, 1 / point.noise)


def guide(conditional: Latent, unconditional: Latent, scale: float) -> Latent:
    """Returns the guided prediction (Ho and Salimans 2022, equation 6, whose w is scale - 1)."""
    return unconditional + _scale(conditional - unconditional, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreservedArea:
    """Where a latent is replaced by that of an image, with the noise of its time (Lugmayr et al. 2022, 4.1)."""

    is_preserved: NDArray[np.bool_]
    """(1, S, S)"""
    latent: Latent
    noise: Latent

    def put_into(self, latent: Latent, point: Point | None) -> Latent:
        """Returns a latent at a time, with the area as it was in the image; None: at the end, without noise."""
        original = self.latent if point is None else mix(self.latent, self.noise, point)
        return np.where(self.is_preserved, original, latent)


class Trajectory:
    """A latent on its way through the steps of a sampler."""

    def __init__(
        self,
        latent: Latent,
        steps: Steps,
        preserved: PreservedArea | None = None,
        *,
        prediction: Prediction = "velocity",
        draw: Callable[[int], Latent] | None = None,
    ) -> None:
        """Begins.

        Args:
            latent: At the first of the times.
            steps: The steps.
            preserved: Area restored after each step; None: none.
            prediction: What the model predicts.
            draw: Draws the noise of a step, by its number from 1 on; for samplers that do.
        """
        self.latent = latent
        self._preserved = preserved
        self._points = steps.points
        self._ends = steps.ends
        self._starts = tuple(before for before, _ in steps.strides)
        self._solver = steps.solver
        self._prediction = prediction
        self._draw = draw
        self._images: list[Latent] = []  # as they were predicted in the steps before, the newest last
        self._known: list[Latent] = []  # what the model predicted in up to four of them
        self._begun: Latent | None = None  # the latent that the last step began with
        self.num_made = 0
        """Steps that were made."""

    @property
    def num_steps(self) -> int:
        """Steps from beginning to end."""
        return len(self._points) - 1

    @property
    def is_finished(self) -> bool:
        """True if every step was made: the latent is an image's."""
        return self.num_made == self.num_steps

    @property
    def time(self) -> float:
        """Where the latent is, as the denoiser reads it; 0 for an image."""
        return self._points[self.num_made].time

    def advance(self, predicted: Latent) -> Latent:
        """Makes a step.

        Args:
            predicted: What the model predicts of the latent at its time.

        Returns:
            Latent of the current prediction.
        """
        number = self.num_made
        now, then = self._points[number], self._ends[number]
        velocity = velocity_of(predicted, self.latent, now, self._prediction)
        image = _scale(self.latent, now.signal) - _scale(velocity, now.noise)
        match self._solver:
            case DiffusionSampler.DDIM:
                self.latent = _turn(self.latent, velocity, now, then)
            case DiffusionSampler.EULER:
                self.latent = self.latent - _scale(velocity, _angle(now) - _angle(then))
            case DiffusionSampler.DPM_SOLVER_PP_2M:
                self.latent = self._second_order(image, now, then)
            case DiffusionSampler.DDPM:
                self.latent = self._posterior(image, now, then)
            case DiffusionSampler.LCM:
                self.latent = self._consistent(image, now, then)
            case DiffusionSampler.PNDM:
                self.latent = self._multistep(predicted, now, then)
            case DiffusionSampler.UNIPC:
                self.latent = self._corrected(image, now, then)
        self.num_made += 1
        if self._preserved is not None:
            place = None if self.is_finished else self._points[self.num_made]
            self.latent = self._preserved.put_into(self.latent, place)
        self._images = [*self._images[-1:], image]
        return image

    def _second_order(self, image: Latent, now: Point, then: Point) -> Latent:
        """A step of DPM-Solver++(2M).

        It is of first order at infinite signal-to-noise ratios: the first step has no earlier prediction, and the last
        one gives the predicted image.
        """
        estimate = image
        if self._images and then.noise > 0:
            last, at, to = (_log_ratio(one) for one in (self._points[self.num_made - 1], now, then))
            change = (to - at) / (2 * (at - last))  # 0 where the last step began at pure noise
            estimate = image + _scale(image - self._images[-1], change)
        return _first_order(self.latent, estimate, now, then)

    def _posterior(self, image: Latent, now: Point, then: Point) -> Latent:
        """A step of DDPM: the distribution of a less noisy latent, by a latent and the image (Ho et al. 2020, 7)."""
        if then.noise == 0:
            return image
        kept = (then.noise * now.signal / (now.noise * then.signal)) ** 2  # variance that is not new
        predicted = _scale(self.latent - _scale(image, now.signal), 1 / now.noise)
        latent = _scale(image, then.signal) + _scale(predicted, then.noise * math.sqrt(kept))
        return latent + _scale(self._drawn(), then.noise * math.sqrt(max(0.0, 1 - kept)))

    def _consistent(self, image: Latent, now: Point, then: Point) -> Latent:
        """A step of a consistency model (Luo et al. 2023, equation 9), whose image is noised anew."""
        time = now.time * _TIME_SCALE
        skip, out = _DATA**2 / (time**2 + _DATA**2), time / math.hypot(time, _DATA)
        found = _scale(image, out) + _scale(self.latent, skip)
        return found if then.noise == 0 else mix(found, self._drawn(), then)

    def _multistep(self, predicted: Latent, now: Point, then: Point) -> Latent:
        """A step of pseudo linear multistep (Liu et al. 2022, equations 11 and 12).

        The second run of a model improves the first step, with the mean of what is predicted at its beginning and end.
        """
        latent, known = self.latent, self._known
        if self.num_made == 1:
            assert self._begun is not None, "the first step has kept it"
            latent, now, then = self._begun, self._starts[1], now
            estimate = _scale(predicted + known[-1], 0.5)
        else:
            self._begun = self.latent
            self._known = known = [*known[-3:], predicted]
            weights = _ADAMS_BASHFORTH[len(known) - 1]
            estimate = np.sum([_scale(one, weight) for one, weight in zip(known, weights, strict=True)], axis=0)
        return _turn(latent, velocity_of(estimate, latent, now, self._prediction), now, then)

    def _corrected(self, image: Latent, now: Point, then: Point) -> Latent:
        """A step of UniPC: the step before is made again with the image found at its end, then the next one."""
        number = self.num_made
        if self._begun is not None:
            self.latent = self._correct(self._begun, image)
        self._begun = self.latent
        estimate = image
        if number and then.noise > 0:
            last, at, to = (_log_ratio(one) for one in (self._points[number - 1], now, then))
            estimate = image + _scale(image - self._images[-1], (to - at) / (2 * (at - last)))
        return _first_order(self.latent, estimate, now, then)

    def _correct(self, latent: Latent, image: Latent) -> Latent:
        """Returns where the step before ends, by the images of its own beginning and end, and of the step before it."""
        start, end = self._points[self.num_made - 1 : self.num_made + 1]
        known = self._images[-1]
        h = _log_ratio(end) - _log_ratio(start)
        first = -math.expm1(-h)  # with a negative sign B(h) of the paper
        if len(self._images) == 1:
            estimate = known + _scale(image - known, 0.5)
        else:
            earlier, _ = self._images
            place = (_log_ratio(self._points[self.num_made - 2]) - _log_ratio(start)) / h
            # R rho = b, of the powers 0 and 1 of the places (its equation 11)
            second = first / h - 1
            b_1, b_2 = second / -first, 2 * (second / -h - 0.5) / -first
            own = (b_2 - place * b_1) / (1 - place)
            estimate = known + _scale(image - known, own) + _scale(earlier - known, (b_1 - own) / place)
        return _first_order(latent, estimate, start, end)

    def _drawn(self) -> Latent:
        assert self._draw is not None, "given to samplers that draw"
        return self._draw(self.num_made + 1)

    def __repr__(self) -> str:
        return f"Trajectory({self._solver}, {self.num_made} of {self.num_steps} steps)"


_TIME_SCALE: Final = 10
_DATA: Final = 0.5
"""Both of the conditions at the boundary of consistency models: the image itself at time 0 (Luo et al. 2023)."""
_ADAMS_BASHFORTH: Final = (
    (1.0,),
    (-1 / 2, 3 / 2),
    (5 / 12, -16 / 12, 23 / 12),
    (-9 / 24, 37 / 24, -59 / 24, 55 / 24),
)
"""Weights of the last predictions, the newest last, by their number."""


def _turn(latent: Latent, velocity: Latent, now: Point, then: Point) -> Latent:
    """Returns a' x + s' e, of the image and the noise that velocity and latent say: a turn by the angle."""
    cosine = then.signal * now.signal + then.noise * now.noise
    sine = then.signal * now.noise - then.noise * now.signal
    return _scale(latent, cosine) - _scale(velocity, sine)


def _first_order(latent: Latent, image: Latent, now: Point, then: Point) -> Latent:
    """The exact solution of an image that stays the same (Lu et al. 2022, equation 9)."""
    # exp(-h) of the half log ratio's step h, written so that pure noise and the image itself are finite
    decay = then.noise * now.signal / (then.signal * now.noise)
    return _scale(latent, then.noise / now.noise) + _scale(image, then.signal * (1 - decay))


def _angle(point: Point) -> float:
    return math.atan2(point.noise, point.signal)


def _log_ratio(point: Point) -> float:
    """Returns log(a / s), minus infinity for pure noise."""
    return math.log(point.signal / point.noise) if point.signal > 0 else -math.inf


def _scale(latent: Latent, factor: float) -> Latent:
    scaled: Latent = latent * np.float32(factor)
    return scaled
