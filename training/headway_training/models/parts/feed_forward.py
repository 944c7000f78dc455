"""The position-wise feed-forward network (Vaswani et al. 2017, section 3.3, equation 2).

B rows, T tokens, D model width, F inner width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Activation = Literal["relu", "gelu"]


class FeedForward(nn.Module):
    """Widens, applies the activation, narrows.

    Deviation from GPT-2: GELU is the exact one (erf), not its tanh approximation.
    """

    def __init__(self, d_model: int, d_ff: int, activation: Activation) -> None:
        super().__init__()
        self.input = nn.Linear(d_model, d_ff)
        self.activation = nn.ReLU() if activation == "relu" else nn.GELU()
        self.output = nn.Linear(d_ff, d_model)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        inner = self.activation(self.input(hidden_states))  # (B, T, F)
        narrowed: Tensor = self.output(inner)
        return narrowed
