"""Layers: attention and feed-forward, each inside a residual connection with a normalisation before or after it.

B rows, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import Attend, AttendCross
from headway_training.models.parts.feed_forward import FeedForward
from headway_training.models.parts.multi_head import CrossAttention, SelfAttention


class Residual(nn.Module):
    """x + f(norm(x)) in pre-norm order (GPT-2, ViT), norm(x + f(x)) in post-norm order (Transformer, BERT)."""

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        self.pre_norm = configuration.norm == "pre"
        self.norm = nn.LayerNorm(configuration.d_model)
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
    """Self-attention and feed-forward: a layer of an encoder, a decoder-only model or a ViT."""

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(configuration.d_model, configuration.num_heads)
        self.attention_residual = Residual(configuration)
        self.feed_forward = make_feed_forward(configuration)
        self.feed_forward_residual = Residual(configuration)

    def forward(self, hidden_states: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        hidden_states = self.attention_residual(hidden_states, lambda x: self.attention(x, attend))
        result: Tensor = self.feed_forward_residual(hidden_states, self.feed_forward)
        return result


class CrossLayer(nn.Module):
    """Self-attention, attention to a source, and feed-forward: a decoder layer of an encoder-decoder model."""

    def __init__(self, configuration: LayerConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(configuration.d_model, configuration.num_heads)
        self.attention_residual = Residual(configuration)
        self.cross_attention = CrossAttention(configuration.d_model, configuration.num_heads)
        self.cross_attention_residual = Residual(configuration)
        self.feed_forward = make_feed_forward(configuration)
        self.feed_forward_residual = Residual(configuration)

    def forward(self, hidden_states: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        hidden_states = self.attention_residual(hidden_states, lambda x: self.attention(x, attend))
        hidden_states = self.cross_attention_residual(hidden_states, lambda x: self.cross_attention(x, attend_cross))
        result: Tensor = self.feed_forward_residual(hidden_states, self.feed_forward)
        return result


class Stack(nn.Module):
    """Layers one after another; in pre-norm order a last normalisation follows them."""

    def __init__(self, configuration: LayerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(configuration) for _ in range(num_layers))
        self.norm = make_last_norm(configuration)

    def forward(self, hidden_states: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, attend)
        result: Tensor = self.norm(hidden_states)
        return result


class CrossStack(nn.Module):
    """Decoder layers one after another; in pre-norm order a last normalisation follows them."""

    def __init__(self, configuration: LayerConfig, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(configuration) for _ in range(num_layers))
        self.norm = make_last_norm(configuration)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, S, D) -> a (key, value) a layer, each (B, S, H, K)."""
        return [layer.cross_attention.keys_values(memory) for layer in self._cross_layers()]

    def forward(self, hidden_states: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, attend, attend_cross)
        result: Tensor = self.norm(hidden_states)
        return result

    def _cross_layers(self) -> list[CrossLayer]:
        return [layer for layer in self.layers if isinstance(layer, CrossLayer)]


def make_feed_forward(configuration: LayerConfig) -> FeedForward:
    """Makes a layer's feed-forward network."""
    return FeedForward(configuration.d_model, configuration.d_ff, configuration.activation)


def make_last_norm(configuration: LayerConfig) -> nn.Module:
    """Makes what follows the last layer: in post-norm order its output is normalised already."""
    return nn.LayerNorm(configuration.d_model) if configuration.norm == "pre" else nn.Identity()
