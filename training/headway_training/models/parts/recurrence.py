"""Gated recurrent units (Cho et al. 2014), for sentences and step by step.

B rows, S tokens, E width of the input, H width of the state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Recur = Callable[[nn.GRU, Tensor, Tensor], tuple[Tensor, Tensor]]
"""What runs a bidirectional GRU over padded rows: inputs (B, S, E) and mask (B, S) -> states (B, S, 2H), forward and
backward ones beside each other, and the last state of each direction, (2, B, H). An exported graph is given another."""


def recur_packed(gru: nn.GRU, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Runs a GRU over rows padded on the right, without their padding; states at padding are zeros."""
    if inputs.is_meta:  # where shapes alone are computed, there are no lengths to pack by
        whole: tuple[Tensor, Tensor] = gru(inputs)
        return whole
    lengths = attention_mask.sum(dim=1).cpu()
    packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    states, last = gru(packed)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=inputs.shape[1])
    return padded, last


class StateGates(nn.Module):
    """The part of a GRU that reads the state: its products, and the gates.

    Args:
        d_state: H.
    """

    def __init__(self, d_state: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_state, 3 * d_state)

    def forward(self, gates: Tensor, state: Tensor) -> Tensor:
        """Makes the next state.

        Args:
            gates: (..., 3H), what the inputs say of the reset gate, the update gate and the candidate.
            state: (..., H).

        Returns:
            (..., H).
        """
        reset, update, candidate = gates.chunk(3, dim=-1)
        state_reset, state_update, state_candidate = self.linear(state).chunk(3, dim=-1)
        kept = torch.sigmoid(update + state_update)
        proposed = torch.tanh(candidate + torch.sigmoid(reset + state_reset) * state_candidate)
        following: Tensor = proposed + kept * (state - proposed)
        return following
