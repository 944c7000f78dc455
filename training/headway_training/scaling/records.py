"""What a study writes down: sizes, pilots, the law, how it predicted the largest pilot, and its advice."""

from __future__ import annotations

from typing import Any

from headway_training.checkpoint import Record
from headway_training.scaling.law import ScalingLaw


class Size(Record):
    """A size of a recipe's model, and what it takes to train it."""

    model: dict[str, Any]
    """The fields of its configuration that differ from the recipe's."""
    parameter_count: int
    """N: weights of the layers."""
    whole_parameter_count: int
    """With embeddings."""
    flops_per_token: float
    """Of matrix products, forward and backward, embeddings and attention included."""
    token_s: float
    """Estimated seconds of training for a token, the optimizer's included."""
    evaluation_s: float
    """Seconds of a validation."""


class Pilot(Record):
    """One short run, planned or done."""

    size: Size
    """Of its model."""
    step_count: int
    """Optimizer steps, over which its learning rate falls to 0."""
    token_count: int
    """D: tokens that it reads."""
    estimated_s: float
    """Estimated seconds that it takes."""
    wall_time_s: float | None = None
    """Measured; None before it is done."""
    loss: float | None = None
    """Of the validation part, at its end."""

    @property
    def flops(self) -> float:
        """Of the whole run."""
        return self.size.flops_per_token * self.token_count


class HeldOut(Record):
    """The largest pilot, predicted by a law of all others."""

    law: ScalingLaw
    """Fitted without it."""
    predicted: float
    measured: float
    difference: float
    """(predicted - measured) / measured."""
    hit: bool
    """Whether that is within 2 %."""


class Advice(Record):
    """What to train within a budget, by the law of all pilots."""

    budget: str
    """In words."""
    model: dict[str, Any]
    """Fields of the configuration."""
    parameter_count: int
    """N: weights of the layers."""
    token_count: int
    """D."""
    epochs: float
    """Passes over the training data at hand."""
    step_count: int
    """Optimizer steps."""
    flops: float
    estimated_s: float
    """By the speed of the pilots."""
    predicted: float
    """Loss."""


class Study(Record):
    """What `scale.json` holds."""

    recipe: dict[str, Any]
    """The recipe."""
    seed: int
    own_data: dict[str, Any] | None
    """The user's files; None: the recipe's data set."""
    data_sha256: str | None = None
    """Checksum of these; None: there are none, or the study was begun by a version that kept none."""
    budget_s: float
    """For all pilots together."""
    hardware: str
    metric: str
    """What the losses are, of the validation part."""
    epoch_tokens: float
    """Tokens of a pass over the training data."""
    step_tokens: float
    """Tokens of an optimizer step."""
    pilots: tuple[Pilot, ...]
    """By rising arithmetic."""
    law: ScalingLaw | None = None
    """Fitted to all pilots."""
    held_out: HeldOut | None = None
    advice: Advice | None = None
