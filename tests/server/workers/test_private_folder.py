"""The folder that the processes of a server share: nobody else reads it, and it is gone with them."""

import os
import time
from pathlib import Path

import pytest

from headway_server.errors import ServerError
from headway_server.workers import folder as folders
from headway_server.workers.folder import lock_folder, private_folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where folders are made: in place of /dev/shm, and for temporary files."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(folders, "_IN_MEMORY", memory)
    monkeypatch.setattr(folders, "_MOST_LETTERS", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return memory, temporary


def test_only_its_user_reads_it_and_nothing_is_left_of_it(places):
    memory, _ = places
    with private_folder(1000) as folder:
        assert folder.parent == memory
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "images" / "one").touch()
    assert list(memory.iterdir()) == []


def test_it_lies_among_temporary_files_where_memory_has_no_room(places):
    with private_folder(2**60) as folder:
        assert folder.parent == places[1]


def test_it_lies_in_memory_all_the_same_where_there_is_no_other_place(places, monkeypatch):
    memory, temporary = places
    temporary.rmdir()
    with private_folder(2**60) as folder:
        assert folder.parent == memory
    memory.rmdir()
    with (
        pytest.raises(ServerError, match=r"need a folder, and neither .* set TMPDIR"),
        private_folder(0),
    ):
        pass


def test_one_that_nobody_holds_any_more_is_removed_by_the_next_server_and_no_other_is(places):
    memory, _ = places
    names = ("headway-server-workers-held", "headway-server-workers-left", "headway-server-workers-new", "of-another")
    for name in names:
        (memory / name / "images").mkdir(parents=True)
        if name != names[2]:
            os.utime(memory / name, (time.time() - 100,) * 2)
    lock = lock_folder(memory / names[0])
    with private_folder(1000):
        assert {path.name for path in memory.iterdir()} > {names[0], names[2], names[3]}
        assert not (memory / names[1]).exists()
    os.close(lock)
