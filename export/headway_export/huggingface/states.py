"""States of decoders of `transformers` beside keys and values: of short convolutions and of recurrences.

The layers of these families ask their cache for states in the same words, and compute with functions of the same names.
`States` is such a cache, and `reading` puts functions in the place of theirs that go on from the state before: a text
that is read in pieces of any length, one token too, has the logits of the whole.

All recurrences are one operator of ONNX Runtime, `com.microsoft::LinearAttention`: a token lets a memory decay, adds an
outer product to it and reads it. It computes token by token, so the pieces give the very bits of the whole.

B rows, T tokens, C channels, W width of a convolution, H heads, G heads of queries and keys, which divide H, N key
width, P value width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)
from transformers.activations import ACT2FN

from headway_export.errors import SourceError
from headway_export.rewriting import LINEAR_ATTENTION

_CONVOLUTION: Final = "causal_conv1d_fn"
"""What every family with such states has a function of this name for."""
_NORM_EPS: Final = 1e-6
"""Of queries and keys that are scaled to length 1."""


class States:
    """A cache of `transformers` that keeps states alone: keys and values are kept by the attention that is injected.

    Attributes:
        present: The states after the tokens, in the order in which the layers ask for them.
    """

    def __init__(self, past: Sequence[Tensor] | None) -> None:
        """Takes the states before the tokens, in that order; None: the beginning of a text."""
        self._past = past
        self.present: list[Tensor] = []

    def past(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Returns the state that is asked for next: of the shape (B, ...), zeros at the beginning of a text."""
        return like.new_zeros(tuple(shape)) if self._past is None else self._past[len(self.present)]

    # What layers of `transformers` call

    def update_conv_state(self, inputs: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """(B, C, T) -> (B, C, W - 1 + T): the inputs of a convolution with those of the tokens before."""
        rows, channels = inputs.shape[:2]
        past = self.past((rows, conv_kernel_size - 1, channels), inputs)
        seen = torch.cat((past, inputs.transpose(1, 2)), dim=1)  # (B, W - 1 + T, C)
        self.present.append(seen[:, -past.shape[1] :])
        return seen.transpose(1, 2)

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes what one of the functions below has returned, which has kept it.

        Raises:
            SourceError: It is another.
        """
        if not self.present or state is not self.present[-1]:
            raise SourceError("it keeps a recurrent state that is computed by no function known here")
        return state

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Says that there is none, so that a single token is read as several are."""

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        """The same: the functions below take the state by themselves."""

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """The same."""
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Nothing is taken back."""
        return False

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Positions are given."""
        return 0

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the tokens."""
        return key, value


def knows_states_of(model_class: type) -> bool:
    """Returns True if the states of a class of models are such that `reading` knows."""
    return hasattr(sys.modules[model_class.__module__], _CONVOLUTION)


@contextmanager
def reading(model: nn.Module, past: Sequence[Tensor] | None) -> Iterator[States]:
    """Lets a model of `transformers` go on from states, in the cache that is to be given to it."""
    states = States(past)
    own = {_CONVOLUTION: _convolve} | {name: make(states) for name, make in _RECURRENCES.items()}
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as stack:
        for file in files:
            for name in own.keys() & vars(file).keys():
                stack.callback(setattr, file, name, getattr(file, name))
                setattr(file, name, own[name])
        yield states


def _convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """A convolution of each channel: (B, C, W - 1 + T), (C, W), (C,) -> (B, C, T).

    As a sum of W products with the channels last: where a step has one token a row, that takes 0.7 ms for 8 rows of
    6,144 channels, and ONNX Runtime's convolution 5.1 ms.
    """
    seen = inputs.transpose(1, 2)  # (B, W - 1 + T, C)
    width = weight.shape[1]
    length = seen.shape[1] - (width - 1)
    mixed = seen[:, :length] * weight[:, 0]
    for offset in range(1, width):
        mixed = mixed + seen[:, offset : offset + length] * weight[:, offset]
    if bias is not None:
        mixed = mixed + bias
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    return mixed.transpose(1, 2)


# Recurrences


def _recur(
    states: States,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    beta: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Reads tokens by a memory M of N x P numbers for each head, in fp32.

        M_t = exp(g_t) M_(t-1) + k_t^T v_t                                    o_t = scale q_t M_t

    With `beta` (the gated delta rule, Yang et al. 2024, arXiv 2412.06464) v_t is beta_t (v_t - k_t exp(g_t) M_(t-1)).

    Args:
        states: The memory before, and what keeps the one after.
        query: (B, T, G, N).
        key: (B, T, G, N).
        value: (B, T, H, P).
        decay: g, (B, T, H) or (B, T, H, N), at most 0.
        beta: (B, T, H).
        scale: Of what is read.

    Returns:
        (B, T, H, P), and the memory (B, H, N, P).
    """
    rows, length, groups, width = key.shape
    heads, value_width = value.shape[2:]
    query, key, value, decay = (tensor.float() for tensor in (query, key, value, decay))
    memory = states.past((rows, heads, width, value_width), value)
    if torch.onnx.is_in_onnx_export():
        inputs = [query.flatten(2), key.flatten(2), value.flatten(2), memory, decay.flatten(2)]
        if beta is not None:
            inputs.append(beta.float())
        attributes: dict[str, Any] = {"q_num_heads": groups, "kv_num_heads": heads, "scale": scale}
        attributes["update_rule"] = "gated" if beta is None else "gated_delta"
        output, memory = torch.onnx.ops.symbolic_multi_out(
            f"com.microsoft::{LINEAR_ATTENTION}",
            inputs,
            attributes,
            dtypes=(torch.float32, torch.float32),
            shapes=((rows, length, heads * value_width), memory.shape),
            version=1,
        )
        output = output.reshape(rows, length, heads, value_width)
    else:
        query, key = (tensor.repeat_interleave(heads // groups, dim=2) for tensor in (query, key))
        kept = (decay if decay.ndim == 4 else decay[..., None]).exp()
        outputs = []
        for token in range(length):
            memory = memory * kept[:, token, :, :, None]
            added = value[:, token]  # (B, H, P)
            if beta is not None:
                added = beta[:, token, :, None] * (added - torch.einsum("bhnp,bhn->bhp", memory, key[:, token]))
            memory = memory + key[:, token, :, :, None] * added[:, :, None]
            outputs.append(torch.einsum("bhnp,bhn->bhp", memory, query[:, token]) * scale)
        output = torch.stack(outputs, dim=1)
    states.present.append(memory)
    return output, memory


def _delta_rule(states: States) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the gated delta rule, whose decay is one of a head or one of each number of its keys."""

    def read(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if use_qk_l2norm_in_kernel:
            query, key = (
                tensor.float() * torch.rsqrt(tensor.float().pow(2).sum(dim=-1, keepdim=True) + _NORM_EPS)
                for tensor in (query, key)
            )
        output, memory = _recur(states, query, key, value, decay=g, beta=beta, scale=query.shape[-1] ** -0.5)
        return output.to(query.dtype), memory

    return read


def _chunk_scan(states: States) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the scan of Mamba 2: a decay for each head and token (Dao and Gu 2024, arXiv 2405.21060)."""

    def read(
        hidden_states: Tensor,  # (B, T, H, P)
        dt: Tensor,  # (B, T, H)
        A: Tensor,  # noqa: N803 (the library's names; (H,))
        B: Tensor,  # noqa: N803 ((B, T, G, N))
        C: Tensor,  # noqa: N803 ((B, T, G, N))
        *,
        D: Tensor | None = None,  # noqa: N803 ((H,))
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        steps = _steps(dt if dt_bias is None else dt + dt_bias, softplus=dt_softplus, limit=dt_limit)
        values = hidden_states.float()
        output, memory = _recur(states, C, B, values * steps[..., None], decay=steps * A.float())
        if D is not None:
            output = output + values * D[:, None]
        if z is not None:
            output = output * F.silu(z)
        return output, memory

    return read


def _selective_scan(states: States) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the scan of Mamba: a decay for each channel, number of the state and token (Gu and Dao 2023).

    A channel is a head whose values have one number.
    """

    def read(
        hidden_states: Tensor,  # (B, C, T)
        dt: Tensor,  # (B, C, T)
        A: Tensor,  # noqa: N803 ((C, N))
        B: Tensor,  # noqa: N803 ((B, N, T))
        C: Tensor,  # noqa: N803 ((B, N, T))
        *,
        D: Tensor | None = None,  # noqa: N803 ((C,))
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        dt, values = dt.transpose(1, 2), hidden_states.float().transpose(1, 2)  # (B, T, C)
        steps = _steps(dt if delta_bias is None else dt + delta_bias, softplus=delta_softplus)
        query, key = (tensor.transpose(1, 2)[:, :, None] for tensor in (C, B))  # (B, T, 1, N)
        decay = steps[..., None] * A.float()  # (B, T, C, N)
        output, memory = _recur(states, query, key, (values * steps)[..., None], decay=decay)
        output = output.squeeze(-1)
        if D is not None:
            output = output + values * D
        output = output.transpose(1, 2)
        if z is not None:
            output = output * F.silu(z)
        return output, memory

    return read


def _steps(dt: Tensor, *, softplus: bool, limit: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """Returns the widths of the steps of a state-space model."""
    steps = F.softplus(dt.float()) if softplus else dt.float()
    return steps if limit == (0.0, float("inf")) else steps.clamp(*limit)


_RECURRENCES: Final[dict[str, Callable[[States], Callable[..., tuple[Tensor, Tensor]]]]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
}
"""By the names that the functions have in `transformers`."""
