"""Draws pictures of things that the shipped models know, so that the demo needs no downloads.

python demo/draw.py FOLDER    writes them as PNG files
"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIZE = 128
"""Width and height of a picture in pixels."""

Colour = tuple[int, int, int]

SKY: Colour = (70, 120, 190)
STAR: Colour = (255, 200, 60)
"""Colour of the scene's star, and of nothing else in it."""


def draw_pictures() -> dict[str, bytes]:
    """Returns every picture as PNG, by what it shows."""
    return {name: _encode(_finish(paint())) for name, paint in _PAINTERS.items()}


def draw_scene() -> bytes:
    """Returns a picture of a star and a balloon as PNG, for models that find and cut out objects."""
    image = Image.new("RGB", (320, 240), SKY)
    draw = ImageDraw.Draw(image)
    corners = [
        (90 + reach * math.sin(math.pi * corner / 5), 120 - reach * math.cos(math.pi * corner / 5))
        for corner, reach in enumerate((55, 27.5) * 5)
    ]
    draw.polygon(corners, fill=STAR)
    draw.ellipse((194, 48, 274, 144), fill=(220, 50, 50))
    draw.ellipse((210, 65, 228, 89), fill=(240, 130, 130))
    draw.polygon([(234, 142), (224, 156), (244, 156)], fill=(187, 42, 42))
    draw.line((234, 156, 238, 226), fill=(90, 90, 90), width=3)
    return _encode(image)


def _ship() -> Image.Image:
    """A freighter on the open sea."""
    image = _shaded((150, 190, 225), (205, 222, 232))
    sea = _shaded((52, 92, 128), (28, 58, 92)).crop((0, 0, SIZE, 50))
    image.paste(sea, (0, 78))
    draw = ImageDraw.Draw(image)
    draw.polygon([(8, 70), (120, 68), (108, 90), (20, 90)], fill=(48, 46, 58))
    draw.polygon([(12, 82), (113, 82), (108, 90), (20, 90)], fill=(140, 44, 38))
    draw.rectangle((20, 46, 46, 70), fill=(236, 236, 230))
    draw.rectangle((24, 36, 40, 47), fill=(224, 224, 220))
    draw.rectangle((29, 24, 37, 37), fill=(190, 70, 48))
    for left, colour in ((54, (176, 84, 52)), (70, (70, 104, 140)), (86, (170, 150, 90))):
        draw.rectangle((left, 57, left + 13, 69), fill=colour)
    for row in (94, 102, 112):
        draw.line((4 + row % 9, row, 124 - row % 7, row), fill=(92, 130, 160), width=1)
    return image


def _airplane() -> Image.Image:
    """An airliner in a clear sky."""
    image = _shaded((78, 134, 205), (168, 205, 238))
    draw = ImageDraw.Draw(image)
    draw.polygon([(10, 62), (22, 54), (100, 54), (120, 62), (100, 70), (22, 70)], fill=(232, 234, 238))
    draw.polygon([(22, 66), (100, 66), (96, 70), (26, 70)], fill=(150, 156, 168))
    draw.polygon([(58, 64), (76, 64), (52, 104), (42, 104)], fill=(196, 200, 208))
    draw.polygon([(62, 56), (74, 56), (58, 32), (50, 32)], fill=(172, 178, 190))
    draw.polygon([(12, 58), (24, 56), (14, 32), (5, 32)], fill=(208, 70, 60))
    draw.polygon([(12, 62), (26, 62), (14, 74), (6, 74)], fill=(180, 184, 194))
    draw.line((34, 60, 98, 60), fill=(70, 84, 110), width=2)
    return image


def _automobile() -> Image.Image:
    """A red car from the side, on a road."""
    image = _shaded((176, 186, 190), (214, 214, 206))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 84, SIZE, SIZE), fill=(112, 112, 114))
    draw.polygon([(30, 62), (44, 40), (84, 40), (102, 62)], fill=(166, 22, 24))
    draw.polygon([(37, 61), (47, 45), (62, 45), (62, 61)], fill=(64, 84, 100))
    draw.polygon([(67, 61), (67, 45), (82, 45), (94, 61)], fill=(64, 84, 100))
    draw.rounded_rectangle((8, 60, 120, 90), radius=10, fill=(196, 28, 28))
    draw.rectangle((8, 80, 120, 88), fill=(132, 16, 18))
    draw.ellipse((109, 66, 119, 75), fill=(240, 226, 180))
    _wheels(draw, (34, 94), 14, 90)
    return image


def _truck() -> Image.Image:
    """A lorry from the side, on a road."""
    image = _shaded((164, 192, 220), (216, 222, 224))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 92, SIZE, SIZE), fill=(104, 102, 100))
    draw.rectangle((6, 26, 84, 86), fill=(226, 226, 222))
    for left in range(14, 84, 10):
        draw.line((left, 28, left, 84), fill=(196, 196, 194), width=1)
    draw.polygon([(86, 86), (86, 40), (108, 40), (120, 62), (120, 86)], fill=(36, 70, 150))
    draw.polygon([(92, 60), (92, 46), (106, 46), (114, 60)], fill=(150, 182, 205))
    draw.rectangle((6, 86, 120, 92), fill=(44, 44, 48))
    _wheels(draw, (24, 46, 102), 11, 95)
    return image


