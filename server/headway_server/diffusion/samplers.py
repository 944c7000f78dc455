"""Samplers: from noise to an image's latent, step by step, in NumPy.

At a time a latent x and noise e are mixed as a x + s e (`schedules.py`). What a model predicts, velocity, noise or
image, is turned into the velocity v = a e - s x (Salimans and Ho 2022, appendix D), which is dx / d(angle) too, where
a = cos(angle) and s = sin(angle). Each sampler solves that differential equation its own way. None of them draws random
numbers after the first, and each row is computed by itself, so an image follows from its seed alone.

Shapes: a latent is (C, S, S) float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.diffusion.schedules import DiffusionSampler, Point, Steps

Latent: TypeAlias = NDArray[np.float32]
Prediction: TypeAlias = Literal["velocity", "noise", "image"]


def draw_noise(seed: int, shape: tuple[int, ...]) -> Latent:
    """Draws noise in the shape of a latent, deterministically from `seed`, 0 to 2^64 - 1."""
    generator = np.random.Generator(np.random.Philox(key=seed))
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
    ) -> None:
        """Begins.

        Args:
            latent: At the first of the times.
            steps: The steps.
            preserved: Area restored after each step; None: none.
            prediction: What the model predicts.
        """
        self.latent = latent
        self._preserved = preserved
        self._points = steps.points
        self._solver = steps.solver
        self._prediction = prediction
        self._image: Latent | None = None  # as it was predicted in the step before
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
        now, then = self._points[self.num_made : self.num_made + 2]
        velocity = velocity_of(predicted, self.latent, now, self._prediction)
        image = _scale(self.latent, now.signal) - _scale(velocity, now.noise)
        match self._solver:
            case DiffusionSampler.DDIM:
                # a' x + s' e, of the image and the noise that velocity and latent say: a turn by the angle.
                cosine = then.signal * now.signal + then.noise * now.noise
                sine = then.signal * now.noise - then.noise * now.signal
                self.latent = _scale(self.latent, cosine) - _scale(velocity, sine)
            case DiffusionSampler.EULER:
                self.latent = self.latent - _scale(velocity, _angle(now) - _angle(then))
            case DiffusionSampler.DPM_SOLVER_PP_2M:
                self.latent = self._second_order(image, now, then)
        self.num_made += 1
        if self._preserved is not None:
            self.latent = self._preserved.put_into(self.latent, None if self.is_finished else then)
        self._image = image
        return image

    def _second_order(self, image: Latent, now: Point, then: Point) -> Latent:
        """A step of DPM-Solver++(2M).

        It is of first order at infinite signal-to-noise ratios: the first step has no earlier prediction, and the last
        one gives the predicted image.
        """
        estimate = image
        if self._image is not None and then.noise > 0:
            last, at, to = (_log_ratio(one) for one in (self._points[self.num_made - 1], now, then))
            change = (to - at) / (2 * (at - last))  # 0 where the last step began at pure noise
            estimate = image + _scale(image - self._image, change)
        # exp(-h) of the half log ratio's step h, written so that pure noise and the image itself are finite
        decay = then.noise * now.signal / (then.signal * now.noise)
        return _scale(self.latent, then.noise / now.noise) + _scale(estimate, then.signal * (1 - decay))

    def __repr__(self) -> str:
        return f"Trajectory({self._solver}, {self.num_made} of {self.num_steps} steps)"


def _angle(point: Point) -> float:
    return math.atan2(point.noise, point.signal)


def _log_ratio(point: Point) -> float:
    """Returns log(a / s), minus infinity for pure noise."""
    return math.log(point.signal / point.noise) if point.signal > 0 else -math.inf


def _scale(latent: Latent, factor: float) -> Latent:
    scaled: Latent = latent * np.float32(factor)
    return scaled
