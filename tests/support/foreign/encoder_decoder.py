"""An encoder-decoder from outside the kit, around torch's own encoder."""

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 80, 32, 4, 32, 2


class DecoderLayer(nn.Module):
    def __init__(self, number, scale):
        super().__init__()
        self.number, self.scale = number, scale
        self.self_projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.self_output, self.cross_output = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross_query, self.cross_key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, hidden, attend, attend_cross):
        query, key, value = self.self_projection(hidden).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        context = attend(query, key, value, layer=self.number, scale=self.scale)
        hidden = self.norms[0](hidden + self.self_output(context.flatten(2)))
        query = self.cross_query(hidden).unflatten(-1, (HEADS, WIDTH // HEADS))
        context = attend_cross(query, layer=self.number, scale=self.scale)
        hidden = self.norms[1](hidden + self.cross_output(context.flatten(2)))
        return self.norms[2](hidden + self.mlp(hidden))


class ForeignEncoderDecoder(nn.Module):
    max_source_length = LENGTH
    max_target_length = LENGTH

    def __init__(self, scale=None):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(DecoderLayer(number, scale) for number in range(LAYERS))

    def encode(self, input_ids, attention_mask):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.source(input_ids) + self.positions(positions)
        return self.encoder(hidden, src_key_padding_mask=attention_mask == 0)

    def cross_keys_values(self, memory):
        shape = (2, HEADS, WIDTH // HEADS)
        return [layer.cross_key_value(memory).unflatten(-1, shape).unbind(2) for layer in self.decoder]

    def decode(self, input_ids, position_ids, attend, attend_cross):
        hidden = self.target(input_ids) + self.positions(position_ids)
        for layer in self.decoder:
            hidden = layer(hidden, attend, attend_cross)
        return hidden

    def logits(self, hidden_states):
        return hidden_states @ self.target.weight.T

    def step(self, optimizer):
        """A helper, with a name that belongs to another protocol."""
        optimizer.step()


def build():
    return ForeignEncoderDecoder()


def build_scaled():
    """Scales its scores by another factor than 1 / sqrt(K)."""
    return ForeignEncoderDecoder(scale=0.8)
