"""Random searches, and what they are held against: the PyTorch reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import naive_beam_search as reference
import torch

from headway_server.decoding.parameters import EarlyStopping, SearchParameters
from headway_server.decoding.sequence import FinishReason, Hypothesis

WIDTHS = (1, 2, 3, 4, 5, 8, 16)


def random_search(rng: random.Random, token_ids: Sequence[int], *, widths: Sequence[int] = WIDTHS) -> SearchParameters:
    """Draws parameters of every kind, most of them seldom; phrases are made of `token_ids`."""

    def phrases(odds: float, most: int, longest: int) -> tuple[tuple[int, ...], ...]:
        count = rng.randint(1, most) if rng.random() < odds else 0
        return tuple(tuple(rng.choices(token_ids, k=rng.randint(1, longest))) for _ in range(count))

    beam_size = rng.choice(widths)
    prefix_ids = phrases(0.15, 1, 3)
    return SearchParameters(
        beam_size=beam_size,
        num_hypotheses=rng.randint(1, beam_size),
        length_penalty=rng.choice([0.0, 0.6, 1.0, 1.0, 1.5]),
        early_stopping=rng.choice(list(EarlyStopping)),
        no_repeat_ngram_size=rng.choice([0, 0, 0, 1, 2, 3]),
        min_new_tokens=rng.choice([0, 0, 0, 3]),
        num_given=rng.choice([0, 0, 1]),
        prefix_ids=prefix_ids[0] if prefix_ids else (),
        required_phrases=phrases(0.2, 3, 3),
        forbidden_phrases=phrases(0.2, 4, 2),
    )


def reference_config(search: SearchParameters) -> reference.BeamSearchConfig:
    """Says the same to the reference."""
    return reference.BeamSearchConfig(
        beam_size=search.beam_size,
        num_hypotheses=search.num_hypotheses,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping.value,
        no_repeat_ngram_size=search.no_repeat_ngram_size,
        min_new_tokens=search.min_new_tokens,
        num_given=search.num_given,
        prefix=search.prefix_ids,
        required=search.required_phrases,
        forbidden=search.forbidden_phrases,
    )


def differences(
    hypotheses: Sequence[Hypothesis], expected: Sequence[reference.Hypothesis], tolerance: float = 1e-4
) -> list[str]:
    """Says where what a search has found is not what the reference has."""
    if len(hypotheses) != len(expected):
        return [f"{len(hypotheses)} hypotheses instead of {len(expected)}"]
    found: list[str] = []
    for number, (one, other) in enumerate(zip(hypotheses, expected, strict=True)):
        if one.token_ids != other.tokens:
            found.append(f"{number}: {one.token_ids} instead of {other.tokens}")
        if abs(one.score - other.score) > tolerance or abs(one.log_probability - other.log_probability) > tolerance:
            found.append(f"{number}: {(one.log_probability, one.score)} instead of {other}")
        if (one.finish_reason is FinishReason.END_OF_SEQUENCE) != other.has_ended:
            found.append(f"{number}: {one.finish_reason} instead of {other}")
        if one.num_new_tokens != len(other.tokens) + other.has_ended:
            found.append(f"{number}: {one.num_new_tokens} tokens instead of those of {other}")
    return found


def is_close_call(log_probabilities: reference.LogProbabilities, *, noise: float = 1e-5, **options) -> bool:
    """Says whether noise in the last digits changes what the reference finds: then ties decide."""
    generator = torch.Generator().manual_seed(3)

    def noisy(beams: list[tuple[int, ...]]) -> torch.Tensor:
        exact = log_probabilities(beams)
        return exact + noise * torch.randn(exact.shape, generator=generator, dtype=exact.dtype)

    expected = [found.tokens for found in reference.beam_search(log_probabilities, **options)]
    return any([found.tokens for found in reference.beam_search(noisy, **options)] != expected for _ in range(8))


class Spelled:
    """Output that tells every token, or the first ones alone."""

    def __init__(self, length=None):
        self.length = length

    def push(self, token_id):  # noqa: ARG002 (nothing ends it)
        return False

    def whole(self, token_ids):
        return " ".join(map(str, token_ids[: self.length]))
