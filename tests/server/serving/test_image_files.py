"""Prepared images that several processes keep together: one copy, one bound, and one time without use for all."""

import subprocess
import sys

import pytest

from headway_server.errors import OverloadedError
from headway_server.serving.image_files import ImageFiles

KEY = b"k" * 32
PAGE = 4096


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> int:
        return round(self.seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def both(tmp_path, clock) -> tuple[ImageFiles, ImageFiles]:
    """A folder as two processes see it."""
    one, other = (ImageFiles(tmp_path, max_mib=1, ttl_s=60, num_processes=2, now=clock) for _ in range(2))
    return one, other


def image(size: int, letter: bytes = b"x") -> tuple[bytes, bytes]:
    return letter * size, KEY


async def test_an_image_that_one_keeps_is_written_once_and_found_by_all_with_its_key(both, tmp_path):
    one, other = both
    await one.put({"a": image(5000)})
    [file] = [path for path in tmp_path.iterdir() if path.name != "lock"]
    written = file.stat().st_ino
    await other.put({"a": image(5000)})
    assert file.stat().st_ino == written
    assert await other.find(["a", "b", "a"]) == {"a": image(5000)}
    assert [store.usage().num_bytes for store in both] == [PAGE, PAGE], "each tells its part of two pages"
    assert (other.usage().num_hits, other.usage().num_misses) == (1, 1)


async def test_a_use_in_one_process_keeps_an_image_for_all_and_what_has_expired_is_found_by_none(both, clock, tmp_path):
    one, other = both
    await one.put({"used": image(10), "unused": image(10)})
    for _ in range(3):
        clock.seconds += 50
        assert await other.find(["used"]) == {"used": image(10)}
    assert await one.find(["used", "unused"]) == {"used": image(10)}
    other.forget_expired()
    assert len(list(tmp_path.iterdir())) == 2, "the image that is used, and the lock"
    assert one.usage().num_bytes == PAGE // 2


@pytest.mark.parametrize("size", [1, 100_000, 2**20 - PAGE])
async def test_the_bound_holds_for_all_together_and_the_longest_unused_go_first(both, clock, tmp_path, size):
    names = [f"image {number}" for number in range(600)]
    for number, name in enumerate(names):
        clock.seconds += 0.001
        await both[number % 2].put({name: image(size)})
    found = list(await both[0].find(names))
    assert found == names[-len(found) :]
    assert len(found) >= 2**20 // both[0].room(size) * 14 // 16
    kept = [path for path in tmp_path.iterdir() if path.name != "lock"]
    assert sum(both[0].room(path.stat().st_size - len(KEY)) for path in kept) <= 2**20
    assert both[1].usage().num_bytes * 2 == len(kept) * both[0].room(size)


async def test_all_images_of_one_call_are_kept_where_they_fit(both):
    images = {f"image {number}": image(15_000) for number in range(64)}
    await both[0].put({"before": image(500_000)})
    await both[0].put(images)
    assert await both[1].find([*images]) == images


async def test_what_a_process_has_not_written_to_its_end_is_found_by_nobody_and_removed(both, tmp_path):
    await both[0].put({"a": image(10)})
    [file] = [path for path in tmp_path.iterdir() if path.name != "lock"]
    file.rename(file.with_suffix(".new"))
    assert await both[1].find(["a"]) == {}
    both[1].forget_expired()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


async def test_images_that_cannot_be_written_are_refused_with_the_reason(tmp_path):
    gone = ImageFiles(tmp_path / "gone", max_mib=1, ttl_s=60)
    with pytest.raises(
        OverloadedError, match=r"cannot be cached now \(No such file or directory\); send them with each"
    ):
        await gone.put({"a": image(10)})
    assert await gone.find(["a"]) == {}
    assert gone.usage().num_bytes == 0


WRITE = """
import asyncio, pathlib, sys
from headway_server.serving.image_files import ImageFiles

files = ImageFiles(pathlib.Path(sys.argv[1]), max_mib=1, ttl_s=60)
for number in range(40):
    asyncio.run(files.put({f"{sys.argv[2]}{number}": (b"x" * 50_000, b"k" * 32)}))
"""


def test_the_bound_holds_while_processes_write_at_the_same_time(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, tmp_path, letter]) for letter in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    files = ImageFiles(tmp_path, max_mib=1, ttl_s=60)
    kept = [path.stat().st_size - len(KEY) for path in tmp_path.iterdir() if path.name != "lock"]
    assert sum(map(files.room, kept)) == files.usage().num_bytes <= 2**20
    assert set(kept) == {50_000}
