"""Phrases in growing texts, against a search through the whole text at every step."""

import random

import pytest

from headway_server.decoding.beam_search.rules import ROOT, PhraseAutomaton, SearchRules
from headway_server.decoding.parameters import SearchParameters

TOKENS = range(3)  # few, so that phrases overlap


def random_phrases(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.choices(TOKENS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5)))


def ends_with(text: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return text[len(text) - len(phrase) :] == phrase if len(phrase) <= len(text) else False


def appears(text: tuple[int, ...], phrase: tuple[int, ...]) -> bool:
    return any(ends_with(text[:stop], phrase) for stop in range(len(text) + 1))


def longest_begun(text: tuple[int, ...], phrases) -> int:
    return max((n for phrase in phrases for n in range(1, len(phrase)) if ends_with(text, phrase[:n])), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_an_automaton_finds_what_a_search_through_the_text_finds(seed):
    rng = random.Random(seed)
    phrases = random_phrases(rng)
    automaton = PhraseAutomaton(phrases)
    some = [number for number in range(len(phrases)) if rng.random() < 0.6]
    node, text = ROOT, ()
    for _ in range(60):
        assert automaton.ending(node) == sum(1 << n for n, phrase in enumerate(phrases) if ends_with(text, phrase))
        completing = {token for token in TOKENS if any(ends_with((*text, token), phrase) for phrase in phrases)}
        assert automaton.completing(node) == completing
        chosen = [phrases[number] for number in some]
        bits = sum(1 << number for number in some)
        assert automaton.num_begun(node, bits) == longest_begun(text, chosen)
        continuing = {
            token
            for token in TOKENS
            if any(ends_with((*text, token), phrase[:n]) for phrase in chosen for n in range(1, len(phrase) + 1))
        }
        assert automaton.continuing(node, bits) == continuing
        token = rng.choice(TOKENS)
        text, node = (*text, token), automaton.follow(node, token)


@pytest.mark.parametrize("seed", range(30))
def test_rules_know_what_may_follow_and_how_much_is_met(seed):
    rng = random.Random(seed)
    size = rng.choice([0, 1, 2, 3])
    required, forbidden = random_phrases(rng), random_phrases(rng)
    rules = SearchRules.of(
        SearchParameters(no_repeat_ngram_size=size, required_phrases=required, forbidden_phrases=forbidden)
    )
    state, text = rules.start(), ()
    for _ in range(30):
        met = [phrase for phrase in required if appears(text, phrase)]
        unmet = [phrase for phrase in required if not appears(text, phrase)]
        assert rules.num_met(state) == len(met)
        assert rules.may_end(state) == (not unmet)
        assert rules.bank(state) == sum(map(len, met)) + longest_begun(text, unmet)
        assert 0 <= rules.bank(state) < rules.num_banks
        ngrams = {text[start : start + size] for start in range(len(text) - size + 1)} if size else set()
        banned = {
            token
            for token in TOKENS
            if any(ends_with((*text, token), phrase) for phrase in forbidden)
            or (size and (*text, token)[-size:] in ngrams)
        }
        assert rules.banned(state) == banned
        token = rng.choice(TOKENS)
        text, state = (*text, token), rules.follow(state, token)


def test_no_rules_are_none():
    assert SearchRules.of(SearchParameters(beam_size=4, prefix_ids=(3,))) is None
