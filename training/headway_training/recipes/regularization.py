"""The sections of a recipe that change the loss; all of it is off by default."""

from __future__ import annotations

from dataclasses import dataclass

from headway_training.recipes.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularizationSettings:
    """What keeps a model from learning its data by heart, beside dropout, weight decay and label smoothing."""

    r_drop: float = 0.0
    """Weight of the distance between two passes that differ in their dropout (Liang et al. 2021, alpha); 0 is off."""
    mixup: float = 0.0
    """Images are mixed in pairs, by shares of the distribution Beta(mixup, mixup) (Zhang et al. 2018); 0 is off."""
    dropout_from: float = 0.0
    """Share of the steps that pass before there is dropout ("late dropout", Liu et al. 2023)."""
    dropout_until: float = 1.0
    """Share of the steps after which there is none ("early dropout", as above)."""

    def __post_init__(self) -> None:
        check_range("r_drop", self.r_drop, 0, 100)
        check_range("mixup", self.mixup, 0, 100)
        check_range("dropout_from", self.dropout_from, 0, 1)
        check_range("dropout_until", self.dropout_until, self.dropout_from, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """A larger model of the same data, whose probabilities are targets too (Hinton et al. 2015)."""

    teacher: str = ""
    """Folder of its checkpoint, which must have the same tokenizer and labels; empty: none."""
    weight: float = 0.5
    """Share of the loss that the teacher's probabilities make up."""
    temperature: float = 2.0
    """Divides the logits of both."""

    def __post_init__(self) -> None:
        check_range("weight", self.weight, 0, 1)
        check_range("temperature", self.temperature, 0.1, 100)
