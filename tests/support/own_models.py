"""Factories as users write them, and modules that break the contract."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway_training.models import build_model

LAYER = {"d_model": 16, "num_heads": 2, "d_ff": 32}


MIRRORED: list[tuple[str, dict[str, Any]]] = []
"""Architecture and configuration of a model of the kit that `mirrored` makes: the last one."""


def mirrored() -> nn.Module:
    """Makes a model of the kit: what is trained by the protocol must be what is trained as the kit has it."""
    architecture, configuration = MIRRORED[-1]
    made = build_model(architecture, configuration)
    if architecture == "linear":
        made.window = configuration["window"]
    return made


def gpt(vocabulary_size: int = 300, max_length: int = 16) -> nn.Module:
    return build_model("gpt", {**LAYER, "num_layers": 1, "vocabulary_size": vocabulary_size, "max_length": max_length})


# What cannot be a factory


def untold(vocabulary_size=300):
    return gpt(vocabulary_size)


def bare(vocabulary_size: int) -> nn.Module:
    return gpt(vocabulary_size)


# Modules that break the contract


class Reads(nn.Module):
    """A classifier of texts that keeps to it."""

    max_length = 40

    def __init__(self, vocabulary_size: int = 300, num_classes: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, 8)
        self.output = nn.Linear(8, num_classes)

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        there = mask[:, :, None].to(states.dtype)
        return (states * there).sum(dim=1) / there.sum(dim=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.output(self.pool(self.tokens(input_ids), attention_mask))
        return logits


class TakesOneTensor(Reads):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]  # the point of the test
        return super().forward(input_ids, torch.ones_like(input_ids))


class ColumnsFirst(Reads):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask).T


class OtherClasses(Reads):
    def __init__(self, vocabulary_size: int = 300) -> None:
        super().__init__(vocabulary_size, num_classes=7)


class NeverSteady(Reads):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = super().forward(input_ids, attention_mask)
        return logits + torch.rand_like(logits)


class ComparesRows(Reads):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = super().forward(input_ids, attention_mask)
        return logits - logits.mean(dim=0)


class ReadsPadding(Reads):
    def pool(self, states: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002 (the point of the test)
        return states.mean(dim=1)


class KeepsFigures(Reads):
    def __init__(self, vocabulary_size: int = 300, num_classes: int = 2) -> None:
        super().__init__(vocabulary_size, num_classes)
        self.norm = nn.BatchNorm1d(8)

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        pooled: Tensor = self.norm(super().pool(states, mask))
        return pooled


class HasIdleWeights(Reads):
    def __init__(self, vocabulary_size: int = 300, num_classes: int = 2) -> None:
        super().__init__(vocabulary_size, num_classes)
        self.spare = nn.Linear(8, 8)


class IsNotTrained(Reads):
    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask)


class StartsTooLarge(Reads):
    def __init__(self, vocabulary_size: int = 300, num_classes: int = 2) -> None:
        super().__init__(vocabulary_size, num_classes)
        nn.init.constant_(self.output.bias, float("inf"))


class LooksAhead(nn.Module):
    """A decoder whose tokens see the next one."""

    max_length = 16

    def __init__(self, vocabulary_size: int = 300) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, 8)
        self.mix = nn.Conv1d(8, 8, kernel_size=3, padding=1)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Any) -> Tensor:  # noqa: ARG002 (the protocol)
        states: Tensor = self.mix(self.tokens(input_ids).mT).mT
        return states

    def logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.tokens.weight.mT
