"""A detector without anchors: of each cell of an image, the labels of an object there and the object's box.

B rows, I image size, S side of the map of cells, Q = S S cells, C labels.

It is FCOS (Tian et al. 2019, arXiv 1904.01355) in its outputs and CenterNet (Zhou et al. 2019, arXiv 1904.07850) in
what it learns: the scores of a label are one at the centre of its objects and fall off around it like a Gaussian.

Deviations from both: one map of cells for objects of all sizes, a small network of residual blocks, and no centreness.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.autoencoder import ResidualBlock
from headway_training.models.base import Model
from headway_training.models.configuration import Configuration

STRIDE: Final = 8
"""Pixels of a side of a cell."""
_NUM_GROUPS: Final = 8
_MOST_EXPONENT: Final = 4.0
_FIRST_SCORE: Final = 0.01
"""Score of all labels before training (Lin et al. 2017, section 3.3)."""
_SPREAD: Final = 0.09
"""Deviation of the Gaussian of an object, as a share of its sides (Liu et al. 2020, arXiv 1909.00700, section 3.3)."""
_LEAST_WEIGHT: Final = 0.2
"""Height of that Gaussian in the cells from which an object's box is learned."""
_BOX_WEIGHT: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig(Configuration):
    """Shape of a detector.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    image_size: int
    """Height and width of an image, in pixels; a multiple of 16."""
    num_classes: int
    """Labels."""
    width: int = 16
    """Channels at half of the image's resolution, a multiple of 8; twice as many after each halving, of which there are
    four."""
    num_blocks: int = 2
    """Residual blocks of the maps of 8 and of 16 pixels a cell."""

    def __post_init__(self) -> None:
        self._check_integers("image_size", "num_classes", "width", "num_blocks")
        if self.image_size % (2 * STRIDE):
            raise ValueError(f"image_size must be a multiple of {2 * STRIDE}, and is {self.image_size}")
        if self.width % _NUM_GROUPS:
            raise ValueError(f"width must be a multiple of {_NUM_GROUPS}, and is {self.width}")

    @property
    def num_cells(self) -> int:
        """Cells of an image."""
        return (self.image_size // STRIDE) ** 2


@architecture("detector", DetectorConfig, "object_detection", shows_attention=False)
class Detector(Model):
    """Images to logits and boxes of their cells."""

    def __init__(self, configuration: DetectorConfig) -> None:
        super().__init__()
        self.configuration = configuration
        widths = [configuration.width << halving for halving in range(4)]

        def halve(of: int, to: int) -> nn.Conv2d:
            return nn.Conv2d(of, to, kernel_size=3, stride=2, padding=1)

        def blocks(width: int) -> list[nn.Module]:
            return [ResidualBlock(width) for _ in range(configuration.num_blocks)]

        self.fine = nn.Sequential(
            halve(3, widths[0]),
            nn.GroupNorm(_NUM_GROUPS, widths[0]),
            nn.SiLU(),
            halve(widths[0], widths[1]),
            ResidualBlock(widths[1]),
            halve(widths[1], widths[2]),
            *blocks(widths[2]),
        )
        self.coarse = nn.Sequential(halve(widths[2], widths[3]), *blocks(widths[3]), nn.Conv2d(widths[3], widths[2], 1))
        self.joined = nn.Sequential(
            ResidualBlock(widths[2]),
            nn.GroupNorm(_NUM_GROUPS, widths[2]),
            nn.SiLU(),
            nn.Conv2d(widths[2], 2 * widths[2], kernel_size=3, padding=1),
            nn.GroupNorm(_NUM_GROUPS, 2 * widths[2]),
            nn.SiLU(),
        )
        self.labels = nn.Conv2d(2 * widths[2], configuration.num_classes, 1)
        self.sides = nn.Conv2d(2 * widths[2], 4, 1)
        nn.init.constant_(self.labels.bias, -math.log(1 / _FIRST_SCORE - 1))  # type: ignore[arg-type] # there is one
        nn.init.zeros_(self.sides.weight)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Finds objects.

        Args:
            pixel_values: float (B, 3, I, I), normalised.

        Returns:
            `logits` (B, Q, C), and `boxes` (B, Q, 4): centre, width and height, as shares of the image's sides.
        """
        fine = self.fine(pixel_values)
        coarse = F.interpolate(self.coarse(fine), scale_factor=2.0, mode="nearest")
        states = self.joined(fine + coarse)  # (B, D, S, S)
        logits = self.labels(states).flatten(2).transpose(1, 2)
        raw = self.sides(states).float().flatten(2).transpose(1, 2)  # (B, Q, 4)
        cells = self.configuration.image_size // STRIDE
        left_top, right_bottom = (2 * raw.clamp(-_MOST_EXPONENT, _MOST_EXPONENT).exp() / cells).chunk(2, dim=-1)
        boxes = torch.cat((_centres(cells, raw) + (right_bottom - left_top) / 2, left_top + right_bottom), dim=-1)
        return {"logits": logits, "boxes": boxes}


