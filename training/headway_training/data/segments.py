"""Pictures with segments: what can be cut out of them, and pictures composed of drawings, whose segments are exact.

A user's own are a folder with the folders `images` and `masks`:

    images/one.jpg    masks/one.png                      a mask of all objects: 0 is background, another value an object
    images/two.png    masks/two/1.png  masks/two/2.png   a mask of each object: 0 is background, all else is the object

H, W height and width of a picture as it is stored, I side of what a model sees, S cells along a side of a mask, P
prompts of a picture, K maps of a scene.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from scipy.ndimage import distance_transform_edt, find_objects
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from headway_training.data.examples import hold_out
from headway_training.data.images import SUFFIXES, read_image, to_rgb
from headway_training.data.pictures import NO_DRAWINGS, Drawings, EmojiTexts, join_drawings
from headway_training.errors import DataError, MissingDataError

Labels = NDArray[np.int32]
"""The number of the segment that each pixel belongs to, from 1; 0: none."""
LEAST_AREA = 24
"""Pixels, of I x I, of the smallest segment that is asked for in training."""
MASK_SUFFIXES = frozenset({".png", ".tif", ".tiff", ".bmp", ".gif"})
"""Of files that keep every value."""
_LARGEST_VALUE = (1 << 24) - 1
_MASK_MODES = frozenset({"1", "L", "P", "I", "I;16", "I;16B", "I;16L"})
"""Pillow's modes of images with one whole number a pixel."""
_FEWEST_PART_PIXELS = 24
"""Of a drawing as it is stored; smaller regions go to the nearest larger one, as the blurred edges between two do."""
_SAME_COLOUR = 14
"""Largest difference of neighbouring pixels of one part, in levels of red, green or blue."""
_MOST_DRAWINGS = 6
_WHOLES = 0.65
"""Share of the segments of a composed picture that are whole drawings, as far as they are seen; the others are parts
of one colour."""


