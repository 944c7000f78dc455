"""Images of SigLIP 2 as its processors cut them: patches of images that keep their proportions (arXiv 2502.14786).

B images, H, W rows and columns of patches, P pixels of a patch's side, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WholeImageProcessor:
    """The image processor of `transformers`, whose patches are put together again."""

    own: Any
    """`Siglip2ImageProcessorPil`."""

    def __getattr__(self, name: str) -> Any:
        """Returns a setting."""
        return getattr(self.own, name)

    def __call__(self, picture: Image.Image, *, return_tensors: str) -> dict[str, NDArray[np.float32]]:
        """Returns `pixel_values`, float32 (1, 3, H P, W P)."""
        read, side = self.own(picture, return_tensors=return_tensors), self.own.patch_size
        rows, columns = (int(count) for count in read["spatial_shapes"][0])
        patches = np.asarray(read["pixel_values"][0])[: rows * columns].reshape(rows, columns, side, side, 3)
        return {"pixel_values": patches.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)}


class PatchReader(nn.Module):
    """The vision model of SigLIP 2 on one size of images, whose patches are all there: no mask is needed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, H P, W P) -> (B, D)."""
        model: Any = self.model
        parts = model.embeddings
        rows, columns = (size // parts.patch_size for size in pixel_values.shape[2:])
        states = parts.patch_embedding(patches_of(pixel_values, parts.patch_size))
        edge = parts.position_embedding_size
        table = parts.position_embedding.weight.reshape(edge, edge, -1)
        places = torch.einsum("hi,wj,ijd->hwd", _shares(rows, edge), _shares(columns, edge), table)
        states = states + places.flatten(0, 1)
        states = model.encoder(inputs_embeds=states, attention_mask=None).last_hidden_state
        return cast("Tensor", model.head(model.post_layernorm(states), None))


def patches_of(pixel_values: Tensor, side: int) -> Tensor:
    """(B, 3, H P, W P) -> (B, H W, P P 3)."""
    rows, columns = (size // side for size in pixel_values.shape[2:])
    cut = pixel_values.reshape(-1, 3, rows, side, columns, side)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _shares(count: int, edge: int) -> Tensor:
    """Returns the weights of an antialiased linear interpolation of `edge` positions to `count`, (count, edge)."""
    scale = edge / torch.full((), count, dtype=torch.float32)
    width = scale.clamp(min=1.0)
    centres = (torch.arange(count) + 0.5) * scale
    weights = (1 - (torch.arange(edge) + 0.5 - centres.unsqueeze(1)).abs() / width).clamp(min=0)
    return weights / weights.sum(dim=1, keepdim=True)
