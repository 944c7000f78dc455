"""Pictures with texts: emoji drawings with names and search words, and photographs with captions.

N pictures, S side of a stored picture in pixels.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from headway_training.data.examples import LabeledImages, Rows, hold_out
from headway_training.data.tables import read_table
from headway_training.errors import DataError

STYLES = ("noto", "openmoji", "fluent")
"""The styles that emoji are drawn in."""
NAMES_ALONE, NAMES_FIRST = 0.6, 0.85
"""Share of the descriptions that are a name alone, and with those that begin with one; others are search words."""
MOST_TAGS = 4
"""Search words of a description."""
STYLES_NAMED = 0.5
"""Share of the descriptions that name the style."""
_NONE = np.empty(0, np.int64)
_TURNED_WORDS = frozenset({"left", "right", "leftwards", "rightwards", "clock", "clockwise", "counterclockwise"})
_GROUPS_WITH_SIGNS = frozenset({"symbols", "flags"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmojiTexts(Rows):
    """What is known of each emoji, whatever its style."""

    codepoints: list[str]
    """Hexadecimal, with hyphens, as files are named."""
    names: list[str]
    """In English."""
    tags: list[tuple[str, ...]]
    """English search words, without the name itself."""
    concepts: NDArray[np.int64]
    """Number of what is drawn; equal for emoji that must not be told apart."""
    groups: NDArray[np.int64]
    """Number of the group, such as faces or food."""
    mirrorable: NDArray[np.bool_]
    """False where left and right matter, or where there is writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawings(Rows):
    """Emoji in several styles."""

    images: NDArray[np.uint8]
    """(N, S, S, 3), on white."""
    emoji: NDArray[np.int64]
    """(N,): the row of `EmojiTexts`."""


