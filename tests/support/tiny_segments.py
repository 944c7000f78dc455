"""The data of a segmentation recipe in small: discs as nuclei, photographs of two halves, and drawings."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from headway_training.data.pictures import Drawings

CODEPOINTS = ("1F431", "1F436", "1F98A")
"""Of emoji that detectors find."""
COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200))


def make_drawings() -> tuple[Drawings, np.ndarray]:
    """A disc on a square in three pairs of colours, on white."""
    images = np.full((3, 96, 96, 3), 255, np.uint8)
    for image, inner, outer in zip(images, COLOURS, COLOURS[1:] + COLOURS[:1], strict=True):
        image[16:80, 16:80] = outer
        rows, columns = np.ogrid[:96, :96]
        image[(rows - 48) ** 2 + (columns - 48) ** 2 < 400] = inner
    return Drawings(images=images, emoji=np.arange(3)), (images < 250).any(axis=-1)


def write_segment_data(folder: Path) -> Path:
    """Writes bright discs on black as nuclei, photographs of two halves, and drawings in three styles."""
    random = np.random.default_rng(0)
    nuclei: dict[str, Image.Image] = {}
    for number in range(8):
        image, labels = Image.new("L", (64, 64), 10), Image.new("I;16", (64, 64))
        for disc, (x, y) in enumerate(((16, 16), (48, 20), (24, 48)), start=1):
            shift = random.integers(-5, 6, 2)
            box = [x + shift[0] - 9, y + shift[1] - 9, x + shift[0] + 9, y + shift[1] + 9]
            ImageDraw.Draw(image).ellipse(box, fill=200)
            ImageDraw.Draw(labels).ellipse(box, fill=disc)
        nuclei |= {f"{number:02}.jpg": image.convert("RGB"), f"{number:02}.png": labels}
    _write_tar(folder / "nuclei" / "train.tar.gz", nuclei)
    for part in ("train", "val"):
        photographs: dict[str, Image.Image] = {}
        for number in range(2):
            labels = np.ones((40, 60), np.uint16)
            labels[:, 20 + 10 * number :] = 2
            image = np.where(labels[..., None] == 1, (180, 160, 40), (40, 90, 180)).astype(np.uint8)
            photographs[f"{number}.jpg"] = Image.fromarray(image)
            photographs |= {f"{number}_{one}.png": Image.fromarray(labels) for one in (1, 2)}
        _write_tar(folder / "bsds500" / f"{part}.tar.gz", photographs)
    drawings = zip(CODEPOINTS, make_drawings()[0].images, strict=True)
    images = {f"{code}.webp": Image.fromarray(image) for code, image in drawings}
    for style in ("noto", "openmoji", "fluent"):
        _write_tar(folder / "emoji" / f"{style}_96.tar.gz", images)
    rows = ["codepoint\tgroup\ten\tde\ten_tags\tde_tags\tconcept"]
    rows += [f"{code}\tobjects\tx\t\t\t\t{code}" for code in CODEPOINTS]
    (folder / "emoji" / "texts.tsv.gz").write_bytes(gzip.compress("".join(row + "\n" for row in rows).encode()))
    return folder


def _write_tar(path: Path, files: dict[str, Image.Image]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
    with tarfile.open(path, "w:gz") as archive:
        for name, image in files.items():
            content = io.BytesIO()
            image.save(content, kinds[Path(name).suffix], **({"lossless": True} if name.endswith("webp") else {}))
            member = tarfile.TarInfo(name)
            member.size = content.tell()
            content.seek(0)
            archive.addfile(member, content)
