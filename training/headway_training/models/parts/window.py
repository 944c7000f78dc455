"""What stands next to a token, before any attention: the window approach (Collobert et al. 2011, section 3.2).

B rows, T tokens, D model width, W tokens on each side.

Deviations from the paper: the window is one sublayer of a residual network, normalised and added to what it reads, and
not the whole model; beyond the ends of a text stand zeros and no padding word.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)


class TokenWindow(nn.Module):
    """Adds to every token what one layer makes of it and its neighbours.

    Attention has to learn from data where the neighbours are; a few hundred thousand tokens teach it that badly. How a
    word is spelt shows in the pieces right beside each other.
    """

    def __init__(self, d_model: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(d_model)
        self.project = nn.Linear((2 * width + 1) * d_model, d_model)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, D) and (B, T) -> (B, T, D); what stands in the padding is not read."""
        own = self.norm(hidden_states) * attention_mask.to(hidden_states.dtype)[..., None]  # (B, T, D)
        padded = F.pad(own, (0, 0, self.width, self.width))  # (B, T + 2W, D)
        length = hidden_states.shape[1]
        neighbours = [padded[:, first : first + length] for first in range(2 * self.width + 1)]
        window = torch.cat(neighbours, dim=-1)  # (B, T, (2W + 1) D)
        read: Tensor = self.dropout(self.activation(self.project(window)))
        return hidden_states + read
