"""Drawn tokens against the exact distribution, by chi-square with fixed seeds."""

import numpy as np
import pytest
from sampler_rows import new_sampler, pack, restrict
from scipy import stats
from thorough import amount

from headway_server.decoding.parameters import SamplingParameters

VOCAB_SIZE = 700
NUM_ROWS = 500
NUM_ROUNDS = amount(8, 20)
PROMPT = np.array([1, 5, 5, 9])
TEXT = [5, 7, 7]
LOGITS = (np.random.default_rng(3).normal(size=VOCAB_SIZE) * 2).astype(np.float32)
LOGITS[[1, 5, 7, 9]] = [4, 5, 5.5, -1]
ALLOWED = np.arange(VOCAB_SIZE) % 3 != 0


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 12},
        {"top_p": 0.8},
        {"top_p": 0.999},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 2.0, "min_p": 0.2},
        {"top_k": 30, "min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.03},
        {"temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_tokens_follow_their_distribution(parameters):
    check(np.repeat(LOGITS[np.newaxis], NUM_ROWS, axis=0), LOGITS, {"temperature": 1.0, **parameters})


@pytest.mark.parametrize(
    "parameters",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"logit_biases": ((7, -2.0), (11, 6.0))},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_biases": ((5, 1.0),)},
        {"repetition_penalty": 0.8, "top_k": 20},
        {"frequency_penalty": -0.5, "top_p": 0.9},
        {"presence_penalty": 2.0, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_masked", [False, True], ids=["free", "masked"])
def test_tokens_after_a_text_follow_their_edited_distribution(parameters, is_masked):
    expected = edited(LOGITS.astype(np.float64), parameters)
    if is_masked:
        expected[~ALLOWED] = -np.inf
    logits = np.repeat(LOGITS[np.newaxis], NUM_ROWS, axis=0)
    check(logits, expected, {"temperature": 1.0, **parameters}, text=TEXT, mask=pack(ALLOWED) if is_masked else None)


def check(logits, expected_logits, parameters, *, text=(), mask=None):
    """Draws from rows that have this prompt and text, and compares with the distribution of other logits."""
    counts = np.zeros(VOCAB_SIZE, np.int64)
    sampler = new_sampler(NUM_ROWS, VOCAB_SIZE)
    for turn in range(NUM_ROUNDS):
        for slot in range(NUM_ROWS):
            sample = turn * NUM_ROWS + slot
            one = SamplingParameters(max_new_tokens=9, seed=11, sample=sample, **parameters)
            sampler.assign(slot, one, prompt_ids=PROMPT)
        for token in text:
            allow(sampler, pack(np.arange(VOCAB_SIZE) == token))
            assert (sampler.sample(logits).token_ids == token).all()
        allow(sampler, mask)
        counts += np.bincount(sampler.sample(logits).token_ids, minlength=VOCAB_SIZE)
    probabilities = distribution(
        expected_logits,
        parameters["temperature"],
        parameters.get("top_k", 0),
        parameters.get("top_p", 1.0),
        parameters.get("min_p", 0.0),
    )
    compare(counts, probabilities * NUM_ROWS * NUM_ROUNDS)


def allow(sampler, mask):
    for slot in range(NUM_ROWS):
        if mask is not None:
            restrict(sampler, slot, mask)


def compare(counts, expected):
    assert counts[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], expected[~frequent].sum())
    keep = wanted > 0
    assert keep.sum() > 2
    assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 0.001


def edited(logits, parameters):
    """Returns logits after PROMPT and TEXT, by the definition."""
    for token, bias in parameters.get("logit_biases", ()):
        logits[token] += bias
    for token in {*PROMPT.tolist(), *TEXT}:
        penalty = parameters.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(TEXT):
        logits[token] -= TEXT.count(token) * parameters.get("frequency_penalty", 0.0)
        logits[token] -= parameters.get("presence_penalty", 0.0)
    return logits


def distribution(logits, temperature, top_k, top_p, min_p):
    """Returns the exact probabilities (V,)."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probabilities = weights[order] / weights[order].sum()
    before = np.cumsum(probabilities) - probabilities
    kept = order[(before < top_p) & (probabilities >= min_p * probabilities.max())]
    result = np.zeros_like(weights)
    result[kept] = weights[kept] / weights[kept].sum()
    return result