Kind = Literal["nuclei", "photographs", "own", "composites"]
"""Microscope pictures, whose segments are single nuclei; photographs, segmented whole by several people each; pictures
of the user's own; and those that are composed of drawings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedImage:
    """A picture that was segmented once or several times."""

    image: NDArray[np.uint8]
    """(H, W, 3)."""
    segmentations: tuple[Labels, ...]
    """(H, W) each."""

    def load(self) -> SegmentedImage:
        """Itself."""
        return self

    def reduced(self, side: int) -> SegmentedImage:
        """The picture with its longer side at most so many pixels; segments that are less than a pixel may go."""
        height, width = self.image.shape[:2]
        if (share := side / max(height, width)) >= 1:
            return self
        size = (max(1, round(width * share)), max(1, round(height * share)))
        image = np.asarray(Image.fromarray(self.image).resize(size, Image.Resampling.BILINEAR))
        maps = [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.NEAREST)) for one in self.segmentations]
        return SegmentedImage(image=image, segmentations=tuple(maps))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedFile:
    """A picture of the user's, which is read each time that it is looked at."""

    file: Path
    """The picture."""
    masks: tuple[Path, ...]
    """One of all its objects, or one of each."""
    is_whole: bool
    """Whether it is one of all its objects."""

    def load(self) -> SegmentedImage:
        """Reads the picture and its masks.

        Raises:
            DataError: One cannot be read.
        """
        image = read_image(self.file, lambda one: np.asarray(to_rgb(ImageOps.exif_transpose(one)), np.uint8))
        if self.is_whole:
            values = _read_mask(self.masks[0])
            is_there = np.bincount(values.ravel()) > 0
            is_there[0] = True  # the background, which may be nowhere
            maps = [(np.cumsum(is_there, dtype=np.int32) - 1)[values]]
        else:
            maps = _pack(_read_mask(mask) > 0 for mask in self.masks)
        return SegmentedImage(image=image, segmentations=tuple(maps))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedPictures:
    """A part of the pictures: what is trained on, or what is measured on."""

    pictures: Mapping[Kind, Sequence[SegmentedImage | SegmentedFile]]
    """Of each kind that there is."""
    drawings: Drawings
    """What further pictures are composed of."""

    def __len__(self) -> int:
        """Pictures and drawings."""
        return sum(map(len, self.pictures.values())) + len(self.drawings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A picture as a model sees it, and what can be cut out of it."""

    image: NDArray[np.uint8]
    """(I, I, 3)."""
    maps: tuple[Labels, ...]
    """(I, I) each; segments of two maps may overlap."""
    weights: tuple[float, ...] = (1.0,)
    """Share of the prompts that are about a segment of each map."""
    drawn: tuple[tuple[int, int], ...] = ()
    """Of a composed picture: which drawing each segment of the first map is, and its pixels with those covered by
    others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Segments of a scene, and where a caller might point to mean them."""

    coverage: NDArray[np.uint8]
    """(P, S, S): the share of each cell that the segment covers, of 255."""
    points: NDArray[np.float32]
    """(P, 2): a random place in the segment, x and y as shares of the picture."""
    boxes: NDArray[np.float32]
    """(P, 4): left, top, right and bottom of the segment, as shares of the picture."""


def read_segmented_images(path: Path) -> list[SegmentedImage]:
    """Reads an archive of pictures `NAME.jpg` with label maps `NAME.png`, or `NAME_1.png` and so on.

    Raises:
        DataError: The archive, or a picture in it, cannot be read, or a picture has no label map of its size.
    """
    images: dict[str, NDArray[np.uint8]] = {}
    maps: dict[str, list[Labels]] = {}
    try:
        with tarfile.open(path) as files:
            for member in files:
                content = files.extractfile(member)
                if content is None:
                    continue
                name = Path(member.name)
                with Image.open(io.BytesIO(content.read())) as image:
                    if name.suffix == ".png":
                        maps.setdefault(name.stem.partition("_")[0], []).append(np.asarray(image).astype(np.int32))
                    else:
                        images[name.stem] = np.asarray(image.convert("RGB"), np.uint8)
    except (tarfile.TarError, UnidentifiedImageError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it and get it again") from error
    for stem, pixels in images.items():
        if not maps.get(stem) or any(one.shape != pixels.shape[:2] for one in maps[stem]):
            raise DataError(
                f"{path}: {stem} has no label map of its size, {pixels.shape[1]} x {pixels.shape[0]} pixels"
            )
    return [SegmentedImage(image=images[stem], segmentations=tuple(maps[stem])) for stem in sorted(images)]


def read_own_segments(folder: Path) -> SegmentedPictures:
    """Finds the pictures of a user's folder and their masks, and reads each once, so that all that is wrong is told.

    Raises:
        MissingDataError: There is no such folder, or a picture has no mask.
        DataError: A file cannot be read; a mask has another size than its picture, is none, or has no picture; or there
            is no object in any.
    """
    found = _find_segmented(folder)
    has_objects = [any(one.any() for one in picture.load().segmentations) for picture in found]
    if not any(has_objects):
        raise DataError(f"{folder}: every pixel of every mask is 0, so there is no object")
    return SegmentedPictures(pictures={"own": found}, drawings=NO_DRAWINGS)


def find_segmented_files(folder: Path) -> list[Path]:
    """All files of a user's folder of pictures with masks; errors as `read_own_segments`, but for what is in them."""
    return [file for one in _find_segmented(folder) for file in (one.file, *one.masks)]


def _find_segmented(folder: Path) -> list[SegmentedFile]:
    images, masks = folder / "images", folder / "masks"
    for needed in (images, masks):
        if not needed.is_dir():
            raise MissingDataError(
                f"there is no folder {needed}; expected {folder} to hold the folders images and masks"
            )
    files = sorted(file for file in images.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(f"{images} holds no images; expected files ending in {', '.join(sorted(SUFFIXES))}")
    for file, earlier in zip(files[1:], files, strict=False):
        if file.stem == earlier.stem:
            raise DataError(f"{file}: {earlier.name!r} is named {file.stem!r} too, and a name has one mask; rename one")
    names = {file.stem for file in files}
    whole: dict[str, list[Path]] = {}
    for mask in sorted(masks.iterdir()):
        name = mask.name if mask.is_dir() else mask.stem
        if name not in names and not name.startswith("."):
            raise DataError(f"{mask}: there is no picture {name!r} in {images}; remove it, or add the picture")
        whole.setdefault(mask.stem, []).append(mask)
    return [_find_masks(file, masks / file.stem, whole.get(file.stem, [])) for file in files]


def _find_masks(file: Path, masks: Path, whole: Sequence[Path]) -> SegmentedFile:
    """The masks of a picture: a folder of that path, or a file with an ending behind it, one of `whole`."""
    is_whole = not masks.is_dir()
    files = whole if is_whole else masks.iterdir()
    own = tuple(sorted(one for one in files if one.suffix.lower() in MASK_SUFFIXES and one.is_file()))
    if not own or (is_whole and len(own) > 1):
        raise MissingDataError(
            f"{file} has {len(own) or 'no'} masks; expected one file {masks}.png, or a folder {masks} with a file for "
            "each object"
        )
    size = read_image(file, lambda one: ImageOps.exif_transpose(one).size)
    for mask in own:
        if (found := read_image(mask, _mask_size)) != size:
            raise DataError(
                f"{mask} has {found[0]} x {found[1]} pixels, and its picture {file.name!r} has {size[0]} x {size[1]}; "
                "they must be of one size"
            )
    return SegmentedFile(file=file, masks=own, is_whole=is_whole)


def _mask_size(image: Image.Image) -> tuple[int, int]:
    """Width and height.

    Raises:
        OSError: It has colours, so that it is no mask.
    """
    if image.mode not in _MASK_MODES:
        raise OSError(f"its mode is {image.mode}, and a mask has one whole number a pixel: grey, or a palette")
    return image.size


def _read_mask(path: Path) -> NDArray[np.int64]:
    """(H, W): the numbers of a mask, of a palette its places.

    Raises:
        DataError: It cannot be read, or has a number that is none of an object.
    """
    values: NDArray[np.int64] = read_image(path, lambda image: np.asarray(image).astype(np.int64))
    least, most = int(values.min()), int(values.max())
    if least < 0 or most > _LARGEST_VALUE:
        wrong = least if least < 0 else most
        raise DataError(f"{path}: a pixel is {wrong:,}, and the values of a mask are 0 to {_LARGEST_VALUE:,}")
    return values


def _pack(masks: Iterable[NDArray[np.bool_]]) -> list[Labels]:
    """Puts masks, (H, W), that may overlap into as few maps as do when each goes into the first where it fits."""
    maps: list[Labels] = []
    for mask in masks:
        for labels in maps:
            if not labels[mask].any():
                break
        else:
            labels = np.zeros(mask.shape, np.int32)
            maps.append(labels)
        labels[mask] = labels.max() + 1
    return maps


def hold_out_drawings(
    drawings: Mapping[str, Drawings], texts: EmojiTexts, fraction: float
) -> tuple[Drawings, Drawings]:
    """Splits drawings of all styles into those to train on and those of held-out concepts."""
    everything = join_drawings(list(drawings.values()))
    _, unseen = hold_out(int(texts.concepts.max()) + 1, fraction)
    is_unseen = np.isin(texts.concepts[everything.emoji], unseen)
    return everything.take(np.flatnonzero(~is_unseen)), everything.take(np.flatnonzero(is_unseen))


def crop_scene(
    picture: SegmentedImage, size: int, random: np.random.Generator, *, least_area: float, turned: bool
) -> Scene:
    """Cuts a part out of a picture and brings it to I x I, mirrored at random.

    Args:
        picture: The picture, of whose segmentations one is taken.
        size: I.
        random: Where the random numbers come from.
        least_area: Share of the picture that the part has at least; of a picture larger than I, as little as I x I.
        turned: Whether it may stand on its head or its side.
    """
    height, width = picture.image.shape[:2]
    area = random.uniform(min(least_area, (size / max(height, width)) ** 2), 1.0)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    across, down = width * min(1.0, math.sqrt(area * ratio)), height * min(1.0, math.sqrt(area / ratio))
    left, top = random.uniform(0, width - across), random.uniform(0, height - down)
    box = (left, top, left + across, top + down)
    image = np.asarray(Image.fromarray(picture.image).resize((size, size), Image.Resampling.BILINEAR, box=box))
    labels = picture.segmentations[random.integers(len(picture.segmentations))]
    centres = (np.arange(size) + 0.5) / size
    rows, columns = (top + centres * down).astype(np.int64), (left + centres * across).astype(np.int64)
    labels = labels[rows[:, None], columns[None, :]]
    if random.random() < 0.5:
        image, labels = image[:, ::-1], labels[:, ::-1]
    if turned and random.random() < 0.5:
        image, labels = image[::-1], labels[::-1]
    if turned and random.random() < 0.5:
        image, labels = image.transpose(1, 0, 2), labels.T
    return Scene(image=np.ascontiguousarray(image), maps=(np.ascontiguousarray(labels),))


class Composer:
    """Composes pictures of drawings that cover each other, on photographs and on colours.

    Args:
        drawings: What is composed.
        drawn: bool (N, S, S): which of their pixels are drawn. A border of one pixel is left out, where the drawing is
            blurred into the white around it.
        backgrounds: Photographs.
        sides: Least and greatest side of a drawing, as shares of the picture's.
    """

    def __init__(
        self,
        drawings: Drawings,
        drawn: NDArray[np.bool_],
        backgrounds: Sequence[NDArray[np.uint8]],
        *,
        sides: tuple[float, float] = (0.12, 0.8),
    ) -> None:
        inner = drawn.copy()
        for axis in (1, 2):
            for shift in (-1, 1):
                inner &= np.roll(drawn, shift, axis)
        self._layers = np.concatenate((drawings.images, inner[..., None] * np.uint8(255)), axis=-1)  # (N, S, S, 4)
        self._parts: dict[int, NDArray[np.uint8]] = {}
        self._backgrounds = backgrounds
        self._sides = sides

    def __repr__(self) -> str:
        return f"Composer({len(self._layers):,} drawings, {len(self._backgrounds)} photographs)"

    def __len__(self) -> int:
        return len(self._layers)

    def compose(self, drawing: int, size: int, random: np.random.Generator) -> Scene:
        """Makes a picture of `drawing` and random others: (I, I), the maps of whole drawings and of their parts."""
        canvas = Image.fromarray(self._background(size, random))
        wholes, parts = (np.zeros((size, size), np.int32) for _ in range(2))
        others = random.integers(len(self._layers), size=random.integers(0, _MOST_DRAWINGS))
        num_parts, drawn = 0, []
        for number, one in enumerate(random.permutation([drawing, *others]), start=1):
            layer, pieces, corner = self._transform(int(one), size, random)
            canvas.paste(layer, corner, layer)
            window, within = _clip(corner, layer.size, size)
            covered = np.asarray(layer)[..., 3][within] >= 128
            wholes[window][covered] = number
            drawn.append((int(one), int(covered.sum())))
            seen = pieces[within][covered].astype(np.int32)
            parts[window][covered] = np.where(seen > 0, seen + num_parts, 0)
            num_parts += int(pieces.max(initial=0))
        return Scene(
            image=np.asarray(canvas, np.uint8),
            maps=(wholes, parts),
            weights=(_WHOLES, 1 - _WHOLES),
            drawn=tuple(drawn),
        )

    def _background(self, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
        """(I, I, 3): a part of a photograph, or from one colour to another."""
        if len(self._backgrounds) and random.random() < 0.6:
            image = self._backgrounds[int(random.integers(len(self._backgrounds)))]
            height, width = image.shape[:2]
            side = random.uniform(0.5, 1.0) * min(height, width)
            left, top = random.uniform(0, width - side), random.uniform(0, height - side)
            box = (left, top, left + side, top + side)
            return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=box))
        ends = random.uniform(0, 255, (2, 3))
        across = random.random()
        way = np.linspace(0, 1, size)
        mix = (across * way[:, None] + (1 - across) * way[None, :])[..., None]
        blend: NDArray[np.uint8] = (ends[0] * mix + ends[1] * (1 - mix)).astype(np.uint8)
        return blend

    def _transform(
        self, drawing: int, size: int, random: np.random.Generator
    ) -> tuple[Image.Image, NDArray[np.uint8], tuple[int, int]]:
        """A drawing turned, mirrored and scaled, with the map of its parts, and where its left top corner lies."""
        stored = self._layers.shape[1]
        least, most = self._sides
        side = size * math.exp(random.uniform(math.log(least), math.log(most)))
        angle = random.uniform(-math.pi / 6, math.pi / 6)
        outer = math.ceil(side * (abs(math.cos(angle)) + abs(math.sin(angle))))
        cosine, sine = (part * stored / side for part in (math.cos(angle), math.sin(angle)))
        sign = -1 if random.random() < 0.5 else 1
        middle, half = stored / 2, outer / 2
        matrix = (
            sign * cosine, sign * sine, middle - sign * (cosine + sine) * half,
            -sine, cosine, middle + (sine - cosine) * half,
        )  # fmt: skip
        layer = Image.fromarray(self._layers[drawing])
        if side < stored:  # a smaller picture of it first, so that no pixel is passed over
            coarse = max(1, round(side))
            layer = layer.resize((coarse, coarse), Image.Resampling.BOX)
            scaled = tuple(value * coarse / stored for value in matrix)
        else:
            scaled = matrix
        turned = layer.transform((outer, outer), Image.Transform.AFFINE, scaled, Image.Resampling.BILINEAR)
        pieces = Image.fromarray(self._parts_of(drawing))
        pieces = pieces.transform((outer, outer), Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)
        centre = random.uniform(0.1, 0.9, 2) * size
        corner = (int(centre[0] - half), int(centre[1] - half))
        return turned, np.asarray(pieces), corner

    def _parts_of(self, drawing: int) -> NDArray[np.uint8]:
        """The map of a drawing's parts, (S, S), made once."""
        found = self._parts.get(drawing)
        if found is None:
            layer = self._layers[drawing]
            found = self._parts[drawing] = find_parts(layer[..., :3], layer[..., 3] > 0)
        return found


def _clip(
    corner: tuple[int, int], layer: tuple[int, int], size: int
) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Where a layer lies in a picture, and which part of the layer that is: rows and columns each."""
    places = [(max(0, start), max(0, min(size, start + length))) for start, length in zip(corner, layer, strict=True)]
    (left, right), (top, bottom) = places
    window = (slice(top, bottom), slice(left, right))
    within = (slice(top - corner[1], bottom - corner[1]), slice(left - corner[0], right - corner[0]))
    return window, within


def find_parts(image: NDArray[np.uint8], drawn: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Finds the parts of a drawing: regions whose neighbouring pixels are of nearly one colour.

    Args:
        image: (S, S, 3).
        drawn: (S, S): which pixels are drawn.

    Returns:
        (S, S), from 1, at most 255 parts; 0 where nothing is drawn, and everywhere if there is one part alone.
    """
    levels, places = image.astype(np.int16), np.arange(drawn.size).reshape(drawn.shape)
    starts, ends = [], []
    for one, other in ((np.s_[:, :-1], np.s_[:, 1:]), (np.s_[:-1], np.s_[1:])):
        near = (np.abs(levels[one] - levels[other]).max(axis=-1) < _SAME_COLOUR) & drawn[one] & drawn[other]
        starts.append(places[one][near])
        ends.append(places[other][near])
    rows, columns = np.concatenate(starts), np.concatenate(ends)
    graph = coo_array((np.ones(len(rows), np.int8), (rows, columns)), shape=(drawn.size, drawn.size))
    _, regions = connected_components(graph, directed=False)
    regions = np.where(drawn, regions.reshape(drawn.shape) + 1, 0)
    areas = np.bincount(regions.ravel())
    areas[0] = 0
    large = np.flatnonzero(areas >= _FEWEST_PART_PIXELS)[:255]
    if len(large) < 2:
        return np.zeros(drawn.shape, np.uint8)
    numbers = np.zeros(len(areas), np.uint8)
    numbers[large] = np.arange(1, len(large) + 1)
    parts = numbers[regions]
    nearest = distance_transform_edt(parts == 0, return_distances=False, return_indices=True)
    filled: NDArray[np.uint8] = np.where(drawn, parts[tuple(nearest)], np.uint8(0))
    return filled


def choose_prompts(scene: Scene, count: int, mask_size: int, random: np.random.Generator) -> Prompts | None:
    """Chooses segments of a scene at random, all different as far as there are enough; None: there are none.

    Args:
        scene: The scene.
        count: P.
        mask_size: S, a divisor of I.
        random: Where the random numbers come from.
    """
    chances = []
    for labels, weight in zip(scene.maps, scene.weights, strict=True):
        areas = np.bincount(labels.ravel())
        areas[0] = 0
        large = areas >= LEAST_AREA
        chances.append(large * (weight / max(1, int(large.sum()))))
    total = sum(float(chance.sum()) for chance in chances)
    if not total:
        return None
    flat = np.concatenate(chances) / total
    distinct = int((flat > 0).sum())
    chosen = random.choice(len(flat), size=min(count, distinct), replace=False, p=flat)
    chosen = np.concatenate((chosen, random.choice(chosen, size=count - len(chosen))))
    first = np.cumsum([0, *(len(chance) for chance in chances)])
    prompts = Prompts(
        coverage=np.zeros((count, mask_size, mask_size), np.uint8),
        points=np.zeros((count, 2), np.float32),
        boxes=np.zeros((count, 4), np.float32),
    )
    for row, index in enumerate(chosen):
        which = int(np.searchsorted(first, index, side="right")) - 1
        number = int(index - first[which])
        _fill(prompts, row, scene.maps[which], number, random)
    return prompts


def _fill(prompts: Prompts, row: int, labels: Labels, number: int, random: np.random.Generator) -> None:
    """Writes one segment into a row of prompts."""
    window = find_objects(labels, max_label=number)[number - 1]
    down, across = window
    rows, columns = np.nonzero(labels[window] == number)
    place = random.integers(len(rows))
    jitter = random.random(2)
    size = len(labels)
    prompts.points[row] = (
        (columns[place] + across.start + jitter[0]) / size,
        (rows[place] + down.start + jitter[1]) / size,
    )
    prompts.boxes[row] = np.array((across.start, down.start, across.stop, down.stop)) / size
    cell = size // prompts.coverage.shape[-1]
    top, left = (one.start // cell for one in window)
    bottom, right = (-(-one.stop // cell) for one in window)
    aligned = labels[top * cell : bottom * cell, left * cell : right * cell] == number
    shares = aligned.reshape(aligned.shape[0] // cell, cell, aligned.shape[1] // cell, cell).mean(axis=(1, 3))
    prompts.coverage[row, top:bottom, left:right] = np.round(shares * 255)


def centre_of(mask: NDArray[np.bool_]) -> tuple[float, float]:
    """The middle of the pixel of a mask that is farthest from its edge (Kirillov et al. 2023, section 7.1): x and y."""
    distances = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    row, column = np.unravel_index(int(distances.argmax()), mask.shape)
    return float(column) + 0.5, float(row) + 0.5
