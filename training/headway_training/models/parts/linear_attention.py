"""Gated linear attention: a memory of fixed size in place of keys and values (Yang et al. 2024, arXiv 2312.06635).

B rows, T tokens, H heads, K head width, D model width, W width of the convolution.

A head's memory S is a K x K matrix. A token lets it decay and adds its key and value to it, and reads it by its query:

    S_t = a_t S_{t-1} + k_t^T v_t        o_t = q_t S_t / sqrt(K)        a_t = sigmoid(x_t w + b)^(1/16)

Over a block of tokens the same is computed by matrix products: what tokens of the block say to each other, weighted by
the decays between them, and what the memory before the block says (section 3.2, "chunkwise"). A block of one token is
the recurrence, a block of a whole text is attention without softmax; all are equal but for rounding.

Deviations from the paper: the decay is one number for a head and a token, as in Mamba-2 (Dao and Gu 2024), and not one
for each of the K numbers of a key, so that the decays within a block need no division; the projections read the sum of
a token and a short causal convolution, so that a token knows its neighbours; the bias of the decay starts at another
value for each head, so that heads forget at different paces; what is read is normalised over all heads together, as in
Mamba-2: where the context of a single head is near to zero, its direction is mostly rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.layer import PackedLinear

CONVOLUTION_WIDTH = 4
"""W: a token and the three before it."""
_TEMPERATURE = 16.0
_SLOWEST_BIAS = 6.0
"""Of the decay of the last head, which forgets half in about 4,500 tokens; the first starts at 0, half in 16."""
_UNSEEN = -1e4
"""Logarithm of a decay whose exponential is 0: of a token that comes later."""


def attend_block(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Reads a block of tokens, in fp32.

    Args:
        query: float (B, T, H, K).
        key: float (B, T, H, K).
        value: float (B, T, H, K).
        log_decay: float (B, T, H), at most 0: the logarithm of what is left of the memory when a token comes.
        memory: float32 (B, H, K, K), before the block.

    Returns:
        The context (B, T, H, K), and the memory after the block, (B, H, K, K).
    """
    query, key, value = (tensor.transpose(1, 2).float() for tensor in (query, key, value))  # (B, H, T, K)
    query = query * query.shape[-1] ** -0.5
    decay = log_decay.transpose(1, 2).float().cumsum(dim=-1)  # (B, H, T), from the beginning of the block
    positions = torch.arange(query.shape[2], device=query.device)
    later = positions[:, None] < positions  # (T, T)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, _UNSEEN).exp()  # (B, H, T, T)
    context = (query @ key.transpose(-2, -1) * between) @ value  # (B, H, T, K)
    context = context + (query * decay.exp()[..., None]) @ memory
    left = (decay[..., -1:] - decay).exp()  # (B, H, T), of each token at the end of the block
    memory = memory * decay[..., -1, None, None].exp() + (key * left[..., None]).transpose(-2, -1) @ value
    return context.transpose(1, 2), memory


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, memory: Tensor, *, block: int
) -> tuple[Tensor, Tensor]:
    """Reads tokens block by block: the arguments and results of `attend_block`, and how many tokens a block has."""
    contexts = []
    for parts in zip(*(torch.split(tensor, block, dim=1) for tensor in (query, key, value, log_decay)), strict=True):
        context, memory = attend_block(*parts, memory)  # type: ignore[call-arg]  # there are four parts
        contexts.append(context)
    return torch.cat(contexts, dim=1), memory


class LinearAttention(nn.Module):
    """A layer's memory: its convolution, projections, decays, and what is read of it.

    What is read is normalised and gated by the token (section 4.4).
    """

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        d_model, self.head_dim = configuration.d_model, configuration.head_dim
        # Three axes: an optimizer for matrices shall leave it to the other one.
        self.convolution = nn.Parameter(torch.zeros(CONVOLUTION_WIDTH, 1, d_model))
        self.query_key_value_gate = PackedLinear(d_model, [d_model] * 4, bias=configuration.biases)
        self.decay = nn.Linear(d_model, configuration.num_heads)
        self.norm = nn.RMSNorm(d_model, eps=configuration.norm_eps)
        self.output = nn.Linear(d_model, d_model, bias=configuration.biases)

    def reset_decays(self) -> None:
        """Lets heads start at their own paces; called after other initialisation."""
        num_heads = self.decay.out_features
        with torch.no_grad():
            self.decay.bias.copy_(torch.linspace(0.0, _SLOWEST_BIAS, num_heads))

    def forward(
        self, hidden_states: Tensor, earlier: Tensor, memory: Tensor, block: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads tokens after others.

        Args:
            hidden_states: float (B, T, D).
            earlier: float32 (B, W - 1, D), the hidden states before them; zeros at the beginning of a text.
            memory: float32 (B, H, K, K), of all before them; zeros at the beginning.
            block: Tokens of a block; None: all are one.

        Returns:
            What the layer adds (B, T, D), and `earlier` and `memory` for the tokens that follow.
        """
        length = hidden_states.shape[1]
        seen = torch.cat((earlier.to(hidden_states.dtype), hidden_states), dim=1)  # (B, W - 1 + T, D)
        mixed = hidden_states
        for offset in range(CONVOLUTION_WIDTH):
            mixed = mixed + self.convolution[offset] * seen[:, offset : offset + length]
        *parts, gate = self.query_key_value_gate.apart(mixed)  # (B, T, D) each
        query, key, value = (torch.unflatten(part, -1, (-1, self.head_dim)) for part in parts)  # (B, T, H, K)
        # The logarithm of the sigmoid, in the form that does not become -inf in ONNX, where that is two operators.
        log_decay = -F.softplus(-self.decay(mixed).float()) / _TEMPERATURE  # (B, T, H)
        if block is None:
            context, memory = attend_block(query, key, value, log_decay, memory)
        else:
            context, memory = attend_blocks(query, key, value, log_decay, memory, block=block)
        gated = self.norm(context.flatten(2).to(gate.dtype)) * F.silu(gate)  # (B, T, D)
        return self.output(gated), seen[:, length:].float(), memory
