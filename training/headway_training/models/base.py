"""What all models share."""

from __future__ import annotations

from typing import Literal, Self

from torch import nn

from headway_training.models.parts.attention import KERNELS, Kernel, scaled_dot_product_attention

AttentionKind = Literal["plain", "fused"]


class Model(nn.Module):
    """A model that has a kernel for its attention, to use wherever it is given no attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Kernel = scaled_dot_product_attention

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel: `plain` operators, which is the reference and is exported, or torch's `fused` kernels.

        Raises:
            ValueError: there is no such kernel.
        """
        if kind not in KERNELS:
            raise ValueError(f"attention must be one of {', '.join(KERNELS)}, and is {kind!r}")
        self.kernel = KERNELS[kind]
        return self


def count_parameters(model: nn.Module) -> int:
    """Counts the trainable numbers of a model; a tied matrix counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def check_length(name: str, length: int, limit: int) -> None:
    """Checks the length of a text in tokens.

    Raises:
        ValueError: it is above the limit.
    """
    if length > limit:
        raise ValueError(f"{name} may have at most {limit} tokens, and has {length}: truncate it, or raise the limit")
