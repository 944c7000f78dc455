"""Downloads: checked and put in place whole; from a local server and from a folder, never from the real homes."""

import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headway_training.cli import app
from headway_training.data import Dataset, RemoteFile, find_dataset
from headway_training.data.download import download_dataset
from headway_training.errors import DownloadError

CONTENT = bytes(range(256)) * 1000


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT at /f/whole, and half of it at /f/cut."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if not self.path.startswith("/f/"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2 if self.path == "/f/cut" else None])

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Handler.paths = []
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def dataset(url: str, content: bytes = CONTENT) -> Dataset:
    file = RemoteFile(name="f.bin", url=url, sha256=hashlib.sha256(content).hexdigest())
    return Dataset(
        name="x",
        task="generation",
        folder="x",
        title="X",
        files=(file,),
        license="none",
        home="nowhere",
        read=lambda *_: pytest.fail("nothing is read"),
    )


def download(data: Dataset, folder: Path, mirror: str | None = None) -> Path:
    return download_dataset(data, folder, Console(quiet=True), mirror=mirror)


def test_a_file_is_downloaded_and_kept(server, tmp_path):
    folder = download(dataset(f"{server}/f/whole"), tmp_path)
    assert (folder / "f.bin").read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == ["f.bin"]
    download(dataset(f"{server}/f/whole"), tmp_path)
    assert len(Handler.paths) == 1  # the second time nothing is asked for


def test_a_download_that_is_cut_off_leaves_nothing(server, tmp_path):
    with pytest.raises(DownloadError, match="cannot be downloaded"):
        download(dataset(f"{server}/f/cut"), tmp_path)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_wrong_checksum_is_an_error_and_leaves_nothing(server, tmp_path):
    with pytest.raises(DownloadError, match=r"SHA256 hash of downloaded file .* does not match the known hash"):
        download(dataset(f"{server}/f/whole", b"something else"), tmp_path)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_damaged_file_on_disk_is_replaced(server, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "f.bin").write_bytes(CONTENT[:-1])
    download(dataset(f"{server}/f/whole"), tmp_path)
    assert (tmp_path / "x" / "f.bin").read_bytes() == CONTENT


def test_a_missing_file_is_an_error_that_says_so(server, tmp_path):
    with pytest.raises(DownloadError, match="cannot be downloaded: 404"):
        download(dataset(f"{server}/nothing"), tmp_path)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "x"])
def test_a_url_of_another_kind_is_refused(tmp_path, url):
    with pytest.raises(DownloadError, match="must begin with one of http, https, file"):
        download(dataset(url), tmp_path)


def test_a_file_that_is_made_here_is_looked_for_where_it_lies(tmp_path):
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = RemoteFile(name="emoji/made.tar.gz", url="", sha256=digest, maker="emoji")
    data = dataclasses.replace(find_dataset("pictures"), files=(file,))
    with pytest.raises(
        DownloadError, match=r"made\.tar\.gz is made .* `headway-train make-data emoji`, or .*" + digest
    ):
        download(data, tmp_path)
    (tmp_path / "emoji").mkdir()
    (tmp_path / "emoji" / "made.tar.gz").write_bytes(CONTENT)
    assert download(data, tmp_path) == tmp_path


def test_a_folder_serves_as_a_mirror(tmp_path):
    mirror = tmp_path / "mirror" / "x"
    mirror.mkdir(parents=True)
    (mirror / "f.bin").write_bytes(CONTENT)
    download(dataset("https://unused.invalid"), tmp_path / "data", mirror=mirror.parent.as_uri())
    assert (tmp_path / "data" / "x" / "f.bin").read_bytes() == CONTENT
    with pytest.raises(DownloadError, match="cannot be downloaded"):
        download(dataset("https://unused.invalid"), tmp_path / "other", mirror=(tmp_path / "none").as_uri())


def test_the_command_names_a_misspelt_data_set_and_a_failed_download(tmp_path):
    wrong = CliRunner().invoke(app, ["data", "ag-mews"])
    assert wrong.exit_code == 1
    assert "did you mean 'ag-news'?" in wrong.output
    folder = tmp_path / "empty"
    folder.mkdir()
    arguments = ["data", "ag-news", "--data-dir", str(tmp_path), "--mirror", folder.as_uri()]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1
    assert "cannot be downloaded" in failed.output
