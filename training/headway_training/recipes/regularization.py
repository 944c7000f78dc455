"""The sections of a recipe that change the loss, or what comes before the training; all of it is off by default."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainingSettings:
    """Masked language modelling on the training text before an encoder's training (Devlin et al. 2019)."""

    epochs: float = 0.0
    """Passes over the training texts; 0 is none."""
    mask_rate: float = 0.15
    """Share of the tokens that are to be told."""
    learning_rate: float = 0.0
    """Highest learning rate; 0 takes that of the section [optimization], whose other settings hold too."""

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 0, 100_000)
        check_range("mask_rate", self.mask_rate, 0.01, 0.9)
        check_range("learning_rate", self.learning_rate, 0, 10)
