"""A module that cannot be exported truthfully: its answer depends on how often it was called."""

from torch import nn


class Unstable(nn.Module):
    max_length = 16

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(120, 8)
        self.calls = 0

    def forward(self, input_ids, attention_mask):
        self.calls += 1
        return (self.table(input_ids) * attention_mask.unsqueeze(-1)).sum(1) * self.calls


def build():
    return Unstable()