def _frog() -> Image.Image:
    """A green frog from the side, sitting on the ground."""
    image = _mottled((96, 84, 66), (60, 50, 38), seed=4)
    draw = ImageDraw.Draw(image)
    light, green, dark = (142, 170, 62), (104, 138, 42), (62, 88, 26)
    draw.ellipse((8, 96, 122, 122), fill=(88, 76, 54))
    draw.ellipse((10, 48, 92, 112), fill=green)
    draw.polygon([(20, 66), (64, 34), (100, 36), (110, 80), (70, 104)], fill=green)
    draw.ellipse((66, 28, 122, 74), fill=light)
    draw.ellipse((8, 66, 62, 116), fill=dark)
    draw.ellipse((14, 68, 58, 108), fill=green)
    draw.ellipse((70, 66, 112, 102), fill=(206, 204, 150))
    draw.polygon([(72, 84), (86, 82), (90, 116), (74, 118)], fill=dark)
    draw.polygon([(30, 106), (76, 112), (78, 120), (24, 120)], fill=dark)
    draw.ellipse((84, 18, 108, 42), fill=light)
    draw.ellipse((89, 22, 106, 39), fill=(214, 176, 58))
    draw.ellipse((94, 25, 102, 37), fill=(14, 14, 10))
    draw.line((90, 62, 121, 54), fill=dark, width=3)
    for x, y in ((40, 56), (58, 50), (52, 70), (74, 46), (30, 74)):
        draw.ellipse((x - 4, y - 3, x + 4, y + 3), fill=dark)
    return image


def _horse() -> Image.Image:
    """A brown horse on a meadow."""
    image = _shaded((170, 200, 226), (206, 220, 226))
    meadow = _mottled((104, 142, 58), (82, 120, 44), seed=9).crop((0, 0, SIZE, 50))
    image.paste(meadow, (0, 78))
    draw = ImageDraw.Draw(image)
    brown, dark = (112, 66, 34), (58, 34, 20)
    for left in (36, 46, 80, 89):
        draw.polygon([(left, 72), (left + 9, 72), (left + 7, 112), (left + 1, 112)], fill=dark)
    draw.ellipse((28, 44, 100, 82), fill=brown)
    draw.polygon([(80, 62), (96, 18), (110, 26), (100, 66)], fill=brown)
    draw.polygon([(94, 16), (108, 14), (124, 38), (116, 44), (100, 34)], fill=brown)
    draw.polygon([(96, 18), (100, 6), (104, 16)], fill=brown)
    draw.polygon([(78, 56), (94, 14), (99, 18), (86, 58)], fill=dark)
    draw.polygon([(30, 52), (20, 62), (18, 96), (26, 94), (34, 62)], fill=dark)
    draw.ellipse((107, 22, 111, 26), fill=(10, 8, 8))
    return image


def _dog() -> Image.Image:
    """A brown dog that runs over a meadow."""
    image = _mottled((96, 150, 60), (74, 126, 44), seed=9)
    image.paste(_shaded((150, 190, 225), (205, 222, 232)).crop((0, 0, SIZE, 40)), (0, 0))
    draw = ImageDraw.Draw(image)
    brown, dark = (140, 84, 40), (84, 48, 24)
    for hip, foot, colour in ((40, 22, brown), (48, 40, dark), (84, 98, dark), (92, 112, brown)):
        draw.line((hip, 74, foot, 106), fill=colour, width=8)
    draw.line((34, 62, 12, 44), fill=brown, width=6)
    draw.ellipse((28, 52, 98, 84), fill=brown)
    draw.ellipse((82, 34, 112, 62), fill=brown)
    draw.polygon([(104, 42), (124, 52), (122, 60), (104, 60)], fill=brown)
    draw.ellipse((82, 36, 94, 62), fill=dark)
    draw.ellipse((118, 50, 125, 56), fill=(20, 16, 14))
    draw.ellipse((101, 42, 105, 46), fill=(10, 8, 8))
    return image


_PAINTERS: Mapping[str, Callable[[], Image.Image]] = {
    "ship": _ship,
    "airplane": _airplane,
    "automobile": _automobile,
    "truck": _truck,
    "frog": _frog,
    "horse": _horse,
    "dog": _dog,
}


def _shaded(top: Colour, bottom: Colour) -> Image.Image:
    """Returns a background whose colour changes evenly from top to bottom."""
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    for row in range(SIZE):
        part = row / (SIZE - 1)
        colour = tuple(round(a + (b - a) * part) for a, b in zip(top, bottom, strict=True))
        draw.line((0, row, SIZE, row), fill=(colour[0], colour[1], colour[2]))
    return image


def _mottled(ground: Colour, spots: Colour, seed: int) -> Image.Image:
    """Returns a background of blurred spots, such as grass or leaves. A seed gives the same spots."""
    generator = random.Random(seed)  # noqa: S311 (decoration)
    image = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(image)
    for _ in range(90):
        x, y, radius = generator.randrange(SIZE), generator.randrange(SIZE), generator.randrange(3, 12)
        draw.ellipse((x - radius, y - radius // 2, x + radius, y + radius // 2), fill=spots)
    return image.filter(ImageFilter.GaussianBlur(2))


def _wheels(draw: ImageDraw.ImageDraw, centres: tuple[int, ...], radius: int, axle: int) -> None:
    """Draws wheels at the columns `centres`, with their axles at row `axle`."""
    for centre in centres:
        draw.ellipse((centre - radius, axle - radius, centre + radius, axle + radius), fill=(24, 24, 26))
        inner = radius // 2
        draw.ellipse((centre - inner, axle - inner, centre + inner, axle + inner), fill=(168, 170, 174))


def _finish(image: Image.Image) -> Image.Image:
    """Blurs the edges, as a photograph of this size does."""
    return image.filter(ImageFilter.GaussianBlur(1.2))


def _encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def main() -> None:
    """Writes the pictures to the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python demo/draw.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in draw_pictures().items():
        (folder / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