def _centres(cells: int, like: Tensor) -> Tensor:
    """Middles of all cells, x and y as shares of the image: (Q, 2)."""
    places = (torch.arange(cells, device=like.device, dtype=like.dtype) + 0.5) / cells
    return torch.stack((places.repeat(cells), places.repeat_interleave(cells)), dim=-1)


def detection_loss(logits: Tensor, boxes: Tensor, truth: Tensor, labels: Tensor, is_there: Tensor) -> Tensor:
    """The loss summed over the objects of rows; a row without objects counts for nothing.

    Scores have the penalty-reduced focal loss of Zhou et al. (2019), equation 1, boxes one less their generalised
    intersection over union (Rezatofighi et al. 2019, equation 4), averaged over the cells near an object's centre.

    Args:
        logits: float (B, Q, C).
        boxes: float (B, Q, 4), as `Detector` returns them.
        truth: float (B, P, 4): left, top, right and bottom of objects, as shares of the image.
        labels: int64 (B, P), 0 where there is no object.
        is_there: bool (B, P): whether there is an object.
    """
    cells = math.isqrt(logits.shape[1])
    sides = truth[..., 2:] - truth[..., :2]  # (B, P, 2)
    middle = (_places_of(truth, cells) + 0.5) / cells
    distance = _centres(cells, truth) - middle[:, :, None]  # (B, P, Q, 2)
    deviation = (_SPREAD * sides).clamp(min=0.25 / cells)[:, :, None]
    heights = (-(distance / deviation).square().sum(-1) / 2).exp() * is_there[..., None]  # (B, P, Q)
    targets = torch.zeros_like(logits).transpose(1, 2)  # (B, C, Q)
    targets = targets.scatter_reduce(1, labels[..., None].expand_as(heights), heights, "amax")
    targets = targets.transpose(1, 2)
    log_yes, log_no = F.logsigmoid(logits), F.logsigmoid(-logits)
    hits = (1 - log_yes.exp()).square() * log_yes
    misses = (1 - targets).pow(4) * log_yes.exp().square() * log_no
    scores = -torch.where(targets == 1, hits, misses).sum(dim=(1, 2))  # (B,)
    own = heights * (heights == heights.amax(dim=1, keepdim=True))  # a cell learns the box of its nearest object
    weights = own * (own > _LEAST_WEIGHT)
    corners = torch.cat((boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2), dim=-1)
    overlaps = generalised_iou(corners[:, None], truth[:, :, None])  # (B, P, Q)
    of_boxes = ((1 - overlaps) * weights).sum(-1) / weights.sum(-1).clamp(min=1e-6)  # (B, P)
    total: Tensor = (scores * is_there.any(dim=1)).sum() + _BOX_WEIGHT * (of_boxes * is_there).sum()
    return total


def logits_of_objects(logits: Tensor, truth: Tensor) -> Tensor:
    """Logits of the cells in which objects have their centres: (B, Q, C), (B, P, 4) -> (B, P, C)."""
    cells = math.isqrt(logits.shape[1])
    x, y = _places_of(truth, cells).long().unbind(-1)
    return logits.gather(1, (y * cells + x)[..., None].expand(-1, -1, logits.shape[2]))


def _places_of(truth: Tensor, cells: int) -> Tensor:
    """Column and row of the cells in which boxes, (..., 4), have their centres: (..., 2)."""
    centres = (truth[..., :2] + truth[..., 2:]) / 2
    return (centres * cells).floor().clamp(0, cells - 1)


def generalised_iou(first: Tensor, second: Tensor) -> Tensor:
    """Generalised intersection over union of boxes, (..., 4): left, top, right and bottom -> (...)."""
    inner = (torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])).clamp(0)
    outer = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    areas = [(one[..., 2:] - one[..., :2]).prod(-1) for one in (first, second)]
    both, hull = inner.prod(-1), outer.prod(-1).clamp(min=1e-9)
    union = (areas[0] + areas[1] - both).clamp(min=1e-9)
    return both / union - (hull - union) / hull
