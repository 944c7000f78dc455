"""Rows ranked in blocks, against a sort of the whole row."""

import numpy as np
import pytest

from headway_server.decoding.interfaces import Ranking
from headway_server.decoding.rules import forbid
from headway_server.decoding.sampling import softmax
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.softmax import RankedRows, RowRanker
from headway_server.decoding.slots import Slots


def rank(logits: np.ndarray, count: int, banned=(), *, suppressed_ids=(), ranking: Ranking | None = None) -> RankedRows:
    """Ranks a copy of the logits; `banned` are the tokens that may not follow, by row."""
    masks = TokenMasks(Slots(len(logits) + 1), vocab_size=logits.shape[1], suppressed_ids=suppressed_ids)
    for row, token_ids in dict(banned).items():
        forbid(masks.begin(row + 1), token_ids)
    return RowRanker(masks).rank(logits.copy(), count, np.arange(1, len(logits) + 1), ranking)


def naive_ranking(logits: np.ndarray, count: int, banned: set[int]) -> tuple[list[int], np.ndarray, float]:
    exact = logits.astype(np.float64)
    normalizer = exact.max() + np.log(np.exp(exact - exact.max()).sum())
    exact[list(banned)] = -np.inf
    order = sorted(range(len(exact)), key=lambda token_id: (-exact[token_id], token_id))[:count]
    return order, exact[order] - normalizer, normalizer


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int, *, with_ties: bool) -> np.ndarray:
    logits = rng.normal(size=(num_rows, vocab_size)) * 3
    return (np.round(logits) if with_ties else logits).astype(np.float32)


@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "count"), [(2, 2), (5, 5), (31, 8), (300, 8), (1000, 2), (4003, 32), (33000, 8)]
)
def test_the_largest_come_in_order_with_their_log_probabilities(vocab_size, count, with_ties):
    rng = np.random.default_rng(vocab_size + count)
    for num_rows in (1, 3, 20):
        logits = random_logits(rng, num_rows, vocab_size, with_ties=with_ties)
        likeliest = np.argsort(-logits, axis=1)[:, :3]
        banned = {row: {int(likeliest[row, 0]), int(likeliest[row, -1])} for row in range(0, num_rows, 2)}
        ranked = rank(logits, count, banned)
        for row in range(num_rows):
            token_ids, log_probabilities, normalizer = naive_ranking(logits[row], count, banned.get(row, set()))
            num_left = np.isfinite(log_probabilities).sum()
            assert ranked.token_ids[row, :num_left].tolist() == token_ids[:num_left]
            np.testing.assert_allclose(ranked.log_probabilities[row], log_probabilities, atol=1e-5)
            assert ranked.normalizers[row] == pytest.approx(normalizer, abs=1e-5)
            some = min(vocab_size - 1, 17)
            if some not in banned.get(row, ()):
                assert ranked.log_probability(row, some) == pytest.approx(logits[row, some] - normalizer, abs=1e-5)


def test_equal_logits_rank_by_id():
    ranked = rank(np.zeros((2, 5000), np.float32), 8, {1: {0, 3}})
    assert ranked.token_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 4, 5, 6, 7, 8, 9]]


def test_a_row_is_ranked_alike_in_any_company_to_the_last_bit():
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 50, 9001, with_ties=False)
    together = rank(logits, 8)
    for row in range(50):
        alone = rank(logits[row : row + 1], 8)
        assert alone.token_ids[0].tolist() == together.token_ids[row].tolist()
        assert alone.log_probabilities[0].tolist() == together.log_probabilities[row].tolist()


@pytest.mark.parametrize("shift", [-1e4, -61.0, -59.0, 59.0, 61.0, 1e4])
def test_log_probabilities_do_not_depend_on_where_the_logits_lie(shift):
    rng = np.random.default_rng(8)
    logits = random_logits(rng, 4, 5000, with_ties=False)
    logits += np.array([shift, 0, shift, 0], np.float32)[:, np.newaxis] - logits.max(axis=1, keepdims=True)
    ranked = rank(logits, 8)
    for row in range(4):
        token_ids, log_probabilities, _ = naive_ranking(logits[row], 8, set())
        assert ranked.token_ids[row].tolist() == token_ids
        np.testing.assert_allclose(ranked.log_probabilities[row], log_probabilities, atol=1e-5)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_row_that_means_nothing_says_so_and_leaves_the_others(spoilt):
    rng = np.random.default_rng(6)
    logits = random_logits(rng, 3, 4000, with_ties=False)
    expected = rank(logits, 8)
    logits[1, 77] = spoilt
    ranked = rank(logits, 8)
    assert np.isfinite(ranked.normalizers).tolist() == [True, False, True]
    for row in (0, 2):
        assert ranked.token_ids[row].tolist() == expected.token_ids[row].tolist()


def test_suppressed_tokens_are_ranked_in_no_row_and_count_for_the_others():
    logits = np.random.default_rng(5).normal(size=(3, 400)).astype(np.float32)
    logits[:, 7] = 9.0
    expected = rank(logits, 8)
    ranked = rank(logits, 8, suppressed_ids=(7,))
    assert (expected.token_ids[:, 0] == 7).all()
    np.testing.assert_array_equal(ranked.token_ids[:, :7], expected.token_ids[:, 1:])
    np.testing.assert_array_equal(ranked.log_probabilities[:, :7], expected.log_probabilities[:, 1:])


@pytest.mark.parametrize("suppressed", [0, 9])
@pytest.mark.parametrize("banned", [{}, {1: {3, 200}}, {0: {1}, 2: range(3999)}])
def test_a_ranking_is_taken_as_it_is_in_rows_where_all_of_it_may_follow(suppressed, banned, monkeypatch):
    logits = np.sort(np.random.default_rng(5).normal(size=(3, 4000)).astype(np.float32))[:, ::-1].copy()
    order = np.tile(np.arange(8), (3, 1))
    ranking = Ranking(order, logits[:, :8], np.log(np.exp(logits.astype(np.float64)).sum(axis=1)))
    expected = rank(logits, 8, banned, suppressed_ids=(suppressed,))
    ranked_again: list[int] = []

    def top_candidates(values, counts, find=softmax.top_candidates):
        ranked_again.append(len(values))
        return find(values, counts)

    monkeypatch.setattr(softmax, "top_candidates", top_candidates)
    ranked = rank(logits, 8, banned, suppressed_ids=(suppressed,), ranking=ranking)
    may_follow = np.isfinite(expected.log_probabilities)
    np.testing.assert_array_equal(np.isfinite(ranked.log_probabilities), may_follow)
    np.testing.assert_array_equal(ranked.token_ids[may_follow], expected.token_ids[may_follow])
    np.testing.assert_allclose(ranked.log_probabilities[may_follow], expected.log_probabilities[may_follow], atol=1e-6)
    num_again = 3 if suppressed in order else len(banned)
    assert sum(ranked_again) == num_again - (2 in banned)  # where few tokens may follow, these alone are looked at


def test_of_a_row_in_which_few_tokens_may_follow_no_others_are_candidates():
    logits = np.random.default_rng(7).normal(size=(2, 5000)).astype(np.float32)
    ranked = rank(logits, 8, {0: set(range(5000)) - {4321}, 1: range(5000)})
    assert np.isfinite(ranked.log_probabilities).sum(axis=1).tolist() == [1, 0]
    assert ranked.token_ids[0, 0] == 4321
