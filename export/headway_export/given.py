"""Texts, images and recordings of one's own that variants are judged by: `--texts`, `--images` and `--audio`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from headway_export.errors import SourceError
from headway_export.source import ExportSource
from headway_server.errors import InvalidInputError
from headway_server.preprocessing.audio import FORMATS_AS_TEXT, AudioDecoder, AudioLimits
from headway_server.preprocessing.image import ImageLimits, ImagePreprocessor

_IMAGES: Final = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp"}
_AUDIO: Final = {".flac", ".mp3", ".ogg", ".opus", ".wav"}
_MOST_FILES: Final = 4096
_MOST_BYTES: Final = 1 << 28
_MOST_PIXELS: Final = 100_000_000
_MOST_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenInputs:
    """What a user names."""

    texts: Path | None = None
    """A file of texts, a line each."""
    images: Path | None = None
    """A folder of images."""
    audio: Path | None = None
    """A folder of recordings."""

    def add_to(self, sources: Sequence[ExportSource]) -> tuple[ExportSource, ...]:
        """Reads everything and adds it to the sources that read such.

        Raises:
            SourceError: Something cannot be read, or no source reads such.
        """
        readers: dict[str, tuple[Path | None, Callable[[ExportSource, Path], ExportSource]]] = {
            "texts": (self.texts, _with_texts),
            "images": (self.images, _with_images),
            "audio": (self.audio, _with_recordings),
        }
        for kind, (path, read) in readers.items():
            if path is None:
                continue
            if not any(kind == _kind_read_by(source) for source in sources):
                first = sources[0]
                raise SourceError(f"--{kind} {path}: {first.task} reads no {kind}; give {flag_of(first)} in its place")
            sources = [read(source, path) if kind == _kind_read_by(source) else source for source in sources]
        return tuple(sources)


def flag_of(source: ExportSource) -> str:
    """Returns the flag by which inputs of one's own are given for a source."""
    kind = _kind_read_by(source)
    return f"--{kind} {'FILE' if kind == 'texts' else 'FOLDER'}"


def _kind_read_by(source: ExportSource) -> str:
    if source.image_preprocessing is not None:
        return "images"
    return "texts" if source.audio_preprocessing is None and source.sound is None else "audio"


def _with_texts(source: ExportSource, file: Path) -> ExportSource:
    try:
        texts = tuple(filter(str.strip, file.read_text(encoding="utf-8").split("\n")))
    except (OSError, ValueError) as error:
        raise SourceError(f"--texts {file}: cannot be read as lines of text ({error})") from error
    if not texts:
        raise SourceError(f"--texts {file}: holds no text; give a text a line")
    return replace(source, texts=texts, texts_name=file.name)


def _with_images(source: ExportSource, folder: Path) -> ExportSource:
    assert source.image_preprocessing is not None, "the source reads images"
    limits = ImageLimits(max_bytes=_MOST_BYTES, max_pixels=_MOST_PIXELS)
    preprocessor = ImagePreprocessor(source.image_preprocessing, limits)
    images = []
    for file in _files_in(folder, "images", _IMAGES):
        try:
            upright = preprocessor.decode(file.read_bytes(), file.name)
            images.append(np.asarray(preprocessor.resize(upright, file.name)[0]))
        except (OSError, InvalidInputError) as error:
            raise SourceError(f"--images {folder}: {error}") from error
    return replace(source, images=images, texts_name=folder.resolve().name)


def _with_recordings(source: ExportSource, folder: Path) -> ExportSource:
    """Cuts recordings into windows of the model's, after they are brought to its rate."""
    audio = source.audio_preprocessing or source.sound
    assert audio is not None, "the source reads audio"
    limits = AudioLimits(max_bytes=_MOST_BYTES, max_seconds=_MOST_SECONDS)
    decoder, windows = AudioDecoder(audio.sampling_rate, limits), []
    for file in _files_in(folder, "audio", _AUDIO):
        try:
            samples = decoder.decode(file.read_bytes(), file.name).samples
        except (OSError, InvalidInputError) as error:
            raise SourceError(f"--audio {folder}: {error}") from error
        starts = range(0, len(samples), audio.window_samples)
        windows += [samples[start : start + audio.window_samples] for start in starts]
    return replace(source, recordings=tuple(windows), texts_name=folder.resolve().name)


def _files_in(folder: Path, kind: str, suffixes: Collection[str]) -> list[Path]:
    """Returns the files of a kind in a folder, in the order of their names.

    Raises:
        SourceError: It is none, or holds none or too many.
    """
    if not folder.is_dir():
        raise SourceError(
            f"--{kind} {folder}: is no folder; give one that holds files of {', '.join(sorted(suffixes))}"
        )
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    if not files:
        formats = FORMATS_AS_TEXT if kind == "audio" else "JPEG, PNG, WebP, BMP or GIF"
        raise SourceError(f"--{kind} {folder}: holds no file of {formats} ({', '.join(sorted(suffixes))})")
    if len(files) > _MOST_FILES:
        raise SourceError(f"--{kind} {folder}: holds {len(files)} files, the limit is {_MOST_FILES}; give fewer")
    return files
