"""Beam search in PyTorch, one sentence at a time and written to be read: what fast ones are held against.

B beams, T target tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway_training.models import RecurrentTranslator, Transformer

LogProbabilities = Callable[[list[tuple[int, ...]]], Tensor]
"""Tokens of B beams, all of one length -> the log-probabilities of every token after each, float64 (B, V)."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A translation that beam search has found."""

    tokens: tuple[int, ...]
    """Without `bos` and `eos`."""
    log_probability: float
    """Sum of the natural logarithms of its tokens' probabilities, `eos` included where it has ended."""
    score: float
    """`log_probability / length ** length_penalty`, where `eos` counts."""
    has_ended: bool
    """Whether it ends with `eos`; otherwise it is as long as it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchConfig:
    """What to search for."""

    beam_size: int = 4
    num_hypotheses: int = 1
    """Hypotheses to return, 1 to `beam_size`."""
    length_penalty: float = 1.0
    early_stopping: Literal["first", "heuristic", "never"] = "heuristic"
    """When a search with `beam_size` hypotheses ends: at once; when the best beam would not be among them if it ended
    now; or when no continuation of it could be."""
    no_repeat_ngram_size: int = 0
    """No so many tokens may follow each other twice; 0 allows it."""
    min_new_tokens: int = 0
    """Tokens before `eos` may follow."""
    num_given: int = 0
    """Tokens that a length counts beside those of a hypothesis."""
    prefix: tuple[int, ...] = ()
    """What a translation begins with."""
    required: tuple[tuple[int, ...], ...] = ()
    """Phrases that it must have."""
    forbidden: tuple[tuple[int, ...], ...] = ()
    """Phrases that it must not have."""


def translate_with_beams(
    model: Transformer | RecurrentTranslator,
    source_ids: Tensor,
    *,
    bos: int,
    eos: int,
    search: BeamSearchConfig,
    max_length: int | None = None,
) -> list[Hypothesis]:
    """Translates a sentence by beam search; every step reads source and beams from their beginning.

    Args:
        model: The model.
        source_ids: int64 (S).
        bos: The token a target begins with.
        eos: The token it ends with.
        search: What to search for.
        max_length: Most tokens of a translation, `eos` included; None: what the model can hold.

    Returns:
        The best hypotheses, the best first.
    """
    log_probabilities = next_log_probabilities(model, source_ids, bos=bos)
    max_length = min(max_length or model.max_target_length, model.max_target_length)
    return beam_search(log_probabilities, eos=eos, search=search, max_length=max_length)


def next_log_probabilities(
    model: Transformer | RecurrentTranslator, source_ids: Tensor, *, bos: int
) -> LogProbabilities:
    """Returns what `beam_search` asks a model for: how likely tokens are after beams of a sentence (S)."""

    @torch.inference_mode()
    def log_probabilities(beams: list[tuple[int, ...]]) -> Tensor:
        sources = source_ids.expand(len(beams), -1)  # (B, S)
        targets = torch.tensor([(bos, *beam) for beam in beams])  # (B, T)
        logits: Tensor = model(sources, torch.ones_like(sources), targets)  # (B, T, V)
        return logits[:, -1].double().log_softmax(dim=-1)

    return log_probabilities


def beam_search(
    log_probabilities: LogProbabilities,
    *,
    eos: int,
    search: BeamSearchConfig,
    max_length: int,
) -> list[Hypothesis]:
    """Searches for the likeliest continuations (Sutskever et al. 2014, arXiv 1409.3215, section 3.2).

    A step ranks all continuations of all beams. One that ends is a hypothesis if it is among the best `beam_size`; the
    best `beam_size` of the others are the beams from now on. Ties go to the lower beam, then to the lower token. Where
    phrases are required (Post and Vilar 2018, arXiv 1804.06609), continuations are ranked in banks, by how many tokens
    of the phrases they have, and the beams are shared out among the banks.

    Args:
        log_probabilities: Says how likely the next tokens are.
        eos: The token a text ends with.
        search: What to search for.
        max_length: Most tokens of a hypothesis, `eos` included.

    Returns:
        The best hypotheses, the best first: those with most of the required phrases, then by score.
    """
    size = search.beam_size
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # tokens and log-probability, the likeliest first
    found: list[Hypothesis] = []

    def find(tokens: tuple[int, ...], log_probability: float, *, has_ended: bool) -> None:
        score = log_probability / max(len(tokens) + has_ended + search.num_given, 1) ** search.length_penalty
        found.append(Hypothesis(tokens, log_probability, score, has_ended))
        found.sort(key=lambda hypothesis: (-len(_met(hypothesis.tokens, search.required)), -hypothesis.score))
        del found[size:]

    for length in itertools.count(1):
        banks = _rank(beams, log_probabilities([tokens for tokens, _ in beams]), eos, search)
        survivors: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for bank, continuations in banks.items():
            for tokens, log_probability in continuations[:size]:
                if tokens[-1] == eos:
                    find(tokens[:-1], log_probability, has_ended=True)
            survivors[bank] = [entry for entry in continuations if entry[0][-1] != eos]
        previous, beams = beams, _allocate(survivors, search)
        if not beams and not found:  # nothing may follow
            beams = previous
        if length == max_length or beams is previous:
            for tokens, log_probability in beams:
                find(tokens, log_probability, has_ended=False)
            break
        if not beams or _may_stop(search, found, beams[0][1], length, max_length):
            break
    return found[: search.num_hypotheses]


def _rank(
    beams: list[tuple[tuple[int, ...], float]], log_probabilities: Tensor, eos: int, search: BeamSearchConfig
) -> dict[int, list[tuple[tuple[int, ...], float]]]:
    """Returns all continuations that are allowed, (B, V) log-probabilities of them given, ranked, by bank."""
    totals = log_probabilities.clone()
    for row, (tokens, log_probability) in enumerate(beams):
        totals[row] += log_probability
        if len(tokens) < len(search.prefix):
            forced = search.prefix[len(tokens)]
            totals[row, torch.arange(totals.shape[1]) != forced] = -math.inf
        else:
            totals[row, _banned(tokens, eos, search)] = -math.inf
    values, order = totals.flatten().sort(descending=True, stable=True)
    banks: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for index, value in zip(order.tolist(), values.tolist(), strict=True):
        if value == -math.inf:
            break
        row, token = divmod(index, totals.shape[1])
        tokens = (*beams[row][0], token)
        banks.setdefault(_bank(tokens, search.required), []).append((tokens, value))
        if not search.required and len(banks[0]) == 2 * search.beam_size:
            break  # no more are ever looked at
    return banks


def _banned(tokens: tuple[int, ...], eos: int, search: BeamSearchConfig) -> list[int]:
    """Returns the tokens that may not follow."""
    is_too_short = len(tokens) < search.min_new_tokens
    banned = [eos] if is_too_short or len(_met(tokens, search.required)) < len(search.required) else []
    if (size := search.no_repeat_ngram_size) and len(tokens) >= size - 1:
        last = tokens[len(tokens) - size + 1 :]
        starts = range(len(tokens) - size + 1)
        banned += [tokens[start + size - 1] for start in starts if tokens[start : start + size - 1] == last]
    for *beginning, end in search.forbidden:
        if tokens[len(tokens) - len(beginning) :] == tuple(beginning):
            banned.append(end)
    return banned


def _met(tokens: tuple[int, ...], required: tuple[tuple[int, ...], ...]) -> set[int]:
    """Returns which required phrases appear in a text."""
    return {
        number
        for number, phrase in enumerate(required)
        if any(tokens[start : start + len(phrase)] == phrase for start in range(len(tokens) - len(phrase) + 1))
    }


def _bank(tokens: tuple[int, ...], required: tuple[tuple[int, ...], ...]) -> int:
    """Returns how many tokens of required phrases a text has: of those that appear, and of one begun at its end."""
    met = _met(tokens, required)
    begun = [
        length
        for number, phrase in enumerate(required)
        if number not in met
        for length in range(1, len(phrase))
        if tokens[-length:] == phrase[:length]
    ]
    return sum(len(required[number]) for number in met) + max(begun, default=0)


def _allocate(
    banks: dict[int, list[tuple[tuple[int, ...], float]]], search: BeamSearchConfig
) -> list[tuple[tuple[int, ...], float]]:
    """Shares the beams out: evenly, the rest to the fullest bank; what a bank leaves goes to the next lower one."""
    highest = sum(map(len, search.required))
    even, rest = divmod(search.beam_size, highest + 1)
    places = rest
    taken: dict[int, int] = {}
    for bank in range(highest, -1, -1):
        places += even
        taken[bank] = min(places, len(banks.get(bank, [])))
        places -= taken[bank]
    for bank in range(highest + 1):  # what even the lowest left goes upwards
        more = min(places, len(banks.get(bank, [])) - taken[bank])
        taken[bank] += more
        places -= more
    beams = [entry for bank in range(highest + 1) for entry in banks.get(bank, [])[: taken[bank]]]
    return sorted(beams, key=lambda entry: -entry[1])


def _may_stop(search: BeamSearchConfig, found: list[Hypothesis], best: float, length: int, max_length: int) -> bool:
    """Says whether a search ends whose beams have `length` tokens and, the best of them, the log-probability `best`."""
    if len(found) < search.beam_size:
        return False
    if search.beam_size == 1 or search.early_stopping == "first":
        return True
    if search.early_stopping == "never" and search.length_penalty > 0:
        length = max_length
    return bool(best / (length + search.num_given) ** search.length_penalty <= found[-1].score)
