"""Photographs as JPEG of about the size that pictures are sent in."""

from __future__ import annotations

import importlib.util
import os
from io import BytesIO
from pathlib import Path

from machine import ROOT
from PIL import Image, ImageOps

LONGER_SIDE = 500
_QUALITY = 90
_SUFFIXES = (".jpg", ".png")


def load_photographs() -> tuple[str, tuple[bytes, ...]]:
    """Returns where pictures come from, and each as JPEG, its longer side `LONGER_SIDE` pixels.

    They are those of `photos/` in the data folder, HEADWAY_DATA_DIR or `shared/data` beside the repository, and without
    it the demo's drawings.
    """
    named = os.environ.get("HEADWAY_DATA_DIR")
    folder = (Path(named) if named else ROOT.parent / "shared" / "data") / "photos"
    files = sorted(file for file in folder.glob("*") if file.suffix in _SUFFIXES)
    if files:
        pictures = [file.read_bytes() for file in files]
        source = f"{len(files)} photographs"
    else:
        pictures = list(_drawings().values())
        source = f"{len(pictures)} pictures drawn by demo/draw.py"
    return f"{source}, JPEG, longer side {LONGER_SIDE}", tuple(as_jpeg(picture, LONGER_SIDE) for picture in pictures)


def as_jpeg(data: bytes, longer_side: int) -> bytes:
    """Encodes a picture anew, upright, with a longer side of so many pixels."""
    with Image.open(BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    scale = longer_side / max(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def _drawings() -> dict[str, bytes]:
    """The demo is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("headway_demo_draw", ROOT / "demo" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pictures: dict[str, bytes] = module.draw_pictures()
    return pictures
