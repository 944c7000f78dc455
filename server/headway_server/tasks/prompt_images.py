"""Images of conversations: their texts in a prompt, and their embeddings, which are computed once for all calls.

M embeddings of an image, D width of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.bundles import (
    IMAGE_EMBEDDINGS,
    MEDIA_EMBEDDINGS,
    Bundle,
    ImagePreprocessing,
    ImagePrompt,
    ImageTiles,
    Variant,
    demanded,
)
from headway_server.decoding.interfaces import Block, PromptMedia
from headway_server.decoding.runner.state import fixed_size
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, ModelUsage, Observer
from headway_server.preprocessing.chat import WrittenImages
from headway_server.preprocessing.tiles import Grid, TiledImage, TilePreprocessor
from headway_server.runtime import Runtime
from headway_server.serving.images import SentImage
from headway_server.serving.lru_cache import LruCache
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.job import Job

_ENTRY_BYTES: Final = 500
"""Bytes of a cache entry besides its embeddings."""
_MIB: Final = 2**20
_LEAST_RATIO: Final = 1.1
"""Of a side of what LLaVA-OneVision has of an image to what it reads, from which on it interpolates."""

Embedded: TypeAlias = tuple[NDArray[np.float32], ...]
"""Embeddings of an image, those of each of its tiles; M in all, with D values each."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image of a prompt, before it is read."""

    sent: SentImage
    grid: Grid
    """Tiles that its header announces."""
    is_whole: bool = False
    """True if it is not divided, since it is one of several."""

    @property
    def key(self) -> bytes:
        """Identifies its embeddings."""
        return self.sent.key + b"whole" * self.is_whole


