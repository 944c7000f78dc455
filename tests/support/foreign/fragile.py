"""Modules that int8 can break: a channel that nothing reads is so large that a row's other channels fall to level 0.

The weights that read this channel are 0, so that in fp32 it changes nothing.
"""

import torch
from foreign import decoder, encoder_decoder, segmenter
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, WIDTH, LENGTH, FIRST = 160, 128, 160, 100
"""So large that the weights of a head are quantized: smaller ones stay as they are."""
BREAKING = 1e4
"""What takes all levels; 20 leaves some noise."""


def widened(hidden, outlier, where=None):
    """Adds the channel: (..., D) -> (..., D + 1), where asked for."""
    channel = torch.full_like(hidden[..., :1], outlier)
    return torch.cat([hidden, channel if where is None else channel * where.unsqueeze(-1)], -1)


class Head(nn.Module):
    """A projection that does not read the channel."""

    def __init__(self, width, columns, scale=1.0, bias=0.0):
        super().__init__()
        self.linear = nn.Linear(width + 1, columns)
        with torch.no_grad():
            self.linear.weight.normal_(std=scale / width**0.5)
            self.linear.weight[:, -1] = 0
            self.linear.bias.fill_(bias)

    def forward(self, hidden):
        return self.linear(hidden)


class Classifier(nn.Module):
    """Labels of texts; with `only_long`, the channel is there in texts of more than 64 tokens alone."""

    max_length = LENGTH

    def __init__(self, num_labels, *, outlier=BREAKING, only_long=False, **head):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = Head(WIDTH, num_labels, **head)
        self.outlier, self.only_long = outlier, only_long

    def forward(self, input_ids, attention_mask):
        weights = attention_mask.unsqueeze(-1).to(torch.float32)
        counts = weights.sum(1)
        hidden = (self.embedding(input_ids) * weights).sum(1) / counts.sqrt()
        return self.head(widened(hidden, self.outlier, (counts[:, 0] > 64).float() if self.only_long else None))


class Decoder(decoder.ForeignDecoder):
    """The channel is there from position `first` on."""

    max_length = LENGTH

    def __init__(self, vocabulary=VOCABULARY, *, first=FIRST):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, decoder.WIDTH), Head(decoder.WIDTH, vocabulary, scale=2)
        self.first = first

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = super().hidden_states(input_ids, position_ids, attend)
        return widened(hidden, BREAKING, (position_ids >= self.first).float())


class EncoderDecoder(encoder_decoder.ForeignEncoderDecoder):
    """The channel is there from position `first` of a target on."""

    max_source_length = max_target_length = LENGTH

    def __init__(self, *, first=FIRST):
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, encoder_decoder.WIDTH) for _ in range(2))
        self.positions = nn.Embedding(LENGTH, encoder_decoder.WIDTH)
        self.head, self.first = Head(encoder_decoder.WIDTH, VOCABULARY, scale=2), first

    def decode(self, input_ids, position_ids, attend, attend_cross):
        hidden = super().decode(input_ids, position_ids, attend, attend_cross)
        return widened(hidden, BREAKING, (position_ids >= self.first).float())

    def logits(self, hidden_states):
        return self.head(hidden_states)


class Prompts(nn.Module):
    """Masks of what is pointed at, and of nothing where `bias` is low."""

    def __init__(self, *, outlier, bias):
        super().__init__()
        self.place = nn.Linear(2, WIDTH)
        self.image = nn.Linear(segmenter.WIDTH, WIDTH)
        self.masks = Head(WIDTH, segmenter.NUM_MASKS * segmenter.GRID**2, scale=4, bias=bias)
        self.iou = Head(WIDTH, segmenter.NUM_MASKS)
        self.outlier = outlier

    def forward(self, embedding, points, point_labels, *, earlier_mask=None, has_earlier_mask=None):
        image = self.image(embedding.mean(1))
        there = (point_labels >= 0).unsqueeze(-1).float()
        asked = F.gelu(image + (self.place(4 * points) * there).sum(1))
        if earlier_mask is not None:
            read = earlier_mask.flatten(1).mean(1)
            asked = asked + (read if has_earlier_mask is None else read * has_earlier_mask)[:, None]
        hidden = widened(asked, self.outlier)
        masks = self.masks(hidden).unflatten(-1, (segmenter.NUM_MASKS, segmenter.GRID, segmenter.GRID))
        return {"masks": masks, "predicted_iou": self.iou(hidden).sigmoid()}


class Segmenter(nn.Module):
    mask_size = segmenter.GRID

    def __init__(self, *, outlier=BREAKING, bias=0.0):
        super().__init__()
        self.encoder, self.decoder = segmenter.Patches(), Prompts(outlier=outlier, bias=bias)
