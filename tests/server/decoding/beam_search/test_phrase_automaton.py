"""Phrases in growing texts, against a search through the whole text at every step."""

import random

import numpy as np
import pytest

from headway_server.decoding.beam_search.rules import ROOT, PhraseAutomaton, required_phrases, search_rule
from headway_server.decoding.parameters import SearchParameters
from headway_server.decoding.rules import TokenRule, unpack

TOKENS = range(3)  # few, so that phrases overlap
END = 31


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


def forbidden(rule: TokenRule) -> set[int]:
    """The tokens of `TOKENS` and the end that may not follow."""
    mask = np.full(1, -1, np.int32)
    rule.allow(mask, np.zeros(32, np.float32))
    return set(np.flatnonzero(~unpack(mask)).tolist())


@pytest.mark.parametrize("seed", range(30))
def test_rules_know_what_may_follow_and_how_much_is_met(seed):
    rng = random.Random(seed)
    size, least = rng.choice([0, 1, 2, 3]), rng.choice([0, 4])
    phrases, banned = random_phrases(rng), random_phrases(rng)
    prefix = random_phrases(rng)[0] if rng.random() < 0.5 else ()
    parameters = SearchParameters(
        no_repeat_ngram_size=size,
        required_phrases=phrases,
        forbidden_phrases=banned,
        min_new_tokens=least,
        prefix_ids=prefix,
    )
    rule, required, text = search_rule(parameters, END), required_phrases(parameters, END), ()
    for _ in range(30):
        met = [phrase for phrase in phrases if appears(text, phrase)]
        unmet = [phrase for phrase in phrases if not appears(text, phrase)]
        assert required.num_met == len(met)
        assert forbidden(required) == ({END} if unmet else set())
        assert required.bank == sum(map(len, met)) + longest_begun(text, unmet)
        assert 0 <= required.bank < required.num_banks
        ngrams = {text[start : start + size] for start in range(len(text) - size + 1)} if size else set()
        expected = {
            token
            for token in TOKENS
            if any(ends_with((*text, token), phrase) for phrase in banned)
            or (size and (*text, token)[-size:] in ngrams)
        }
        expected |= {END} if len(text) < least else set()
        if len(text) < len(prefix):
            expected = set(range(32)) - {prefix[len(text)]}
        assert forbidden(rule) == expected
        token = rng.choice(TOKENS)
        text, rule, required = (*text, token), rule.follow(token), required.follow(token)


def test_a_search_that_asks_for_nothing_has_no_rules():
    assert search_rule(SearchParameters(beam_size=4), END) is None
    assert required_phrases(SearchParameters(beam_size=4), END) is None
