"""Image editing: the whole image, or the part under a mask (inpainting) with all other pixels unchanged.

S side of a latent, F pixels a side of a latent's cell, H, W height and width of an image.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from io import BytesIO
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.diffusion.samplers import Latent
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.pool import image_pool
from headway_server.serving.images import SentImage

_WHITE: Final = 128
"""Lowest level of a white mask pixel, which is regenerated."""


@dataclass(slots=True, kw_only=True)
class Edit:
    """An image to edit."""

    pixel_values: NDArray[np.float32]
    """Preprocessed image, (3, H, W)."""
    latent: Latent | None = None
    """Encoded image; None until it is computed."""
    is_preserved: NDArray[np.bool_] | None = None
    """(1, S, S): True for latent cells without masked pixels; None: all cells are regenerated."""
    original: NDArray[np.uint8] | None = None
    """The caller's upright image, (H, W, 3); None without a mask."""
    is_edited: NDArray[np.bool_] | None = None
    """(H, W): True for masked pixels, which are regenerated."""
    seen_pixels: NDArray[np.float32] | None = None
    """Preprocessed image, (3, H, W), grey where it is regenerated; None without a mask."""
    seen: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, top, right and bottom of the model's crop, in pixels of the original."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        parts = (
            self.pixel_values,
            self.latent,
            self.is_preserved,
            self.original,
            self.is_edited,
            self.seen_pixels,
        )
        return sum(part.nbytes for part in parts if part is not None)

    def size(self, own: tuple[int, int]) -> tuple[int, int]:
        """Returns width and height of the resulting image; `own` is the model's size."""
        return own if self.original is None else (self.original.shape[1], self.original.shape[0])

    def composite(self, generated: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Composites a generated image, (H, W, 3) of the model, into the original under its mask."""
        if self.original is None or self.is_edited is None:
            return generated
        left, top, right, bottom = self.seen
        resized = Image.fromarray(generated).resize((right - left, bottom - top), Image.Resampling.BICUBIC)
        composed, where = self.original.copy(), self.is_edited[top:bottom, left:right]
        composed[top:bottom, left:right][where] = np.asarray(resized)[where]
        return composed


async def read_edit(
    preprocessor: ImagePreprocessor,
    image: SentImage,
    mask: SentImage | None,
    latent_side: int,
    rule: Literal["touched", "first"],
) -> Edit:
    """Reads an image to edit and its mask, off the event loop.

    Args:
        preprocessor: The model's.
        image: Image to edit.
        mask: White where the image is regenerated; None: everywhere.
        latent_side: S.
        rule: Which cells of a latent are regenerated: those with a white pixel, or those whose first pixel is white.

    Raises:
        InvalidInputError: A file cannot be read, the sizes differ, or the mask has no white pixel or one outside of the
        model's crop.
    """
    return await asyncio.get_running_loop().run_in_executor(
        image_pool(), _read_edit, preprocessor, image, mask, latent_side, rule
    )


def _read_edit(
    preprocessor: ImagePreprocessor,
    image: SentImage,
    mask: SentImage | None,
    latent_side: int,
    rule: Literal["touched", "first"],
) -> Edit:
    picture = preprocessor.decode(image.data, image.field)
    prepared = preprocessor.prepare_decoded(picture, image.field)
    if mask is None:
        return Edit(pixel_values=prepared.pixel_values)
    mask_image = preprocessor.decode_mask(mask.data, mask.field)
    if mask_image.size != picture.size:
        raise InvalidInputError(
            mask.field,
            f"is {mask_image.width} x {mask_image.height} pixels, and the image {picture.width} x {picture.height}; "
            "send a mask of the image's size",
        )
    is_edited = np.asarray(mask_image) >= _WHITE  # (H, W)
    if not is_edited.any():
        raise InvalidInputError(mask.field, "has no white pixel; paint the area to regenerate white")
    _, height, width = prepared.pixel_values.shape
    corners = prepared.transform.to_image([[0, 0], [width, height]])
    left, top = (max(0, round(position)) for position in corners[0])
    right, bottom = (min(most, round(position)) for most, position in zip(picture.size, corners[1], strict=True))
    if is_edited.sum() != is_edited[top:bottom, left:right].sum():
        raise InvalidInputError(
            mask.field,
            f"is white outside of the model's crop, ({left}, {top}) to ({right}, {bottom}); crop the image",
        )
    part = Image.fromarray(is_edited[top:bottom, left:right]).convert("L")
    edited_cells = _edited_cells(part, height, width, latent_side, rule)
    is_seen = np.asarray(part.resize((width, height), Image.Resampling.LANCZOS)) < _WHITE
    return Edit(
        pixel_values=prepared.pixel_values,
        is_preserved=~edited_cells[np.newaxis],
        original=np.asarray(picture),
        is_edited=is_edited,
        seen_pixels=prepared.pixel_values * is_seen,
        seen=(left, top, right, bottom),
    )


def _edited_cells(
    mask: Image.Image, height: int, width: int, latent_side: int, rule: Literal["touched", "first"]
) -> NDArray[np.bool_]:
    """Returns which cells of a latent are regenerated, (S, S), at least one."""
    cell, side = height // latent_side, height // latent_side * latent_side
    if rule == "first":
        first: NDArray[np.bool_] = (
            np.asarray(mask.resize((width, height), Image.Resampling.LANCZOS))[:side:cell, :side:cell] >= _WHITE
        )
        if first.any():
            return first
    touched = np.asarray(mask.resize((width, height), Image.Resampling.BOX)) > 0  # (H, W) of the model
    cells: NDArray[np.bool_] = touched[:side, :side].reshape(latent_side, cell, latent_side, cell).max(axis=(1, 3))
    return cells


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Returns a PNG of RGB pixels, (H, W, 3)."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
