"""Photographs with captions in several languages, and captions of photographs that are not there.

A user's own are a table (`headway_training.data.tables`) with the columns `file` and `caption`; several captions of an
image are several rows. It may have the column `language`, a BCP 47 code. Without a header these are the columns.

N photographs, S side of a stored picture in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.files import read_lines
from headway_training.data.images import read_images
from headway_training.data.pictures import CaptionedPhotographs, read_captions
from headway_training.data.tables import find_files, read_rows, read_table
from headway_training.errors import DataError

CAPTION_LANGUAGES = ("en", "de")
"""BCP 47 codes of the languages that captions of the data sets are read in."""
UNSTATED_LANGUAGE = "en"
"""Of a user's captions whose table has no column `language`."""
_COLUMNS = ("file", "caption")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedImages:
    """Photographs with captions, by language."""

    images: NDArray[np.uint8]
    """(N, S, S, 3)."""
    captions: Mapping[str, list[list[str]]]
    """Of each photograph, in each language."""
    texts: Mapping[str, list[str]]
    """Captions without a photograph, in each language."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_texts(self) -> int:
        """Captions without a photograph, in all languages."""
        return sum(map(len, self.texts.values()))

    def all_texts(self, language: str) -> list[str]:
        """All captions in a language, with a photograph and without."""
        return [*(one for several in self.captions[language] for one in several), *self.texts[language]]


def language_token(language: str) -> str:
    """The token that a caption in this language begins with."""
    return f"<{language}>"


def read_captioned_images(
    images: Mapping[str, NDArray[np.uint8]],
    captions: Path,
    *,
    lines: Path | None = None,
    texts: Mapping[str, Path] | None = None,
) -> CaptionedImages:
    """Reads what is known of the photographs that a table of captions is about.

    Args:
        images: All photographs by their ids.
        captions: The table of captions.
        lines: The table that says which photograph each line of `texts` describes. A line of a photograph of the table
            of captions is one more caption of it, if it has none of these words; one without a photograph is a caption
            without one; one of a photograph of another part is left out.
        texts: Captions by language, one in a line, whose lines belong together.

    Raises:
        MissingDataError: There is no such file.
        DataError: A column is missing, a photograph, or a line.
    """
    by_language = read_captions(captions, CAPTION_LANGUAGES)
    ids = list(by_language[CAPTION_LANGUAGES[0]])
    if missing := [name for name in ids if name not in images]:
        raise DataError(f"{captions}: there is no photograph {missing[0]}")
    alone: dict[str, list[str]] = {language: [] for language in CAPTION_LANGUAGES}
    if lines is not None and texts is not None:
        places = [row for row in read_table(lines, ("set", "line", "id", "photo")) if row["set"] == "train"]
        for language, path in texts.items():
            written = read_lines(path)
            if len(written) != len(places):
                raise DataError(f"{path} has {len(written):,} lines, and {lines} describes {len(places):,}")
            for row in places:
                line = written[int(row["line"]) - 1]
                if row["photo"] == "-":
                    alone[language].append(line)
                elif row["photo"] == "train" and line not in (known := by_language[language].get(row["id"], [line])):
                    known.append(line)
    return CaptionedImages(
        images=np.stack([images[name] for name in ids]),
        captions={language: [by_language[language][name] for name in ids] for language in CAPTION_LANGUAGES},
        texts=alone,
    )


def read_caption_table(table: Path, unstated: str = UNSTATED_LANGUAGE) -> dict[Path, dict[str, list[str]]]:
    """Reads a user's table of captions: those of each image, in each of the table's languages.

    A caption that several people have written stands there as often.

    Args:
        table: The table.
        unstated: The language, where it has no column of it.

    Raises:
        MissingDataError: The table, or an image, is not there.
        DataError: A column is missing, a cell is empty, or an image has no caption in a language that others have.
    """
    rows = read_rows(table, _COLUMNS, optional=("language",), bare=True)
    files = find_files(table, rows)
    found: dict[Path, dict[str, list[str]]] = {}
    for row, file in zip(rows, files, strict=True):
        by_language = found.setdefault(file, {})
        by_language.setdefault(row.cells.get("language", unstated), []).append(row.cells["caption"])
    languages = list(dict.fromkeys(language for one in found.values() for language in one))
    for file, by_language in found.items():
        if missing := [one for one in languages if one not in by_language]:
            raise DataError(
                f"{table}: {file.name!r} has no caption in {missing[0]!r}, which other images have; add one"
            )
    return {file: {one: by_language[one] for one in languages} for file, by_language in found.items()}


def read_own_captions(table: Path, preprocessing: ImagePreprocessing) -> CaptionedImages:
    """Reads the images of a user's table with their captions; errors as `read_caption_table`."""
    found = read_caption_table(table)
    several = list(found.values())
    return CaptionedImages(
        images=read_images(list(found), preprocessing),
        captions={language: [one[language] for one in several] for language in several[0]},
        texts={language: [] for language in several[0]},
    )


def read_own_photographs(table: Path, preprocessing: ImagePreprocessing) -> CaptionedPhotographs:
    """Reads the images of a user's table with their captions of all languages; errors as `read_caption_table`."""
    found = read_caption_table(table)
    return CaptionedPhotographs(
        images=read_images(list(found), preprocessing), captions=[_all_of(one) for one in found.values()]
    )


def _all_of(by_language: Mapping[str, Sequence[str]]) -> list[str]:
    return [caption for several in by_language.values() for caption in several]
