"""Finds the bundles of a store and opens them, checking every file against the manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final, TypeAlias

from pydantic import ValidationError

from headway_server.bundles.manifest import MANIFEST_FILE, NAME_PATTERN, SCHEMA_VERSION, SIGNATURE_FILE, Manifest
from headway_server.bundles.signing import TrustedKeys
from headway_server.errors import BundleError, StoreError

_BLOCK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 16 * 2**20
"""Room for a hundred thousand labels of a hundred characters."""
NAME: Final = re.compile(NAME_PATTERN)
"""Pattern of names of models and versions."""
VersionKey: TypeAlias = tuple[tuple[tuple[int, int, str], ...], str]
"""Sort key of a version: its parts, then the version itself as a tie-breaker."""
_STAGE, _END, _WORD, _NUMBER = range(4)
"""Kinds of a version's parts, in their order; the end is one of them."""
_STAGES: Final = {
    name: rank
    for rank, names in enumerate(("dev snapshot nightly", "alpha a", "beta b", "pre preview rc c"))
    for name in names.split()
}
"""Names of pre-releases, and their distance from the release."""
_VERSION_PARTS: Final = re.compile(
    r"(?:(?<![a-z])v)?(?P<number>\d+)"
    rf"|(?P<stage>(?<=\d)[abc](?=\d)|(?:{'|'.join(name for name in _STAGES if len(name) > 1)})(?![a-z]))"
    r"|(?P<word>[a-z]+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle with files checked against its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Returns the path of the bundle's file `name`."""
        return self.path / name

    def __repr__(self) -> str:
        return f"Bundle({self.manifest.name}/{self.manifest.version}, {self.manifest.task}, {self.path})"


def find_bundles(store: Path) -> list[Path]:
    """Returns the folders `<store>/<model>/<version>/`, with or without a manifest.

    Raises:
        StoreError: The store is missing or has no such folder.
    """
    if not store.is_dir():
        raise StoreError(f"store {store}: no such folder; make one with headway-export CHECKPOINT --store {store}")
    try:
        models = subfolders(store)
    except OSError as error:
        raise StoreError(f"store {store}: cannot be read ({error.strerror}); check its permissions") from error
    folders = [folder for model in sorted(models) for folder in _versions(model)]
    if not folders:
        raise StoreError(
            f"store {store}: has no bundle (<model>/<version>/{MANIFEST_FILE}); "
            f"make one with headway-export CHECKPOINT --store {store}"
        )
    return folders


def _versions(model: Path) -> list[Path]:
    """Returns the folders of a model's versions, the latest last.

    For an unreadable model it returns the model's folder, so that opening it raises the reason.
    """
    try:
        return sorted(subfolders(model), key=lambda folder: _version_key(folder.name))
    except OSError:
        return [model]


def subfolders(folder: Path) -> list[Path]:
    """Returns the subfolders with a valid name of a model or a version.

    Raises:
        OSError: It cannot be read.
    """
    return [below for below in folder.iterdir() if NAME.match(below.name) and below.is_dir()]


def _version_key(version: str) -> VersionKey:
    """Returns a key that orders versions; the largest is the latest.

    Numbers are compared as numbers in any position: 10 after 9 and v9, 1.10 after 1.9, rc10 after rc9. A
    pre-release, such as 1.0-rc1, 1.0.dev3 or 1.0b2 (PEP 440), is before its release; any other addition is after it.
    """
    parts: list[tuple[int, int, str]] = []
    for match in _VERSION_PARTS.finditer(version):
        if match["number"]:
            parts.append((_NUMBER, int(match["number"]), ""))
        elif match["stage"]:
            parts.append((_STAGE, _STAGES[match["stage"]], ""))
        else:
            parts.append((_WORD, 0, match["word"]))
    return (*parts, (_END, 0, "")), version


def path_key(path: str) -> tuple[str, VersionKey]:
    """Returns a key that orders bundles of the paths `<model>/<version>`: by model, the latest version last."""
    name, _, version = path.partition("/")
    return name, _version_key(version)


def open_bundle(path: Path, trusted: TrustedKeys | None = None) -> Bundle:
    """Opens and checks the bundle in the folder `path`.

    Args:
        path: Folder of the bundle.
        trusted: Trusted keys, one of which must have signed it; None: no signature required.

    Raises:
        BundleError: The manifest is missing or wrong, a file is missing, unlisted or changed, or a trusted signature is
            missing.
    """
    manifest = check_bundle(path, trusted)
    if (path.parent.name, path.name) != (manifest.name, manifest.version):
        raise BundleError(
            f"{path}: the manifest is of {manifest.name}/{manifest.version}; name the folders so or export it again"
        )
    return Bundle(path=path, manifest=manifest)


def check_bundle(path: Path, trusted: TrustedKeys | None = None) -> Manifest:
    """Checks the bundle in the folder `path` regardless of the folder's name, and returns its manifest.

    Raises:
        BundleError: As `open_bundle`, except for the names of the folders.
    """
    manifest = read_manifest(path, trusted)
    _check_files(path, manifest)
    return manifest


def read_manifest(path: Path, trusted: TrustedKeys | None = None) -> Manifest:
    """Reads the manifest of the bundle in the folder `path`.

    Raises:
        BundleError: It is missing, is not JSON, does not follow the schema, or has no trusted signature.
    """
    file = path / MANIFEST_FILE
    try:
        _check_manifest_file(file)
        data = file.read_bytes()
        if trusted is not None:
            trusted.check(path, data)
        content = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path}: {MANIFEST_FILE} is missing; export the model again") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise BundleError(f"{file}: cannot be read as JSON ({error}); export the model again") from error
    schema_version = content.get("schema_version") if isinstance(content, dict) else None
    if schema_version != SCHEMA_VERSION:
        raise BundleError(
            f"{file}: schema_version is {schema_version!r}, this server reads {SCHEMA_VERSION}; "
            "export the model again with a matching headway-export"
        )
    try:
        return Manifest.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise BundleError(f"{file}: {where}: {first['msg']}; export the model again") from error


