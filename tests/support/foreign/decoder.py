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
    def __init__(self, number, scale):
        super().__init__()
        self.number, self.scale = number, scale
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
        hidden = hidden + self.output(attend(query, key, value, layer=self.number, scale=self.scale).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class ForeignDecoder(nn.Module):
    max_length = LENGTH

    def __init__(self, numbers=range(LAYERS), scale=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(number, scale) for number in numbers)
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


def build_scaled():
    """Scales its scores by another factor than 1 / sqrt(K), and numbers its layers from the last to the first."""
    return ForeignDecoder(numbers=reversed(range(LAYERS)), scale=0.8)
