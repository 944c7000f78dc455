"""The server starts itself anew where that gets it huge pages, and only there."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such setting")

_PROGRAM = """
import os, pathlib, sys
import headway_server.__main__ as program
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], flush=True)
program._PAGES = pathlib.Path(sys.argv[1])
program._take_huge_pages()
print("serves")
"""


def run(pages: Path, **environment: str) -> list[str]:
    """Runs a program that begins as the server does; returns what it prints."""
    command = [sys.executable, "-c", _PROGRAM, str(pages), "--flag"]
    kept = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    ended = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True, timeout=60)
    return ended.stdout.splitlines()


@pytest.fixture
def pages(tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n", encoding="ascii")
    return file


def test_a_server_starts_anew_once_with_its_arguments_in_the_same_process(pages):
    first, second, end = run(pages)
    process, arguments = first.split()[0], str([str(pages), "--flag"])
    assert first == f"{process} None {arguments}"
    assert second == f"{process} glibc.malloc.hugetlb=1 {arguments}"
    assert end == "serves"


def test_tunables_that_the_operator_has_set_stay(pages):
    first, end = run(pages, GLIBC_TUNABLES="glibc.malloc.check=0")
    assert "glibc.malloc.check=0" in first
    assert end == "serves"


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]"])
def test_a_server_does_not_start_anew_where_huge_pages_are_not_asked_for(pages, setting):
    pages.write_text(setting, encoding="ascii")
    assert len(run(pages)) == 2


def test_a_server_starts_where_the_setting_cannot_be_read(tmp_path):
    assert len(run(tmp_path / "nothing")) == 2