def _check_manifest_file(file: Path) -> None:
    """Checks type and size of the manifest file before it is read.

    Raises:
        BundleError: It is too large, or not a regular file, so that reading might never end.
        OSError: It is missing or inaccessible.
    """
    status = file.stat()
    if not S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        raise BundleError(f"{file}: is not a file; export the model again")
    if status.st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{file}: has {status.st_size:,} bytes, a manifest at most {_MAX_MANIFEST_BYTES:,}")


def _check_files(path: Path, manifest: Manifest) -> None:
    listed = set(manifest.files)
    if odd := sorted(entry.name for entry in path.rglob("*") if not entry.is_file() and not entry.is_dir()):
        raise BundleError(f"{path}: {odd[0]} is neither a file nor a folder; remove it")
    found = {file.relative_to(path).as_posix() for file in _files_below(path)} - {MANIFEST_FILE, SIGNATURE_FILE}
    if missing := sorted(listed - found):
        raise BundleError(f"{path}: {missing[0]} is missing; export the model again")
    if unlisted := sorted(found - listed):
        raise BundleError(f"{path}: {unlisted[0]} is not in the manifest; remove it or export the model again")
    for name, expected in manifest.files.items():
        file = path / name
        size = file.stat().st_size
        if size != expected.size_bytes:
            raise BundleError(
                f"{path}: {name} has {size} bytes, the manifest says {expected.size_bytes}; it is damaged: "
                "copy the bundle again or export the model again"
            )
        if (digest := sha256_of(file)) != expected.sha256:
            raise BundleError(
                f"{path}: {name} has SHA-256 {digest[:12]}…, the manifest says {expected.sha256[:12]}…; it was changed "
                "or is damaged: copy the bundle again or export the model again"
            )


def _files_below(path: Path) -> Iterator[Path]:
    """Yields every file in a folder; a link to outside is an error.

    Raises:
        BundleError: There is such a link.
    """
    home = path.resolve()
    for file in path.rglob("*"):
        if file.is_symlink() and not file.resolve().is_relative_to(home):
            name = file.relative_to(path).as_posix()
            raise BundleError(f"{path}: {name} is a link that leads out of the bundle; copy the file there")
        if file.is_file():
            yield file


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
