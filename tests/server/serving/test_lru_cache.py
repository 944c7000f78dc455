"""What is kept: bounded in bytes and in time, the longest unused forgotten first."""

import asyncio

from headway_server.serving.lru_cache import LruCache


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_longest_unused_is_forgotten_past_the_bound():
    kept: LruCache[str, str] = LruCache("letters", max_bytes=10)
    for letter in "abc":
        assert kept.put(letter, letter, 4)
    assert [kept.get(letter) for letter in "abc"] == [None, "b", "c"]
    assert kept.get("b") == "b"
    kept.put("d", "d", 4)
    assert [kept.get(letter) for letter in "bcd"] == ["b", None, "d"]
    assert kept.usage() == ("letters", 8, 5, 2)
    assert not kept.put("b", "B", 11)
    assert kept.get("b") is None, "what is past the bound by itself takes the place of nothing"
    assert len(kept) == 1


def test_a_value_in_place_of_another_counts_once():
    kept: LruCache[str, int] = LruCache("numbers", max_bytes=10)
    kept.put("a", 1, 4)
    kept.put("a", 2, 6)
    assert (kept.get("a"), kept.usage().num_bytes) == (2, 6)


async def test_what_is_not_used_is_forgotten_and_use_keeps_it():
    clock = Clock()
    kept: LruCache[str, int] = LruCache("numbers", max_bytes=10, ttl_s=5, now=clock)
    kept.put("a", 1, 1)
    clock.now = 4
    kept.put("b", 2, 1)
    assert kept.get("a") == 1
    clock.now = 8.9
    assert (kept.get("b"), kept.get("a")) == (2, 1)
    clock.now = 13.95
    assert (kept.get("a"), kept.get("b"), kept.usage().num_bytes) == (None, None, 0)


async def test_what_has_expired_is_forgotten_though_nobody_asks():
    kept: LruCache[str, int] = LruCache("numbers", max_bytes=10, ttl_s=0.05)
    kept.put("a", 1, 1)
    await asyncio.sleep(0.02)
    kept.put("b", 2, 1)
    await asyncio.sleep(0.2)
    assert kept.usage().num_bytes == 0
