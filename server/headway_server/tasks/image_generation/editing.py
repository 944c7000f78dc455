"""Images that are drawn over: as a whole, or where a mask says so, with every other pixel as it was.

S side of a latent, F pixels a side of a latent's cell, H, W height and width of an image.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.diffusion.samplers import Latent
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.pool import image_pool
from headway_server.serving.images import SentImage

_WHITE: Final = 128
"""Least level of a mask's pixel that is drawn anew."""


@dataclass(slots=True, kw_only=True)
class Edit:
    """An image that is drawn over."""

    pixel_values: NDArray[np.float32]
    """As the model reads it, (3, H, W)."""
    latent: Latent | None = None
    """Once it is computed."""
    is_kept: NDArray[np.bool_] | None = None
    """(1, S, S): cells of the latent that show nothing of what is drawn anew; None: all is drawn anew."""
    original: NDArray[np.uint8] | None = None
    """The caller's upright image, (H, W, 3); None where all is drawn anew."""
    is_drawn: NDArray[np.bool_] | None = None
    """(H, W): its pixels that are drawn anew."""
    seen: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, top, right and bottom of what the model sees, in its pixels."""

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        parts = (self.pixel_values, self.latent, self.is_kept, self.original, self.is_drawn)
        return sum(part.nbytes for part in parts if part is not None)

    def size(self, own: tuple[int, int]) -> tuple[int, int]:
        """Returns width and height of what is answered; `own` is the model's."""
        return own if self.original is None else (self.original.shape[1], self.original.shape[0])

    def put_together(self, drawn: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Puts what was drawn, (H, W, 3) of the model, into the image, whose other pixels stay as they were."""
        if self.original is None or self.is_drawn is None:
            return drawn
        left, top, right, bottom = self.seen
        resized = Image.fromarray(drawn).resize((right - left, bottom - top), Image.Resampling.BICUBIC)
        together, where = self.original.copy(), self.is_drawn[top:bottom, left:right]
        together[top:bottom, left:right][where] = np.asarray(resized)[where]
        return together


async def read_edit(
    preprocessor: ImagePreprocessor, image: SentImage, mask: SentImage | None, latent_side: int
) -> Edit:
    """Reads an image to draw over and its mask, off the event loop.

    Raises:
        InvalidInputError: One cannot be read, the mask has another size or no white pixel, or white ones where the
            model does not see.
    """
    return await asyncio.get_running_loop().run_in_executor(
        image_pool(), _read_edit, preprocessor, image, mask, latent_side
    )


def _read_edit(preprocessor: ImagePreprocessor, image: SentImage, mask: SentImage | None, latent_side: int) -> Edit:
    picture = preprocessor.decode(image.data, image.field)
    prepared = preprocessor.prepare_decoded(picture, image.field)
    if mask is None:
        return Edit(pixel_values=prepared.pixel_values)
    marks = preprocessor.decode(mask.data, mask.field)
    if marks.size != picture.size:
        raise InvalidInputError(
            mask.field,
            f"is {marks.width} x {marks.height} pixels, and the image {picture.width} x {picture.height}; send a mask "
            "of the image's size",
        )
    is_drawn = np.asarray(marks.convert("L")) >= _WHITE  # (H, W)
    if not is_drawn.any():
        raise InvalidInputError(mask.field, "has no white pixel; paint white what is to be drawn anew")
    _, height, width = prepared.pixel_values.shape
    corners = prepared.transform.to_image([[0, 0], [width, height]])
    left, top = (max(0, round(place)) for place in corners[0])
    right, bottom = (min(most, round(place)) for most, place in zip(picture.size, corners[1], strict=True))
    if is_drawn.sum() != is_drawn[top:bottom, left:right].sum():
        raise InvalidInputError(
            mask.field,
            f"is white outside of what the model sees, from ({left}, {top}) to ({right}, {bottom}); crop the image",
        )
    part = Image.fromarray(is_drawn[top:bottom, left:right]).convert("L").resize((width, height), Image.Resampling.BOX)
    touched = np.asarray(part) > 0  # (H, W) of the model
    cell = height // latent_side
    drawn_cells = touched[: latent_side * cell, : latent_side * cell].reshape(latent_side, cell, latent_side, cell)
    return Edit(
        pixel_values=prepared.pixel_values,
        is_kept=~drawn_cells.max(axis=(1, 3))[np.newaxis],
        original=np.asarray(picture),
        is_drawn=is_drawn,
        seen=(left, top, right, bottom),
    )


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Returns a PNG of RGB pixels, (H, W, 3)."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
