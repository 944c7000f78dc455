"""The prefix cache's bookkeeping against a plain dictionary of prefixes."""

import random

import numpy as np

from headway_server.decoding.core.prefill import PrefixCache
from headway_server.decoding.interfaces import Block, PromptMedia, steps_of

CHUNK = 4


def keep(cache: PrefixCache, tokens: np.ndarray) -> list[int | None]:
    return [cache.reserve(digest) for digest in cache.digests(tokens)]


def found(cache: PrefixCache, tokens: np.ndarray) -> list[int]:
    return cache.look_up(cache.digests(tokens), len(tokens))[0]


def test_a_prompt_finds_the_whole_chunks_it_shares_with_an_earlier_one():
    cache = PrefixCache(capacity=8, chunk=CHUNK)
    places = keep(cache, np.arange(14))  # three whole chunks and a rest
    assert len(places) == 3
    other = np.array([0, 1, 2, 3, 4, 5, 6, 7, 99, 98, 97, 96, 95])
    assert found(cache, other) == places[:2]
    assert cache.num_hit_tokens == 8
    assert cache.num_looked_up_tokens == 13


def test_the_last_token_is_always_left_to_read():
    cache = PrefixCache(capacity=8, chunk=CHUNK)
    places = keep(cache, np.arange(8))
    assert found(cache, np.arange(8)) == places[:1]
    assert found(cache, np.arange(9)) == places


def test_equal_tokens_after_another_beginning_are_another_chunk():
    cache = PrefixCache(capacity=8, chunk=CHUNK)
    keep(cache, np.array([1, 1, 1, 1, 5, 6, 7, 8]))
    assert found(cache, np.array([2, 2, 2, 2, 5, 6, 7, 8, 9])) == []


def test_what_is_kept_is_not_given_a_second_place():
    cache = PrefixCache(capacity=8, chunk=CHUNK)
    keep(cache, np.arange(8))
    assert keep(cache, np.arange(8)) == [None, None]


def test_the_least_recently_used_gives_way_and_a_parent_outlives_its_children():
    cache = PrefixCache(capacity=2, chunk=CHUNK)
    parent, _ = keep(cache, np.arange(8))
    assert len(found(cache, np.arange(9))) == 2
    keep(cache, np.full(4, 77))
    assert found(cache, np.arange(9)) == [parent]


def test_where_the_last_chunk_stands_for_all_it_is_found_alone():
    cache = PrefixCache(capacity=2, chunk=CHUNK, needs_all=False)
    places = keep(cache, np.arange(12))  # the first is replaced by the third
    assert cache.look_up(cache.digests(np.arange(13)), 13) == ([places[2]], 12)
    assert cache.look_up(cache.digests(np.arange(12)), 12) == ([places[1]], 8)
    assert cache.look_up(cache.digests(np.arange(8)), 8) == ([], 0)
    assert cache.num_hit_tokens == 20


def test_without_places_nothing_is_kept_or_found():
    cache = PrefixCache(capacity=0, chunk=CHUNK)
    assert keep(cache, np.arange(12)) == []
    assert found(cache, np.arange(12)) == []


def test_any_history_finds_only_what_was_written_there():
    rng = random.Random(5)
    cache = PrefixCache(capacity=6, chunk=CHUNK)
    memory: dict[int, tuple[int, ...]] = {}  # place to the prompt's tokens up to the end of the chunk there
    for step in range(4000):
        tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 20))])
        for index, place in enumerate(found(cache, tokens)):
            assert memory[place] == tuple(tokens[: (index + 1) * CHUNK])
        for index, place in enumerate(keep(cache, tokens)):
            if place is not None:
                memory[place] = tuple(tokens[: (index + 1) * CHUNK])
        if step % 500 == 499:
            cache.clear()
            assert found(cache, tokens) == []


def test_prompts_of_different_salts_share_nothing():
    cache, tokens = PrefixCache(capacity=8, chunk=CHUNK), np.arange(14)
    chains = [cache.digests(tokens, salt) for salt in ("", "one", "other", "one")]
    assert chains[1] == chains[3]
    assert len({digest for chain in chains for digest in chain}) == 9


def media_of(*blocks):
    return PromptMedia(np.zeros(0, np.int64), (), (), None, tuple(Block(*block) for block in blocks))


def test_no_prompt_goes_on_within_tokens_that_attend_to_each_other():
    cache, tokens = PrefixCache(capacity=8, chunk=CHUNK), np.arange(18)
    assert len(cache.digests(tokens, media=media_of((2, 10)))) == 4
    assert len(cache.digests(tokens, media=media_of((14, 18)))) == 3
    assert cache.digests(tokens, media=media_of((0, 18))) == []
    for digest in cache.digests(tokens, media=media_of((2, 10)))[:2]:
        cache.reserve(digest)
    digests = cache.digests(tokens, media=media_of((2, 10)))
    assert cache.look_up(digests, 18, media_of((2, 10))) == ([], 0)
    cache.reserve(digests[2])
    assert cache.look_up(digests, 18, media_of((2, 10)))[1] == 12


def test_a_chunk_within_a_block_is_another_where_the_block_goes_on_in_another_way():
    cache, tokens = PrefixCache(capacity=8, chunk=CHUNK), np.arange(18)
    other = np.where(tokens == 9, 99, tokens)
    chains = [
        cache.digests(ids, media=media_of(block)) for ids in (tokens, other) for block in ((2, 6), (2, 9), (2, 10))
    ]
    assert len({chain[0] for chain in chains}) == 4  # the last token is beyond two of the blocks
    assert chains[0][0] != cache.digests(tokens)[0]


def test_steps_end_with_chunks_and_blocks():
    media = media_of((2, 10), (13, 14), (14, 20))
    steps = [(0, 2), (2, 10), (10, 12), (12, 13), (13, 14), (14, 20), (20, 24), (24, 25)]
    assert list(steps_of(25, CHUNK, media)) == steps
    assert list(steps_of(6, CHUNK, None)) == [(0, 4), (4, 6)]
    assert list(steps_of(6, CHUNK, media_of((0, 6)))) == [(0, 6)]
