"""Layers of a transformer: self-attention, cross-attention and feed-forward networks, each in a residual connection.

B rows, T tokens, S source tokens, D model width, F inner width, H heads, G key and value heads, K head width.

Deviation from Vaswani et al. (2017): the projections of attention have biases unless the configuration says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from headway_training.models.configuration import Activation, LayerConfig
from headway_training.models.parts.attention import Attend, AttendCross


def make_norm(configuration: LayerConfig) -> nn.Module:
    """Makes a normalisation of the model's width."""
    if configuration.norm_kind == "rms_norm":
        return nn.RMSNorm(configuration.d_model, eps=configuration.norm_eps)
    return nn.LayerNorm(configuration.d_model, eps=configuration.norm_eps, bias=configuration.biases)


class PackedLinear(nn.Linear):
    """Several linear maps of the same input, held as one matrix and computed as one product.

    Args:
        d_input: width of the input.
        widths: width of each map's output.
        bias: the maps have biases.
    """

    def __init__(self, d_input: int, widths: list[int], *, bias: bool) -> None:
        super().__init__(d_input, sum(widths), bias=bias)
        self.widths = widths

    def apart(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """(..., d_input) -> the output of each map, (..., its width)."""
        return torch.split(self(inputs), self.widths, dim=-1)


class SelfAttention(nn.Module):
    """Multi-head attention of tokens to each other, computed by `attend` (Vaswani et al. 2017, section 3.2.2).

    Args:
        configuration: of the layer.
        layer: the layer's number, by which it names itself to `attend`.
    """

    def __init__(self, configuration: LayerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = configuration.head_dim
        kv_width = (configuration.num_kv_heads or configuration.num_heads) * configuration.head_dim
        widths = [configuration.d_model, kv_width, kv_width]
        self.query_key_value = PackedLinear(configuration.d_model, widths, bias=configuration.biases)
        self.output = nn.Linear(configuration.d_model, configuration.d_model, bias=configuration.biases)

    def forward(self, hidden_states: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        query, key, value = (
            torch.unflatten(part, -1, (-1, self.head_dim))  # (B, T, H, K), and twice (B, T, G, K)
            for part in self.query_key_value.apart(hidden_states)
        )
        context = attend(query, key, value, layer=self.layer)  # (B, T, H, K)
        projected: Tensor = self.output(context.flatten(2))  # (B, T, D)
        return projected


class CrossAttention(nn.Module):
    """Multi-head attention of target tokens to a source, with as many key and value heads as query heads.

    Args:
        configuration: of the layer.
        layer: the layer's number, by which it names itself to `attend_cross`.
    """

    def __init__(self, configuration: LayerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (configuration.num_heads, configuration.head_dim)
        self.query = nn.Linear(configuration.d_model, configuration.d_model, bias=configuration.biases)
        self.key_value = PackedLinear(configuration.d_model, [configuration.d_model] * 2, bias=configuration.biases)
        self.output = nn.Linear(configuration.d_model, configuration.d_model, bias=configuration.biases)

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Projects a source, once for all target tokens: (B, S, D) -> key and value, each (B, S, H, K)."""
        key, value = (torch.unflatten(part, -1, self.heads) for part in self.key_value.apart(memory))
        return key, value

    def forward(self, hidden_states: Tensor, attend_cross: AttendCross) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        query = self.query(hidden_states).unflatten(-1, self.heads)  # (B, T, H, K)
        projected: Tensor = self.output(attend_cross(query, layer=self.layer).flatten(2))  # (B, T, D)
        return projected


ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
"""What makes each activation function."""


class FeedForward(nn.Module):
    """Widens each token, applies the activation, narrows (Vaswani et al. 2017, section 3.3, equation 2).

    Gated, it multiplies the activation of one widened token by another: act(x W) * (x V) (Shazeer 2020, equation 6).
    """

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        self.gated = configuration.gated
        widths = [configuration.d_ff] * (2 if self.gated else 1)
        self.input = PackedLinear(configuration.d_model, widths, bias=configuration.biases)
        self.activation = ACTIVATIONS[configuration.activation]()
        self.output = nn.Linear(configuration.d_ff, configuration.d_model, bias=configuration.biases)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.gated:
            gate, value = self.input.apart(hidden_states)
            inner = self.activation(gate) * value  # (B, T, F)
        else:
            inner = self.activation(self.input(hidden_states))  # (B, T, F)
        narrowed: Tensor = self.output(inner)
        return narrowed


class Residual(nn.Module):
    """x + f(norm(x)) in pre-norm order (GPT-2, ViT), norm(x + f(x)) in post-norm order (Transformer, BERT)."""

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        self.pre_norm = configuration.norm == "pre"
        self.norm = make_norm(configuration)
        self.dropout = nn.Dropout(configuration.dropout)

    def forward(self, hidden_states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, T, D) -> (B, T, D), where `sublayer` keeps the shape."""
        result: Tensor
        if self.pre_norm:
            result = hidden_states + self.dropout(sublayer(self.norm(hidden_states)))
        else:
            result = self.norm(hidden_states + self.dropout(sublayer(hidden_states)))
        return result


class Layer(nn.Module):
    """Self-attention, attention to a source where there is one, and a feed-forward network.

    Args:
        configuration: what the layer is made of.
        number: its number in the stack, from 0.
        cross: it attends to a source, as the decoder layers of an encoder-decoder model do.
    """

    def __init__(self, configuration: LayerConfig, number: int, *, cross: bool = False) -> None:
        super().__init__()
        self.attention = SelfAttention(configuration, number)
        self.attention_residual = Residual(configuration)
        self.cross_attention = CrossAttention(configuration, number) if cross else None
        self.cross_attention_residual = Residual(configuration) if cross else None
        self.feed_forward = FeedForward(configuration)
        self.feed_forward_residual = Residual(configuration)

    def forward(self, hidden_states: Tensor, attend: Attend, attend_cross: AttendCross | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); a layer that attends to a source needs `attend_cross`."""
        hidden_states = self.attention_residual(hidden_states, partial(self.attention, attend=attend))
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            assert attend_cross is not None, "a layer that attends to a source needs attend_cross"
            attention = partial(self.cross_attention, attend_cross=attend_cross)
            hidden_states = self.cross_attention_residual(hidden_states, attention)
        result: Tensor = self.feed_forward_residual(hidden_states, self.feed_forward)
        return result


class Stack(nn.Module):
    """Layers one after another; in pre-norm order a last normalisation follows them."""

    def __init__(self, configuration: LayerConfig, num_layers: int, *, cross: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(configuration, number, cross=cross) for number in range(num_layers))
        self.norm = make_norm(configuration) if configuration.norm == "pre" else nn.Identity()

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, S, D) -> the cross-attention keys and values of each layer, each (B, S, H, K)."""
        modules = (cast("CrossAttention", layer.cross_attention) for layer in self.layers)
        return [attention.keys_values(memory) for attention in modules]

    def forward(self, hidden_states: Tensor, attend: Attend, attend_cross: AttendCross | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); layers that attend to a source need `attend_cross`."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, attend, attend_cross)
        result: Tensor = self.norm(hidden_states)
        return result