NO_DRAWINGS = Drawings(images=np.empty((0, 1, 1, 3), np.uint8), emoji=_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedImages(Rows):
    """Images of one size, each with what it shows and how."""

    images: NDArray[np.uint8]
    """(N, S, S, 3)."""
    names: list[str]
    """What each shows."""
    tags: list[tuple[str, ...]]
    """Search words of each."""
    styles: list[str]
    """What each is drawn like; empty where nothing is known."""

    def titles(self) -> list[str]:
        """Name and style of each."""
        return [f"{name}, {style}" if style else name for name, style in zip(self.names, self.styles, strict=True)]

    def all_texts(self) -> list[str]:
        """What a tokenizer is trained on."""
        return [*self.titles(), *(" ".join(tags) for tags in self.tags)]

    def describe(self, row: int, random: np.random.Generator) -> str:
        """A text for an image: its name, its name with search words, or search words alone; half name the style."""
        name, tags, style = self.names[row], self.tags[row], self.styles[row]
        kind = random.random()
        words = [] if kind < NAMES_ALONE or not tags else [tags[i] for i in random.permutation(len(tags))[:MOST_TAGS]]
        words = words[: int(random.integers(1, len(words) + 1))] if words else []
        parts = words if words and kind >= NAMES_FIRST else [name, *words]
        return ", ".join([*parts, style] if style and random.random() < STYLES_NAMED else parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedPhotographs(Rows):
    """Photographs, each with several captions."""

    images: NDArray[np.uint8]
    """(N, S, S, 3)."""
    captions: list[list[str]]
    """Of each photograph."""

    def titles(self) -> list[str]:
        """The first caption of each."""
        return [several[0] for several in self.captions]

    def all_texts(self) -> list[str]:
        """What a tokenizer is trained on."""
        return [text for several in self.captions for text in several]

    def describe(self, row: int, random: np.random.Generator) -> str:
        """A text for a photograph: any of its captions."""
        return self.captions[row][random.integers(len(self.captions[row]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """A part of the pictures: what is trained on, or what is measured on."""

    texts: EmojiTexts
    """All emoji, those of other parts included."""
    drawings: Drawings
    """The part's drawings; for measurements, of emoji whose other styles are trained on."""
    photographs: CaptionedPhotographs
    """The part's photographs."""
    unseen_drawings: Drawings | None = None
    """Drawings of concepts that are not trained on in any style; for measurements."""
    labeled: LabeledImages | None = None
    """Images with labels, which are measured on alone."""
    labels: tuple[str, ...] = ()
    """The names of those labels."""

    def all_texts(self) -> list[str]:
        """What a tokenizer is trained on."""
        tags = (" ".join(tags) for tags in self.texts.tags)
        return [*self.texts.names, *tags, *self.photographs.all_texts()]

    def __len__(self) -> int:
        """Pictures of all kinds."""
        unseen = 0 if self.unseen_drawings is None else len(self.unseen_drawings)
        labeled = 0 if self.labeled is None else len(self.labeled)
        return len(self.drawings) + len(self.photographs) + unseen + labeled


def read_emoji_texts(path: Path) -> EmojiTexts:
    """Reads the table of emoji: code point, group, name, tags and concept of each.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing.
    """
    rows = read_table(path, ("codepoint", "group", "en", "en_tags", "concept"))
    return EmojiTexts(
        codepoints=[row["codepoint"] for row in rows],
        names=[row["en"] for row in rows],
        tags=[tuple(tag for tag in row["en_tags"].split("|") if tag) for row in rows],
        concepts=_numbered([row["concept"] for row in rows]),
        groups=_numbered([row["group"] for row in rows]),
        mirrorable=np.array([_is_mirrorable(row) for row in rows]),
    )


def _numbered(names: Sequence[str]) -> NDArray[np.int64]:
    """The number of each name, in the order in which names come first."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _is_mirrorable(row: Mapping[str, str]) -> bool:
    words = row["en"].lower().replace("-", " ").replace("\N{RIGHT SINGLE QUOTATION MARK}", " ").split()
    return row["group"] not in _GROUPS_WITH_SIGNS and _TURNED_WORDS.isdisjoint(words)


def without_drawings(photographs: CaptionedPhotographs) -> Pictures:
    """Photographs alone, with captions."""
    texts = EmojiTexts(codepoints=[], names=[], tags=[], concepts=_NONE, groups=_NONE, mirrorable=_NONE.astype(bool))
    return Pictures(texts=texts, drawings=NO_DRAWINGS, photographs=photographs)


def read_drawings(files: Mapping[str, Path], texts: EmojiTexts) -> dict[str, Drawings]:
    """Reads the archives of some styles, by style.

    Raises:
        MissingDataError: An archive is missing.
        DataError: An archive or a picture in it cannot be read, or the table does not know a picture.
    """
    rows = {codepoint: row for row, codepoint in enumerate(texts.codepoints)}
    drawings = {}
    for style, path in files.items():
        images = read_archive(path)
        if unknown := [name for name in images if name not in rows]:
            raise DataError(f"{path}: the table of emoji has no {unknown[0]}")
        emoji = np.array([rows[name] for name in images], np.int64)
        drawings[style] = Drawings(images=np.stack(list(images.values())), emoji=emoji)
    return drawings


def describe_drawings(drawings: Mapping[str, Drawings], texts: EmojiTexts) -> DescribedImages:
    """Puts the drawings of all styles one after another, with what is known of them."""
    rows = [(style, row) for style, one in drawings.items() for row in one.emoji.tolist()]
    return DescribedImages(
        images=np.concatenate([one.images for one in drawings.values()]),
        names=[texts.names[row] for _, row in rows],
        tags=[texts.tags[row] for _, row in rows],
        styles=[style for style, _ in rows],
    )


def join_drawings(parts: Sequence[Drawings]) -> Drawings:
    """Puts drawings one after another."""
    return Drawings(
        images=np.concatenate([part.images for part in parts]), emoji=np.concatenate([part.emoji for part in parts])
    )


def split_drawings(
    drawings: Mapping[str, Drawings], texts: EmojiTexts, held_out_style: str | None, fraction: float
) -> tuple[Drawings, Drawings, Drawings]:
    """Splits drawings into those to train on, those of the held-out style, and those of held-out concepts.

    Without a held-out style everything is trained on, and both other parts are empty.
    """
    everything = join_drawings(list(drawings.values()))
    nothing = everything.take(np.array([], np.int64))
    if held_out_style is None:
        return everything, nothing, nothing
    _, unseen = hold_out(int(texts.concepts.max()) + 1, fraction)

    def part(styles: Callable[[str], bool], *, is_unseen: bool) -> Drawings:
        chosen = join_drawings([one for style, one in drawings.items() if styles(style)])
        return chosen.take(np.flatnonzero(np.isin(texts.concepts[chosen.emoji], unseen) == is_unseen))

    return (
        part(lambda style: style != held_out_style, is_unseen=False),
        part(lambda style: style == held_out_style, is_unseen=False),
        part(lambda _: True, is_unseen=True),
    )


def read_photographs(images: Mapping[str, NDArray[np.uint8]], captions: Path, language: str) -> CaptionedPhotographs:
    """Finds the photographs that a file of captions is about.

    Args:
        images: All photographs by their ids.
        captions: The table of captions.
        language: Of the captions, a BCP 47 code.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing, or a photograph.
    """
    by_id = read_captions(captions, (language,))[language]
    if missing := [name for name in by_id if name not in images]:
        raise DataError(f"{captions}: there is no photograph {missing[0]}")
    return CaptionedPhotographs(images=np.stack([images[name] for name in by_id]), captions=list(by_id.values()))


def read_captions(path: Path, languages: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Reads a table of captions: by language, and by the photograph's id.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing.
    """
    by_language: dict[str, dict[str, list[str]]] = {language: {} for language in languages}
    for row in read_table(path, ("id", "language", "caption")):
        if row["language"] in by_language:
            by_language[row["language"]].setdefault(row["id"], []).append(row["caption"])
    return by_language


def read_archive(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Reads an archive of pictures of one size: RGB, (S, S, 3), by the files' names without their endings.

    Raises:
        DataError: The archive, or a picture in it, cannot be read.
    """
    images = {}
    try:
        with tarfile.open(path) as files:
            for member in files:
                content = files.extractfile(member)
                if content is not None:
                    with Image.open(io.BytesIO(content.read())) as image:
                        images[Path(member.name).stem] = np.asarray(image.convert("RGB"), np.uint8)
    except (tarfile.TarError, UnidentifiedImageError, OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it and get it again") from error
    return images


def opaque(images: NDArray[np.uint8], *, level: int = 244) -> NDArray[np.bool_]:
    """Finds what is drawn: all but the nearly white pixels that hang together with a picture's edge.

    Args:
        images: (N, S, S, 3), on white.
        level: A pixel whose three values are at least this is nearly white.

    Returns:
        (N, S, S).
    """
    nearly: NDArray[np.bool_] = np.all(images >= level, axis=-1)  # (N, S, S)
    white = np.ascontiguousarray(np.moveaxis(nearly, 0, -1))  # (S, S, N): fast along lines
    outside = np.zeros_like(white)
    for edge in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        outside[edge] = white[edge]
    num_before = -1
    while (num_outside := int(outside.sum())) != num_before:
        num_before = num_outside
        for lines, whites in ((outside, white), (outside.swapaxes(0, 1), white.swapaxes(0, 1))):
            for line in range(1, len(lines)):  # carries the outside as far as it goes in each direction
                lines[line] |= whites[line] & lines[line - 1]
            for line in range(len(lines) - 2, -1, -1):
                lines[line] |= whites[line] & lines[line + 1]
    return np.ascontiguousarray(np.moveaxis(~outside, -1, 0))
