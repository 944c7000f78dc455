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

    def logits_and_embedding(self, input_ids, attention_mask, token_type_ids):
        hidden = torch.tanh(self.words(input_ids) + self.types(token_type_ids))
        pooled = hidden.masked_fill(attention_mask.unsqueeze(-1) == 0, -2.0).amax(dim=1)
        return self.head(pooled), pooled

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.logits_and_embedding(input_ids, attention_mask, token_type_ids)[0]


def build():
    return ForeignPairClassifier()
