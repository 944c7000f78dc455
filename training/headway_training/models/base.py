"""What all models share."""

from __future__ import annotations

from typing import Literal, Self

from torch import nn

from headway_training.models.parts.attention import KERNELS, Kernel, scaled_dot_product_attention

AttentionKind = Literal["plain", "fused"]


class Model(nn.Module):
    """A model that computes its own attention where no other is injected, by a kernel that can be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Kernel = scaled_dot_product_attention

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel: `plain` operators, the reference and what is exported, or torch's `fused` ones.

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
    """Checks a text's length in tokens.

    Raises:
        ValueError: it is past the limit.
    """
    if length > limit:
        raise ValueError(f"{name} may have at most {limit} tokens, and has {length}: truncate it, or raise the limit")
