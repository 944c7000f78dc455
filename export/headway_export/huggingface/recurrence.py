"""Long short-term memory (Hochreiter and Schmidhuber 1997), by the operator of ONNX in a graph.

T times, B rows, D channels, I inputs, N directions.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def recur(lstm: nn.LSTM, states: Tensor) -> Tensor:
    """(T, B, I) -> (T, B, N D), by layers that read times first."""
    if not torch.onnx.is_in_onnx_export():
        return cast("Tensor", lstm(states)[0])
    directions = ("", "_reverse") if lstm.bidirectional else ("",)
    size = (len(directions), states.shape[1], lstm.hidden_size)
    for layer in range(lstm.num_layers):
        inward, recurrent, *biases = (
            torch.stack([_in_order(cast("Tensor", getattr(lstm, f"{name}_l{layer}{end}"))) for end in directions])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        found, *_ = torch.onnx.ops.symbolic_multi_out(
            "LSTM",
            (states, inward, recurrent, torch.cat(biases, dim=1)),
            {"hidden_size": lstm.hidden_size, "direction": "bidirectional" if lstm.bidirectional else "forward"},
            dtypes=(states.dtype,) * 3,
            shapes=((states.shape[0], *size), size, size),
        )  # (T, N, B, D)
        states = found.transpose(1, 2).flatten(2)
    return states


def _in_order(gates: Tensor) -> Tensor:
    """Input, forget, cell and output gates, in the order of ONNX: (4 D, ...) -> (4 D, ...)."""
    of_input, forget, cell, output = gates.detach().chunk(4)
    return torch.cat([of_input, output, forget, cell])
