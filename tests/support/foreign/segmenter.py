"""A segmentation model from outside the kit: masks are the patches that resemble what is pointed at."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

SIZE, PATCH, WIDTH, NUM_MASKS = 16, 4, 16, 3
GRID = SIZE // PATCH


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)

    def forward(self, pixel_values):
        return {"embedding": self.projection(pixel_values).flatten(2).transpose(1, 2)}  # (B, patches, WIDTH)


class Prompts(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(4, WIDTH)
        self.place = nn.Linear(2, WIDTH)
        self.queries = nn.Linear(WIDTH, NUM_MASKS * WIDTH)
        self.iou = nn.Linear(WIDTH, NUM_MASKS)
        self.earlier = nn.Linear(GRID * GRID, WIDTH)

    def forward(self, embedding, points, point_labels, *, earlier_mask=None, has_earlier_mask=None):
        there = (point_labels >= 0).unsqueeze(-1)  # a padded point changes nothing
        asked = self.place(points) + self.kinds(point_labels.clamp(min=0))
        prompt = torch.where(there, asked, 0.0).sum(1)
        if earlier_mask is not None:
            read = self.earlier(earlier_mask.flatten(1))
            prompt = prompt + (read if has_earlier_mask is None else read * has_earlier_mask[:, None])
        queries = self.queries(F.gelu(prompt)).unflatten(-1, (NUM_MASKS, WIDTH))
        masks = (queries @ embedding.transpose(1, 2)).unflatten(-1, (GRID, GRID))
        return {"masks": masks, "predicted_iou": self.iou(prompt).sigmoid()}


class Segmenter(nn.Module):
    mask_size = GRID

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Patches(), Prompts()


def build():
    return Segmenter()


def build_without_size():
    module = nn.Module()
    module.encoder, module.decoder = Patches(), Prompts()
    return module
