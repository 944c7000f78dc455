"""Downloads public data sets, each file checked by its SHA-256 and put in place whole."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pooch
from rich.console import Console

from headway_training.data.public import Dataset, RemoteFile
from headway_training.errors import DownloadError

TIMEOUT_S = 30.0
_SCHEMES = ("http", "https", "file")


def download_dataset(dataset: Dataset, data_dir: Path, console: Console, *, mirror: str | None = None) -> Path:
    """Brings the files of a data set into its folder below `data_dir`; files that are there already are checked.

    Args:
        dataset: The data set.
        data_dir: The folder of the data sets.
        console: Where progress is shown.
        mirror: Where to take `<folder>/<file>` from, instead of each file's public home.

    Returns:
        The data set's folder.

    Raises:
        DownloadError: A file cannot be downloaded, or has another checksum; nothing wrong is left behind.
    """
    folder = data_dir / dataset.folder
    for file in dataset.files:
        url = f"{mirror.rstrip('/')}/{dataset.folder}/{file.name}" if mirror else file.url
        if url:
            fetch(file, url, folder, console)
        else:
            _check_made(folder / file.name, file, console)
    return folder


def fetch(file: RemoteFile, url: str, folder: Path, console: Console) -> None:
    """Brings a file into a folder, unless it is there already; a checksum that there is has to be its own.

    Raises:
        DownloadError: It cannot be downloaded, or has another checksum; nothing wrong is left behind.
    """
    pooch.get_logger().setLevel(logging.WARNING)  # pooch asks for a logger of its own
    console.print(f"{file.name} from {url}", highlight=False)
    known = f"sha256:{file.sha256}" if file.sha256 else None
    try:
        pooch.retrieve(url, known, fname=file.name, path=folder, downloader=_downloader(url, console))
    except (OSError, ValueError) as error:  # those of requests are OSErrors, and a wrong checksum is a ValueError
        raise DownloadError(
            f"{url} cannot be downloaded: {error}. Try again, or put the file at {folder / file.name} yourself"
        ) from error


def _check_made(path: Path, file: RemoteFile, console: Console) -> None:
    """Checks that a file is there which is made on the user's machine.

    Raises:
        DownloadError: It is not.
    """
    if not path.is_file():
        raise DownloadError(
            f"{file.name} is made from other data: make it with `headway-train make-data {file.maker}`, or name a "
            f"--mirror that has it; the SHA-256 of that which figures were measured on is {file.sha256}"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    note = "" if digest == file.sha256 else ", and is another than that which the recipes' figures were measured on"
    console.print(f"{file.name} is there{note}", highlight=False)


def _downloader(url: str, console: Console) -> Any:
    """Chooses pooch's downloader for a URL.

    Raises:
        ValueError: The URL is of another kind than http, https and file.
    """
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise ValueError(f"the URL must begin with one of {', '.join(_SCHEMES)}")
    return _copy if scheme == "file" else pooch.HTTPDownloader(progressbar=console.is_terminal, timeout=TIMEOUT_S)


def _copy(url: str, output_file: str, _pooch: object) -> None:
    """Takes a file from a folder."""
    shutil.copyfile(url2pathname(urlsplit(url).path), output_file)
