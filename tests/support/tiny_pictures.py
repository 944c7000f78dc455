"""The data set of a recipe of two towers in small: drawings and photographs of one colour each."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200), "yellow": (220, 220, 30)}

GERMAN = {"red": "rot", "green": "grün", "blue": "blau", "yellow": "gelb"}


def write_picture_data(folder: Path) -> Path:
    """Writes emoji that are plain colours in three styles, photographs of one colour, and images with labels."""
    random = np.random.default_rng(0)
    rows = ["codepoint\tgroup\ten\tde\ten_tags\tde_tags\tconcept"]
    rows += [f"F{i}\tobjects\t{name} thing\t\t{name}|paint\t\tF{i}" for i, name in enumerate(COLOURS)]
    _write_gzip(folder / "emoji" / "texts.tsv.gz", rows)
    for style in ("noto", "openmoji", "fluent"):
        images = {}
        for i, colour in enumerate(COLOURS.values()):
            image = np.full((96, 96, 3), 255, np.uint8)
            image[20:76, 20:76] = colour
            images[f"F{i}.webp"] = image
        _write_tar(folder / "emoji" / f"{style}_96.tar.gz", images, "WEBP")
    photographs = {}
    captions: dict[str, list[str]] = {"train": [], "val": []}
    for i in range(24):
        name, colour = list(COLOURS.items())[i % 4]
        photographs[f"{i}.jpg"] = np.clip(np.array(colour) + random.normal(0, 10, (112, 112, 3)), 0, 255).astype(
            np.uint8
        )
        part = "val" if i >= 20 else "train"
        captions[part] += [f"{i}\ten\ta wall that is {name}", f"{i}\tde\teine Wand"]
    _write_tar(folder / "flickr8k" / "photos_112.tar.gz", photographs, "JPEG")
    for part, lines in captions.items():
        _write_gzip(folder / "flickr8k" / f"captions_{part}.tsv.gz", ["id\tlanguage\tcaption", *lines])
    batch = b"".join(bytes([i % 10]) + random.integers(0, 255, 3072, np.uint8).tobytes() for i in range(20))
    for stem in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / "cifar10").mkdir(exist_ok=True)
        (folder / "cifar10" / f"{stem}.bin").write_bytes(batch)
    return folder


def write_caption_data(folder: Path) -> Path:
    """Writes that data with captions in two languages, and captions without photographs."""
    write_picture_data(folder)
    for part, numbers in (("train", range(20)), ("val", range(20, 24))):
        rows = ["id\tlanguage\tcaption"]
        for i in numbers:
            name = list(COLOURS)[i % 4]
            rows += [f"{i}\ten\ta wall that is {name}", f"{i}\tde\teine Wand, ganz {GERMAN[name]}"]
        _write_gzip(folder / "flickr8k" / f"captions_{part}.tsv.gz", rows)
    _write_gzip(
        folder / "flickr8k" / "task1_lines.tsv.gz",
        ["set\tline\tid\tphoto", "train\t1\t77\t-", "train\t2\t3\ttrain", "train\t3\t4\ttrain", "val\t1\t20\tval"],
    )
    _write_gzip(folder / "multi30k" / "train.en.gz", ["a red wall", "a wall that is yellow", "a wall that is red"])
    _write_gzip(folder / "multi30k" / "train.de.gz", ["eine rote Wand", "eine gelbe Wand", "eine rote Wand"])
    return folder


def _write_gzip(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))


def _write_tar(path: Path, images: dict[str, np.ndarray], kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as files:
        for name, image in images.items():
            content = io.BytesIO()
            Image.fromarray(image).save(content, kind, **({"lossless": True} if kind == "WEBP" else {}))
            member = tarfile.TarInfo(name)
            member.size = content.tell()
            content.seek(0)
            files.addfile(member, content)
