"""A token classifier from outside the kit: convolutions over torch's own embedding."""

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, TAGS = 120, 32, 48, 3


class ForeignTokenClassifier(nn.Module):
    max_length = LENGTH

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, input_ids, attention_mask):
        embedded = self.embedding(input_ids) * attention_mask.unsqueeze(-1).to(self.head.weight.dtype)
        mixed = self.convolution(embedded.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.relu(mixed))


def build():
    return ForeignTokenClassifier()
