"""A text classifier from outside the kit: torch's own encoder and a mean over the tokens."""

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, CLASSES = 120, 32, 48, 3


class ForeignTextClassifier(nn.Module):
    max_length = LENGTH

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3)  # its own affair, and no attention

    def forward(self, input_ids, attention_mask):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.embedding(input_ids) + self.positions(positions)
        hidden = self.encoder(hidden, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


def build():
    return ForeignTextClassifier()