class PromptImages:
    """Turns images into texts and embeddings for the prompts of one model. Methods belong to the event loop."""

    def __init__(
        self,
        bundle: Bundle,
        graph: BatchGraph,
        settings: ServerSettings,
        *,
        width: int,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """Takes the model's image encoder, and runs it once.

        Args:
            bundle: The bundle.
            graph: Its graph `image_encoder`.
            settings: Limits of images and of the cache of embeddings.
            width: D.
            observer: Notified of the encoder's runs.

        Raises:
            BundleError: The graph does not run, or does not match the manifest.
        """
        manifest = bundle.manifest
        self._prompt: ImagePrompt = demanded(manifest.image_prompt)
        sizes = demanded(manifest.image_preprocessing)
        self._preprocessor = TilePreprocessor(sizes, settings.image_limits, self._prompt.tiles)
        blank = blank_tile(sizes)
        expected = {IMAGE_EMBEDDINGS: (self._prompt.tokens_per_tile or blank.shape[1] * blank.shape[3], width)}
        max_padding = graph.warm_up({"pixel_values": blank}, 1, expected)
        self.batcher = Batcher(
            graph,
            budget=settings.batching.batch_images(graph.device, self._preprocessor.num_pixels),
            model=ModelId(name=manifest.name, version=manifest.version),
            session=graph.session,
            max_padding=max_padding,
            observer=observer,
        )
        self._admission = Admission(
            limit=settings.batching.max_waiting_images,
            noun="images",
            owner=manifest.name,
            max_bytes=settings.batching.max_waiting_bytes,
            pace=MeasuredPace(),
        )
        self._cache: LruCache[bytes, Embedded] = LruCache(
            "image_embeddings", max_bytes=settings.max_image_embeddings_mib * _MIB, ttl_s=settings.image_ttl
        )
        self._width = width
        self._owner = manifest.name
        tile_bytes = expected[IMAGE_EMBEDDINGS][0] * width * 4
        _log.info(
            "images",
            model=manifest.name,
            tokens_per_tile=expected[IMAGE_EMBEDDINGS][0],
            most_tiles=self._preprocessor.most_tiles,
            tile_kib=tile_bytes >> 10,
        )

    @classmethod
    def open(
        cls, bundle: Bundle, variant: Variant, runtime: Runtime, settings: ServerSettings, observer: Observer
    ) -> Self | None:
        """Opens the image encoder of a variant; None if it reads no images. Errors are those of the constructor."""
        if "image_encoder" not in variant.graphs:
            return None
        graph = BatchGraph(runtime.open(bundle, variant.graphs["image_encoder"]))
        return cls(bundle, graph, settings, width=media_width(variant), observer=observer)

    def __repr__(self) -> str:
        return f"PromptImages({self._owner}, {self._preprocessor!r}, {self._cache!r})"

    def usage(self) -> ModelUsage:
        """Returns the size of the cache of embeddings."""
        return ModelUsage(num_waiting=0, caches=(self._cache.usage(),))

    async def place(self, images: Sequence[SentImage]) -> list[PlacedImage]:
        """Reads the headers of images, which tell how many tokens each takes.

        Raises:
            InvalidInputError: One is empty, too large, or none.
        """
        is_whole = self._prompt.tiles is not None and self._prompt.tiles.is_of_one and len(images) > 1
        sizes = await self._preprocessor.sizes([one.data for one in images], [one.field for one in images])
        return [
            PlacedImage(sent=one, grid=Grid(0, 0) if is_whole else self._preprocessor.grid(*size), is_whole=is_whole)
            for one, size in zip(images, sizes, strict=True)
        ]

    def written(self, images: Sequence[PlacedImage]) -> WrittenImages:
        """Returns what stands in a prompt for images."""
        return WrittenImages(self._prompt.marker, [image_text(self._prompt, one.grid) for one in images])

    @property
    def prompt(self) -> ImagePrompt:
        """How images stand in prompts."""
        return self._prompt

    async def embed(self, images: Sequence[PlacedImage], job: Job[Any]) -> list[Embedded]:
        """Returns the embeddings of images: from the cache, or computed one image after another.

        Raises:
            InvalidInputError: An image is damaged.
            OverloadedError: Other calls leave no room.
        """
        job.reserve_more(sum(num_embeddings(self._prompt, one.grid) for one in images) * self._width * 4)
        return [await self._embedded(one, job) for one in images]

    async def _embedded(self, image: PlacedImage, job: Job[Any]) -> Embedded:
        if (found := self._cache.get(image.key)) is not None:
            return found
        num_tiles = 1 if self._prompt.tokens_per_tile is None else image.grid.num_tiles
        num_bytes = len(image.sent.data) + num_tiles * self._preprocessor.num_image_bytes
        with self._admission.admit(1, num_bytes, deadline=job.deadline, caller=job.caller):
            [prepared] = await self._preprocessor.prepare_batch([image.sent.data], fields=[image.sent.field])
            assert isinstance(prepared, TiledImage), "this preprocessor makes tiles"
            tiles = prepared.tiles
            if image.is_whole:
                tiles = demanded(prepared.among_others)
            elif prepared.grid != image.grid:
                raise InvalidInputError(
                    image.sent.field, "has an orientation that its header does not say; save it again upright"
                )
            batched = await job.batch(
                self.batcher,
                [{"pixel_values": tile} for tile in tiles],
                groups=[tile.shape for tile in tiles],
                outputs=(IMAGE_EMBEDDINGS,),
                num_bytes=0,
                num_read=0,
                read=_copied,
            )
            job.note(batched.runs)
        embeddings = arranged(self._prompt, image.grid, batched.results)
        self._cache.put(image.key, embeddings, sum(tile.nbytes + _ENTRY_BYTES for tile in embeddings))
        return embeddings


def media_width(variant: Variant) -> int:
    """Returns the width of the embeddings that a variant's decoder reads."""
    [width] = [fixed_size(spec, 1) for spec in variant.graphs["decoder"].inputs if spec.name == MEDIA_EMBEDDINGS]
    return width


def blank_tile(sizes: ImagePreprocessing) -> NDArray[np.float32]:
    """Returns a black tile, or a black square that is as large as an image of any size may be."""
    if not sizes.has_cells:
        return np.zeros((3, sizes.height, sizes.width), np.float32)
    side = sizes.multiple
    return np.zeros((3, sizes.height // side, side, sizes.width // side, side), np.float32)


def num_embeddings(prompt: ImagePrompt, grid: Grid) -> int:
    """Returns M of an image with a grid."""
    if prompt.layout == "rows":
        count = demanded(prompt.tokens_per_tile)
        rows, columns = read_rows(demanded(prompt.tiles), grid)
        return count if grid.num_tiles == 1 else count - 1 + rows * (columns + 1)
    return grid.rows * grid.columns if prompt.tokens_per_tile is None else grid.num_tiles * prompt.tokens_per_tile


def arranged(prompt: ImagePrompt, grid: Grid, tiles: Sequence[NDArray[np.float32]]) -> Embedded:
    """Returns the embeddings of an image in the order of their tokens; those of tiles are (M, D) each."""
    if prompt.layout == "tiles" or len(tiles) == 1:
        return tuple(tiles)
    *parts, overview = tiles
    side = demanded(prompt.tiles).tile_rows
    joined = np.stack([part[:-1] for part in parts]).reshape(grid.rows, grid.columns, side, side, -1)
    joined = joined.transpose(0, 2, 1, 3, 4).reshape(grid.rows * side, grid.columns * side, -1)
    top, left = (joined.shape[0] - grid.seen_rows) // 2, (joined.shape[1] - grid.seen_columns) // 2
    seen = joined[top : top + grid.seen_rows, left : left + grid.seen_columns]
    size = read_rows(demanded(prompt.tiles), grid)
    seen = seen if size == seen.shape[:2] else _interpolated(seen, size)
    ends = np.broadcast_to(overview[-1], (size[0], 1, overview.shape[1]))
    rows = np.concatenate([seen, ends], axis=1).reshape(-1, overview.shape[1])
    return (np.concatenate([overview[:-1], rows]),)


def read_rows(tiles: ImageTiles, grid: Grid) -> tuple[int, int]:
    """Returns the rows and columns of embeddings that are read of all tiles, as LLaVA-OneVision computes them."""
    rows, columns = grid.seen_rows, grid.seen_columns
    if tiles.most_read is not None:
        ratio = math.sqrt(rows * columns / (tiles.most_read * tiles.tile_rows**2))
        if ratio > _LEAST_RATIO:
            return int(rows // ratio), int(columns // ratio)
    return rows, columns


def _interpolated(embeddings: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Interpolates linearly between the centres of cells: (rows, columns, D) -> (*size, D)."""
    for axis, count in enumerate(size):
        length = embeddings.shape[axis]
        at = np.maximum((np.arange(count, dtype=np.float32) + 0.5) * np.float32(length / count) - 0.5, 0)
        low = np.minimum(at.astype(np.int64), length - 1)
        shares = np.expand_dims(at - low, [1 - axis, 2]).astype(np.float32)
        first = embeddings.take(low, axis)
        embeddings = first + (embeddings.take(np.minimum(low + 1, length - 1), axis) - first) * shares
    return embeddings


def image_text(prompt: ImagePrompt, grid: Grid) -> str:
    """Returns what stands in a prompt for an image with a grid, with the model's marker for each embedding."""
    if prompt.tokens_per_tile is None:
        return prompt.before + prompt.row_end.join([prompt.embedding * grid.columns] * grid.rows) + prompt.after
    if prompt.layout == "rows":
        return prompt.before + prompt.embedding * num_embeddings(prompt, grid) + prompt.after
    embeddings = prompt.embedding * prompt.tokens_per_tile
    rows = "".join(
        "".join(
            prompt.tile.replace("{row}", str(row)).replace("{column}", str(column)) + embeddings
            for column in range(1, grid.columns + 1)
        )
        + prompt.row_end
        for row in range(1, grid.rows + 1)
    )
    tiles = rows + prompt.rows_end if rows else ""
    return f"{prompt.before}{tiles}{prompt.overview}{embeddings}{prompt.after}"


def shown_images(prompt: ImagePrompt, images: Sequence[PlacedImage], num_tokens: int) -> Sequence[PlacedImage]:
    """Returns the last images of a prompt: those that have any of the `num_tokens` of images that are left of it."""
    first = len(images)
    while num_tokens > 0 and first > 0:
        first -= 1
        num_tokens -= num_embeddings(prompt, images[first].grid)
    return images[first:]


def place_media(
    input_ids: NDArray[np.int64],
    prompt: ImagePrompt,
    images: Sequence[PlacedImage],
    embeddings: Sequence[Embedded],
    *,
    field: str,
) -> PromptMedia | None:
    """Puts the embeddings of a prompt's images, in their order, in the places of its tokens, (T,); None without images.

    Those of a prompt whose beginning was cut are the last ones.

    Raises:
        InvalidInputError: An image with positions of a grid, or whose tokens attend to each other, was cut; `field` is
            the prompt's.
    """
    positions = np.flatnonzero(input_ids == prompt.token)
    if not len(positions):
        return None
    rows = [row for tiles in embeddings for tile in tiles for row in tile]
    if len(positions) < len(rows) and (prompt.positions == "grid" or prompt.attention != "causal"):
        raise InvalidInputError(field, "is too long, and would be cut within its images; leave out older turns")
    offsets = None
    if prompt.positions == "grid":
        offsets = grid_offsets(len(input_ids), positions, [one.grid for one in images])
    keys = [
        one.key + row.to_bytes(4, "little")
        for one, tiles in zip(images, embeddings, strict=True)
        for row in range(sum(map(len, tiles)))
    ]
    first = len(rows) - len(positions)
    blocks = blocks_of(prompt, positions, len(input_ids))
    return PromptMedia(positions, tuple(rows[first:]), tuple(keys[first:]), offsets, blocks)


def blocks_of(prompt: ImagePrompt, positions: NDArray[np.int64], length: int) -> tuple[Block, ...]:
    """Returns the tokens of a prompt that attend to each other.

    Args:
        prompt: How images stand in prompts.
        positions: (M,) places of the images' tokens, of at least one.
        length: Tokens of the prompt.
    """
    if prompt.attention == "prompt":
        return (Block(0, length),)
    if prompt.attention == "causal":
        return ()
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return tuple(Block(int(part[0]), int(part[-1]) + 1) for part in parts)


def grid_offsets(length: int, positions: NDArray[np.int64], grids: Sequence[Grid]) -> NDArray[np.int64]:
    """Returns the place, row and column of each of T tokens less its position in the prompt, (T, 3).

    Text counts on by one. All tokens of an image have the place of its first, and add their row and column to it; what
    follows counts on from the longer side (Qwen2-VL, arXiv 2409.12191, 2.1.1).

    Args:
        length: T.
        positions: (M,) places of the images' tokens.
        grids: Rows and columns of each image.
    """
    offsets = np.zeros((length, 3), np.int64)
    first = 0
    for grid in grids:
        start, count = int(positions[first]), grid.rows * grid.columns
        begun = start + offsets[start, 0]  # where its first token would be as text
        rows, columns = np.divmod(np.arange(count), grid.columns)
        own = np.stack([np.zeros_like(rows), rows, columns], axis=1) + begun
        offsets[start : start + count] = own - np.arange(start, start + count)[:, np.newaxis]
        offsets[start + count :] = begun + max(grid) - (start + count)
        first += count
    return offsets


def _copied(row: Tensors, _: int) -> NDArray[np.float32]:
    copied: NDArray[np.float32] = row[IMAGE_EMBEDDINGS].astype(np.float32)
    return copied
