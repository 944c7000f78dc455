"""Division of images into tiles, each of which an image encoder reads by itself.

N tiles, H and W height and width of a tile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_server.bundles import ImagePreprocessing, ImageTiles, demanded
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor, PreparedImage, normalize
from headway_server.preprocessing.pool import image_pool

_LONGEST_SIDE: Final = 4096
"""Side beyond which image processors of Idefics 3 shrink an image, whatever `longer_side` says."""


class Grid(NamedTuple):
    """Rows and columns of tiles, 0 of an image that is one tile; of an image of any size those of its embeddings."""

    rows: int
    columns: int
    seen_rows: int = 0
    """Rows of embeddings of all tiles without those of what is black; 0 where no image is centred on black."""
    seen_columns: int = 0

    @property
    def num_tiles(self) -> int:
        """Tiles, the whole image as the last one."""
        return self.rows * self.columns + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledImage(PreparedImage):
    """An image as tiles; `pixel_values` are those of the whole image as one tile."""

    tiles: NDArray[np.float32]
    """(N, 3, H, W), row by row, then the whole image; of an image of any size (1, 3, rows, c, columns, c), where c is
    the side of what an embedding stands for."""
    grid: Grid
    among_others: NDArray[np.float32] | None = None
    """(1, 3, H, W), the image as the only tile of one of several images; None: as of one."""


class TilePreprocessor(ImagePreprocessor):
    """Decodes images and divides them into tiles. Safe to use from several threads."""

    def __init__(self, settings: ImagePreprocessing, limits: ImageLimits, tiles: ImageTiles | None) -> None:
        """Takes the manifest's image settings; errors are those of `ImagePreprocessor`."""
        super().__init__(settings, limits)
        self._tile = settings
        self._division = tiles

    @property
    def most_tiles(self) -> int:
        """Tiles of an image at most."""
        shorter = min(self._tile.height, self._tile.width)
        return 1 + (0 if self._division is None else self._division.most_tiles(shorter))

    async def sizes(self, images: Sequence[bytes], fields: Sequence[str]) -> list[tuple[int, int]]:
        """Returns width and height of upright images, by their headers, off the event loop.

        Errors are those of `prepare_batch`.
        """

        def read() -> list[tuple[int, int]]:
            return [self.upright_size(data, field) for data, field in zip(images, fields, strict=True)]

        return await asyncio.get_running_loop().run_in_executor(image_pool(), read)

    def grid(self, width: int, height: int) -> Grid:
        """Returns the grid of an image of a size in pixels."""
        if self._tile.has_cells:
            width, height = self._tile.in_cells(width, height)
            return Grid(height // self._tile.multiple, width // self._tile.multiple)
        return self._of_tiles(self._resized(width, height)[1])

    def _of_tiles(self, grid: Grid) -> Grid:
        """Returns the grid of an image that has one for its tiles."""
        return Grid(0, 0) if grid == (1, 1, 0, 0) else grid

    def _resized(self, width: int, height: int) -> tuple[list[tuple[int, int]], Grid]:
        """Returns the sizes that an image is resized to, one after another, and the grid of tiles of the last."""
        division, tile = self._division, self._tile
        if division is None:
            return [], Grid(1, 1)
        if division.fit == "resolutions":
            return self._into_resolution(width, height, division)
        if division.fit == "proportions":
            grid = _nearest_grid(width, height, tile, division)
            return [(grid.columns * tile.width, grid.rows * tile.height)], grid
        first = _with_longer_side(width, height, demanded(division.longer_side))
        proportions = first[0] / first[1]
        if first[0] >= first[1]:
            across = _round_up(first[0], tile.width)
            size = across, _round_up(int(across / proportions), tile.height)
        else:
            down = _round_up(first[1], tile.height)
            size = _round_up(int(down * proportions), tile.width), down
        return [first, size], Grid(size[1] // tile.height, size[0] // tile.width)

    def _into_resolution(self, width: int, height: int, division: ImageTiles) -> tuple[list[tuple[int, int]], Grid]:
        """Returns the size of an image within its best resolution, and the grid, as LLaVA-NeXT computes them."""
        best, kept, empty = (1, 1), 0, 0
        for rows, columns in division.resolutions:
            across, down = columns * self._tile.width, rows * self._tile.height
            scale = min(across / width, down / height)
            here = min(int(width * scale) * int(height * scale), width * height)
            if here > kept or (here == kept and across * down - here < empty):
                best, kept, empty = (rows, columns), here, across * down - here
        rows, columns = best
        across, down = columns * self._tile.width, rows * self._tile.height
        if across / width < down / height:
            size = across, min(math.ceil(height * (across / width)), down)
        else:
            size = min(math.ceil(width * (down / height)), across), down
        seen = [rows * division.tile_rows, columns * division.tile_rows]
        if width / height > seen[1] / seen[0]:
            seen[0] -= (seen[0] - int(round(height * (seen[1] / width), 7))) // 2 * 2
        else:
            seen[1] -= (seen[1] - int(round(width * (seen[0] / height), 7))) // 2 * 2
        return [size], Grid(rows, columns, *seen)

    def prepare_decoded(self, image: Image.Image, field: str) -> TiledImage:
        """Prepares a decoded image; errors are those of `ImagePreprocessor`."""
        if self._tile.has_cells:
            return self._whole(image, field)
        width, height = image.size
        steps, divided = self._resized(width, height)
        rows, columns, grid = divided.rows, divided.columns, self._of_tiles(divided)
        resample = Image.Resampling[self._tile.interpolation.upper()]
        is_whole = grid.num_tiles == 1
        large = image
        for size in steps:
            large = large.resize(size, resample)
        if (size := (columns * self._tile.width, rows * self._tile.height)) != large.size and steps:
            centred = Image.new("RGB", size)
            centred.paste(large, ((size[0] - large.width) // 2, (size[1] - large.height) // 2))
            large = centred
        # Image processors of Idefics 3 take the whole image from the enlarged one, those of InternVL from the original.
        shrinks_large = self._division is not None and self._division.fit == "longer_side"
        overview, transform = self.resize(large if shrinks_large else image, field)
        whole = normalize(overview, self._tile)
        if is_whole:
            tiles = whole[np.newaxis]
        else:
            pixels = normalize(large, self._tile).reshape(3, rows, self._tile.height, columns, self._tile.width)
            parts = pixels.transpose(1, 3, 0, 2, 4).reshape(rows * columns, *whole.shape)
            tiles = np.concatenate([parts, whole[np.newaxis]])
        return TiledImage(
            pixel_values=tiles[-1],
            width=width,
            height=height,
            transform=transform,
            tiles=tiles,
            grid=grid,
            among_others=self._among_others(image) if self._division is not None and self._division.is_of_one else None,
        )

    def _among_others(self, image: Image.Image) -> NDArray[np.float32]:
        """Centres an image in a square of the mean colour, as LLaVA-OneVision does: (1, 3, H, W)."""
        side = max(image.size)
        colour = tuple(int(255 * value) for value in self._tile.mean)
        square = Image.new("RGB", (side, side), colour)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        size = self._tile.width, self._tile.height
        resized = square.resize(size, Image.Resampling[self._tile.interpolation.upper()])
        return normalize(resized, self._tile)[np.newaxis]

    def _whole(self, image: Image.Image, field: str) -> TiledImage:
        resized, transform = self.resize(image, field)
        pixels, side = normalize(resized, self._tile), self._tile.multiple
        grid = Grid(resized.height // side, resized.width // side)
        return TiledImage(
            pixel_values=pixels,
            width=image.width,
            height=image.height,
            transform=transform,
            tiles=pixels.reshape(1, 3, grid.rows, side, grid.columns, side),
            grid=grid,
        )

    def __repr__(self) -> str:
        return f"TilePreprocessor({self._division!r}, tiles of {self._tile.width} x {self._tile.height})"


def _round_up(side: int, multiple: int) -> int:
    return max(1, math.ceil(side / multiple)) * multiple


def _with_longer_side(width: int, height: int, longer: int) -> tuple[int, int]:
    """Returns width and height after a resize to a longer side, as image processors of Idefics 3 compute them."""
    proportions = width / height
    if width >= height:
        width, height = longer, int(longer / proportions)
        height += height % 2
    else:
        width, height = int(longer * proportions), longer
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    if max(width, height) > _LONGEST_SIDE:
        proportions = width / height
        if width >= height:
            width, height = _LONGEST_SIDE, int(_LONGEST_SIDE / proportions)
        else:
            width, height = int(_LONGEST_SIDE * proportions), _LONGEST_SIDE
    return max(width, 1), max(height, 1)


def _nearest_grid(width: int, height: int, tile: ImagePreprocessing, division: ImageTiles) -> Grid:
    """Returns the grid whose proportions are nearest to an image's, as image processors of InternVL choose it."""
    best, least = Grid(1, 1), math.inf
    for grid in _grids(division.min_count, demanded(division.max_count)):
        rows, columns = grid.rows, grid.columns
        difference = abs(width / height - columns / rows)
        covers_half = width * height > 0.5 * tile.width * tile.height * columns * rows
        if difference < least or (difference == least and covers_half):
            best, least = Grid(rows, columns), difference
    return best


@cache
def _grids(least: int, most: int) -> list[Grid]:
    """Returns the grids of `least` to `most` tiles, the smallest first; of equal ones that with fewer columns."""
    sides = range(1, most + 1)
    grids = [Grid(rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most]
    return sorted(grids, key=lambda grid: grid.rows * grid.columns)
