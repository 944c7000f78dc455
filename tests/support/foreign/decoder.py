"""A decoder-only model from outside the kit: grouped-query attention, rotary positions, RMSNorm and a gated MLP."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, LAYERS, LENGTH = 96, 32, 4, 2, 8, 2, 64


def rotate(tensor, position_ids):
    """Rotary embedding: (B, T, H, K), (B, T) -> (B, T, H, K)."""
    half = tensor.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = position_ids[:, :, None, None] * frequencies.to(tensor.dtype)
    first, second = tensor[..., :half], tensor[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Layer(nn.Module):
    def __init__(self, number, **scoring):
        super().__init__()
        self.number, self.scoring = number, scoring
        self.sinks = nn.Parameter(torch.randn(HEADS)) if scoring else None
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.output = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden, position_ids, attend):
        normed = self.attention_norm(hidden)
        query = rotate(self.query(normed).unflatten(-1, (HEADS, HEAD)), position_ids)
        key = rotate(self.key(normed).unflatten(-1, (KV_HEADS, HEAD)), position_ids)
        value = self.value(normed).unflatten(-1, (KV_HEADS, HEAD))
        context = attend(query, key, value, layer=self.number, **self.scoring, sinks=self.sinks)
        hidden = hidden + self.output(context.flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class ForeignDecoder(nn.Module):
    max_length = LENGTH

    def __init__(self, *layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers or map(Layer, range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_ids, attend)
        return self.norm(hidden)

    def logits(self, hidden_states):
        return self.head(hidden_states)

    def read(self, file):
        """A helper, with a name that belongs to another protocol."""
        return self.load_state_dict(torch.load(file))


def build():
    return ForeignDecoder()


def build_scored():
    """Has scores of its own, a window in one of two layers, and numbers its layers from the last to the first."""
    return ForeignDecoder(Layer(1, scale=0.8, softcap=3.0, window=12), Layer(0, scale=0.5))
