"""Learning rate as a function of the step."""

from __future__ import annotations

import math

from headway_training.recipes.settings import OptimizationSettings


def learning_rate(settings: OptimizationSettings, step: int, num_steps: int) -> float:
    """The learning rate of step `step` of `num_steps`, counted from 0.

    It rises linearly over the warm-up; then it falls like half a cosine to its final share (Loshchilov and Hutter
    2017), or with the inverse square root of the step (Vaswani et al. 2017, equation 3).
    """
    warmup = max(1, round(settings.warmup_fraction * num_steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.schedule == "inverse_sqrt":
        return settings.learning_rate * math.sqrt(warmup / (step + 1))
    progress = (step - warmup) / max(1, num_steps - warmup)
    share = settings.final_learning_rate + (1 - settings.final_learning_rate) * (1 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * share
