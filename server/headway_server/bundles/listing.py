"""Listing of a store by names, sizes and times: cheap enough for every few seconds."""

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
    """Fingerprint of a bundle's files; equal fingerprints mean unchanged files."""

    manifest: str
    """SHA-256 of the manifest, which has the SHA-256 of every other file; empty without a manifest."""
    files: str
    """SHA-256 of names, sizes and times of all files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBundle:
    """The present state of a bundle's folder."""

    fingerprint: Fingerprint | None
    """None if the folder cannot be read."""
    problem: str | None = None
    """Reason why it is incomplete, if so: it may still be copied."""


def list_store(store: Path, known: Mapping[str, Fingerprint]) -> dict[str, ListedBundle]:
    """Returns every bundle's folder, with or without a manifest, by its path in the store, `<model>/<version>`.

    A model's unreadable folder is listed as `<model>`, with the problem.

    Args:
        store: Folder of the store.
        known: Fingerprints by path of bundles that need no further check; these have no problem.

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
    """Yields every file in a folder by its relative path."""
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
    except FileNotFoundError:  # a broken link, or removed meanwhile
        return entry.stat(follow_symlinks=False)


def _problem(folder: Path) -> str | None:
    """Returns the reason why a bundle is incomplete, by names and sizes; None if it may be loaded."""
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
            return f"{name} has {found.st_size} of the {expected.size_bytes} bytes in the manifest"
    return None
