"""Multi-head attention: the projections around an injected attention function (Vaswani et al. 2017, section 3.2.2).

B rows, T tokens, S source tokens, D model width, H heads, K head width (D / H).

Deviation from the paper: the projections have biases, as in GPT-2, BERT and ViT; query, key and value are one matrix.
"""

from __future__ import annotations

from torch import Tensor, nn

from headway_training.models.parts.attention import Attend, AttendCross


class SelfAttention(nn.Module):
    """Projects tokens to queries, keys and values, lets `attend` mix them, and projects back."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = (num_heads, d_model // num_heads)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, hidden_states: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        query, key, value = (
            part.unflatten(-1, self.heads)  # (B, T, H, K)
            for part in self.query_key_value(hidden_states).chunk(3, dim=-1)
        )
        context = attend(query, key, value)  # (B, T, H, K)
        projected: Tensor = self.output(context.flatten(2))  # (B, T, D)
        return projected


class CrossAttention(nn.Module):
    """Projects target tokens to queries; the keys and values of the source are made once, by `keys_values`."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = (num_heads, d_model // num_heads)
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.output = nn.Linear(d_model, d_model)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) -> key and value, each (B, S, H, K)."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return key.unflatten(-1, self.heads), value.unflatten(-1, self.heads)

    def forward(self, hidden_states: Tensor, attend_cross: AttendCross) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        query = self.query(hidden_states).unflatten(-1, self.heads)  # (B, T, H, K)
        projected: Tensor = self.output(attend_cross(query).flatten(2))  # (B, T, D)
        return projected
