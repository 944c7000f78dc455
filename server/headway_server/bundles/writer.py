"""Atomic writing of bundles: into a temporary folder, which is then renamed."""

from __future__ import annotations

import json
from pathlib import Path

from headway_server.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE, BundleFile, Manifest
from headway_server.bundles.reader import Bundle, check_bundle, sha256_of
from headway_server.bundles.staging import aside_of, remove_folder
from headway_server.errors import BundleError


def describe_files(folder: Path) -> dict[str, BundleFile]:
    """Returns sizes and hashes of every file in `folder` except for the manifest and its signature."""
    return {
        file.relative_to(folder).as_posix(): describe_file(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file not in (folder / MANIFEST_FILE, folder / SIGNATURE_FILE)
    }


def describe_file(file: Path) -> BundleFile:
    """Returns size and hash of a file."""
    return BundleFile(sha256=sha256_of(file), size_bytes=file.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `bundle.json` into `folder`."""
    content = manifest.model_dump(mode="json", exclude_none=False)
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def find_place(store: Path, name: str, version: str, *, replace: bool = False) -> Path:
    """Returns the folder of a version that is to be published.

    Raises:
        BundleError: The version exists and `replace` is not set.
    """
    target = store / name / version
    if target.exists() and not replace:
        raise BundleError(f"{target}: exists already; choose another --version or pass --replace")
    return target


def publish(staged: Path, store: Path, *, replace: bool = False) -> Bundle:
    """Checks the bundle in the folder `staged` and renames it to `<store>/<name>/<version>/`.

    Raises:
        BundleError: The bundle is incomplete, or the version exists and `replace` is not set.
    """
    manifest = check_bundle(staged)
    target = find_place(store, manifest.name, manifest.version, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.chmod(0o755)  # a temporary folder is private; bundles are readable by everyone
    aside = aside_of(staged)
    try:
        if target.exists():
            target.rename(aside)
        staged.rename(target)
    except BaseException:  # the process may be told to end between the two
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    remove_folder(aside)
    return Bundle(path=target, manifest=manifest)
