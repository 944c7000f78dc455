"""Downloads public data sets: checked by SHA-256, resumed where they were cut off, put in place whole."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headway_training.data.datasets import Dataset, RemoteFile
from headway_training.errors import DownloadError

TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16
_SCHEMES = ("http", "https", "file")
_RANGE_NOT_SATISFIABLE = 416


def download_dataset(dataset: Dataset, data_dir: Path, console: Console, *, mirror: str | None = None) -> Path:
    """Brings the files of a data set into its folder below `data_dir`; whole files that are there are kept.

    Args:
        dataset: The data set.
        data_dir: The folder of the data sets.
        console: Where progress is shown.
        mirror: Where to take `<folder>/<file>` from, instead of each file's public home.

    Returns:
        The data set's folder.

    Raises:
        DownloadError: A file cannot be had, or has another checksum; nothing wrong is left behind.
    """
    folder = data_dir / dataset.folder
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for file in dataset.files:
            url = f"{mirror.rstrip('/')}/{dataset.folder}/{file.name}" if mirror else file.url
            _bring(file, url, folder / file.name, progress)
    return folder


def _bring(file: RemoteFile, url: str, target: Path, progress: Progress) -> None:
    """Downloads one file to `<name>.part`, checks it, and renames it into place."""
    if target.is_file() and file_sha256(target) == file.sha256:
        progress.console.print(f"{target.name} is there and whole", highlight=False)
        return
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part, progress)
    except (OSError, HTTPException, ValueError) as error:
        raise DownloadError(
            f"{url} cannot be downloaded: {_reason(error)}. Try again: what came so far is kept and continued. "
            f"Or put the file at {target} yourself"
        ) from error
    found = file_sha256(part)
    if found != file.sha256:
        part.unlink()
        raise DownloadError(
            f"{url} has SHA-256 {found}; expected {file.sha256}. It was removed: the source has changed, or the "
            "download was damaged"
        )
    part.replace(target)


def _reason(error: Exception) -> str:
    """The cause in words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__


def _fetch(url: str, part: Path, progress: Progress) -> None:
    """Downloads a URL to a file, from where an earlier attempt left it."""
    if urllib.parse.urlsplit(url).scheme not in _SCHEMES:
        raise ValueError(f"the URL must begin with one of {', '.join(_SCHEMES)}")
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "headway-train"})  # noqa: S310 (scheme checked above)
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310 (as above)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == _RANGE_NOT_SATISFIABLE:
                return  # the part is whole already; its checksum is about to be looked at
        raise
    with response:
        resumed = have > 0 and response.status == 206
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        task = progress.add_task(part.name.removesuffix(".part"), total=total, completed=have if resumed else 0)
        with part.open("ab" if resumed else "wb") as out:
            received = have if resumed else 0
            while chunk := response.read(_CHUNK_BYTES):
                out.write(chunk)
                received += len(chunk)
                progress.update(task, completed=received)
    if total is not None and received != total:
        raise OSError(f"the connection ended after {received:,} of {total:,} bytes")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as content:
        return _digest(content)


def _digest(content: IO[bytes]) -> str:
    return hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]  # IO[bytes] is a readable file
