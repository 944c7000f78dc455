"""Drafts by looking up: held against a search through the whole text, and quiet where they are refused."""

import numpy as np
import pytest

from headway_server.decoding.speculation.drafting import LONG_MATCH, LONGEST_PAUSE, MIN_MATCH, PromptLookup


def naive_draft(token_ids: list[int], num_tokens: int) -> list[int] | None:
    """Searches backwards for where the last tokens stood before, the longer run first."""
    for length in (LONG_MATCH, MIN_MATCH):
        run = token_ids[-length:]
        for end in range(len(token_ids) - 1, length - 1, -1):
            if len(run) == length and token_ids[end - length : end] == run:
                draft = list(token_ids)
                while len(draft) < len(token_ids) + num_tokens:
                    draft.append(draft[end + len(draft) - len(token_ids)])
                return draft[len(token_ids) :]
    return None


def as_list(draft):
    return None if draft is None else draft.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_drafts_equal_a_search_through_the_text_whenever_they_are_asked_for(seed):
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, 3, rng.integers(1, 20)).tolist()
    lookup = PromptLookup(token_ids)
    num_found = 0
    for _ in range(150):
        if rng.random() < 0.5:
            num_tokens = int(rng.integers(1, 9))
            expected = naive_draft(token_ids, num_tokens)
            assert as_list(lookup.draft(num_tokens)) == expected
            num_found += expected is not None
        token_ids.append(int(rng.integers(0, 3)))
        lookup.append(token_ids[-1])
    assert num_found > 20


def test_a_copied_passage_is_drafted_as_it_goes_on():
    lookup = PromptLookup([*range(100, 140), 7, 100, 101, 102])
    assert as_list(lookup.draft(5)) == [103, 104, 105, 106, 107]


def test_of_two_places_the_one_with_more_in_common_is_taken():
    long_ago, lately = [1, 2, 3, 4, 5, 6, 70], [9, 4, 5, 6, 80]
    assert as_list(PromptLookup([*long_ago, *lately, 1, 2, 3, 4, 5, 6]).draft(1)) == [70]
    assert as_list(PromptLookup([*long_ago, *lately, 0, 4, 5, 6]).draft(1)) == [80]


def test_a_repetition_goes_on_past_the_end_of_the_text():
    assert as_list(PromptLookup([5, 1, 2, 1, 2, 1, 2]).draft(5)) == [1, 2, 1, 2, 1]
    assert as_list(PromptLookup([8, 8, 8, 8]).draft(3)) == [8, 8, 8]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6, 7]])
def test_nothing_is_drafted_where_nothing_stood_before(token_ids):
    assert PromptLookup(token_ids).draft(4) is None


def drafts_of(lookup: PromptLookup, num_tokens: int, num_accepted: int) -> list[int]:
    """Adds tokens that repeat themselves, and returns at which of them there was a draft; it fares as told."""
    places = []
    for place in range(num_tokens):
        if lookup.draft(5) is not None:
            places.append(place)
            lookup.settle(5, num_accepted)
        lookup.append(8)
    return places


def test_refused_drafts_come_ever_more_rarely_but_do_not_end():
    places = drafts_of(PromptLookup([8] * 10), 1000, num_accepted=0)
    gaps = np.diff(places).tolist()
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_PAUSE
    assert len(places) < 25


def test_accepted_drafts_come_at_every_token_and_end_a_pause():
    lookup = PromptLookup([8] * 10)
    drafts_of(lookup, 500, num_accepted=0)
    drafts_of(lookup, 500, num_accepted=5)
    assert drafts_of(lookup, 50, num_accepted=5) == list(range(50))


def test_it_counts_what_was_drafted_and_accepted():
    lookup = PromptLookup([8] * 10)
    lookup.settle(5, 3)
    lookup.settle(5, 0)
    assert (lookup.num_drafted, lookup.num_accepted) == (10, 3)
    assert "3 of 10" in repr(lookup)


def test_memory_follows_the_length_of_the_text():
    lookup = PromptLookup(range(1000))
    lookup.draft(1)
    for token_id in np.random.default_rng(0).integers(0, 50, 1000).tolist():
        lookup.append(token_id)
        lookup.draft(1)
    assert len(lookup._ends) <= 2 * 2000
