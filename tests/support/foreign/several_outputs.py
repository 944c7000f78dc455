"""A text classifier from outside the kit that names its outputs: logits, a score a token, and the words it knows."""

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, CLASSES = 120, 16, 48, 3


class SeveralOutputs(nn.Module):
    max_length = LENGTH

    def __init__(self):
        super().__init__()
        self.words, self.score = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids, attention_mask):
        hidden = torch.tanh(self.words(input_ids))
        scores = self.score(hidden).squeeze(-1)  # (B, T)
        weights = scores.masked_fill(attention_mask == 0, -1e4).softmax(-1)
        pooled = (weights.unsqueeze(1) @ hidden).squeeze(1)
        return {
            "logits": self.head(pooled),
            "token_scores": scores,
            "likeliest_token": scores.masked_fill(attention_mask == 0, -1e4).argmax(-1),
            "prototypes": pooled.unsqueeze(1) * torch.arange(1.0, 5.0)[:, None],  # (B, 4, D)
        }


class Drifting(SeveralOutputs):
    """Its logits are exported truthfully, its scores are not: they depend on how often it was called."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, input_ids, attention_mask):
        self.calls += 1
        outputs = super().forward(input_ids, attention_mask)
        return outputs | {"token_scores": outputs["token_scores"] * self.calls}


class Unnamed(SeveralOutputs):
    """It names no output logits."""

    def forward(self, input_ids, attention_mask):
        return {"scores": super().forward(input_ids, attention_mask)["logits"]}


class TwiceAsLong(SeveralOutputs):
    """One of its axes is as long as no axis of its inputs."""

    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        return outputs | {"token_scores": torch.cat([outputs["token_scores"]] * 2, dim=1)}


def build():
    return SeveralOutputs()


def build_drifting():
    return Drifting()


def build_unnamed():
    return Unnamed()


def build_twice_as_long():
    return TwiceAsLong()
