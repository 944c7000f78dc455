"""Reads pairs with types of tokens, tells several labels, and can be asked for the vector that it tells them by."""

import torch
from foreign.text_classifier import CLASSES, LENGTH, VOCABULARY, WIDTH
from torch import nn


class ForeignPairClassifier(nn.Module):
    max_length = LENGTH
    num_token_types = 2
    pooling = "largest"

    def __init__(self):
        super().__init__()
        self.words, self.types = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def pool(self, input_ids, attention_mask, token_type_ids):
        hidden = torch.tanh(self.words(input_ids) + self.types(token_type_ids))
        return hidden.masked_fill(attention_mask.unsqueeze(-1) == 0, -2.0).amax(dim=1)

    def classify(self, pooled):
        return self.head(pooled)

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.classify(self.pool(input_ids, attention_mask, token_type_ids))


def build():
    return ForeignPairClassifier()
