"""What is in a store at this moment, by names, sizes and times alone: cheap enough to be asked every few seconds."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway_server.bundles.manifest import MANIFEST_FILE
from headway_server.bundles.reader import read_manifest, subfolders
from headway_server.errors import BundleError, StoreError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Tells whether the files of a bundle have changed. Equal ones mean that nothing has."""

    manifest: str
    """SHA-256 of the manifest, which names the SHA-256 of every other file; empty where there is none."""
    files: str
    """SHA-256 of names, sizes and times of all files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBundle:
    """A bundle's folder as it is at this moment."""

    fingerprint: Fingerprint | None
    """None where the folder cannot be read."""
    problem: str | None = None
    """What it lacks to be loaded, if anything: it may be half copied."""


def list_store(store: Path, known: Mapping[str, Fingerprint]) -> dict[str, ListedBundle]:
    """Returns every bundle's folder, with or without a manifest, by its path below the store, `<model>/<version>`.

    A model's folder that cannot be read is listed by itself, `<model>`, with the problem.

    Args:
        store: Folder of the store.
        known: Fingerprints that need not be looked into again, by path: no problem is told of these.

    Raises:
        StoreError: The store is missing or cannot be read.
    """
    try:
        models = subfolders(store)
    except OSError as error:
        raise StoreError(f"the store cannot be read ({error.strerror})") from error
    listed: dict[str, ListedBundle] = {}
    for model in models:
        try:
            versions = subfolders(model)
        except OSError as error:
            listed[model.name] = ListedBundle(fingerprint=None, problem=f"cannot be read ({error.strerror})")
            continue
        for version in versions:
            path = f"{model.name}/{version.name}"
            listed[path] = _look_at(version, known.get(path))
    return listed


def _look_at(folder: Path, known: Fingerprint | None) -> ListedBundle:
    try:
        fingerprint = fingerprint_of(folder)
        problem = None if fingerprint == known else _problem(folder)
    except OSError as error:
        return ListedBundle(fingerprint=None, problem=f"cannot be read ({error.strerror})")
    return ListedBundle(fingerprint=fingerprint, problem=problem)


def fingerprint_of(folder: Path) -> Fingerprint:
    """Returns the fingerprint of the bundle in a folder.

    Raises:
        OSError: The folder cannot be read.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(_entries_below(folder)):
        digest.update(
            f"{name}\0{entry.st_mode}\0{entry.st_size}\0{entry.st_mtime_ns}\n".encode(errors="surrogateescape")
        )
    manifest = folder / MANIFEST_FILE
    content = manifest.read_bytes() if manifest.is_file() else b""
    return Fingerprint(hashlib.sha256(content).hexdigest() if content else "", digest.hexdigest())


def _entries_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yields every file below a folder by its path there."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{below}{entry.name}/")
                else:
                    yield below + entry.name, _stat(entry)


def _stat(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except FileNotFoundError:  # a link to nothing, or gone since
        return entry.stat(follow_symlinks=False)


def _problem(folder: Path) -> str | None:
    """Says what keeps a bundle from being whole, judging by names and sizes; None where it may be loaded."""
    try:
        manifest = read_manifest(folder)
    except BundleError as error:
        return str(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: ")
    for name, expected in manifest.files.items():
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode) or found.st_size != expected.size_bytes:
            return f"{name} has {found.st_size} of the {expected.size_bytes} bytes that the manifest says"
    return None
