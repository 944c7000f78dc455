"""One sequence at a time, one row at a time: what the engine and its sampler are held against."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sampling.draws import further, stream_states, uniform
from headway_server.decoding.sequence import FinishReason

NUM_GROUPS = 256


def naive_token(logits: NDArray[np.float32], parameters: SamplingParameters, step: int, **context: Any) -> int | None:
    """Chooses a token as `sampler.py` defines it, in plain Python; `context` is that of `naive_distribution`."""
    return naive_choice(logits, parameters, naive_number(parameters, step), **context)


def naive_choice(
    logits: NDArray[np.float32], parameters: SamplingParameters, number: float, *, nudge: float = 0.0, **context: Any
) -> int | None:
    """Chooses a token by the step's number; `nudge` is added to each number that is used, and that share of it."""
    first, left = number, naive_distribution(logits, parameters, **context)
    is_tried = not 0 < parameters.top_k < len(logits) and (parameters.top_p < 1 or parameters.min_p > 0)
    if not left or not is_tried:
        return naive_pick(left, number * (1 + nudge) + nudge)
    weights = naive_distribution(logits, replace(parameters, top_p=1.0, min_p=0.0), **context)
    min_p = np.float32(parameters.min_p)
    for trial in count(1):
        token = naive_pick(weights, number * (1 + nudge) + nudge)
        if token is None or token in left:
            return token
        is_likely, rank = weights[token] >= min_p, (-weights[token], token)
        weights = {t: w for t, w in weights.items() if ((-w, t) < rank if is_likely else w >= min_p)}
        number = float(further(np.array([first]), trial)[0])
    return None


def naive_pick(distribution: dict[int, float], number: float) -> int | None:
    """Draws from tokens and their weights in float64; None if there are none."""
    target = number * sum(distribution.values())
    running = 0.0
    for token, weight in distribution.items():
        running += weight
        if running > target:
            return token
    return next((token for token in reversed(distribution) if distribution[token] > 0), None)


def naive_distribution(
    logits: NDArray[np.float32],
    parameters: SamplingParameters,
    *,
    prompt_ids: Iterable[int] = (),
    text_ids: Sequence[int] = (),
    end_ids: Collection[int] = (),
    forbidden: Collection[int] = (),
) -> dict[int, float]:
    """Returns the tokens that may follow with their weights, in the order in which they are drawn."""
    logits = naive_logits(logits, parameters, prompt_ids, text_ids)
    for token in range(len(logits)):
        if token in forbidden or (token in end_ids and len(text_ids) < parameters.min_new_tokens):
            logits[token] = -np.inf
    if not np.isfinite(logits.max()):
        return {}
    if parameters.temperature == 0 or parameters.top_k == 1:
        return {int(np.flatnonzero(logits == logits.max())[0]): 1.0}
    weights = np.exp((logits - logits.max()) / np.float32(parameters.temperature)).tolist()
    vocab_size = len(logits)
    groups = min(NUM_GROUPS, vocab_size)
    order = sorted(range(vocab_size), key=lambda token: (token % groups, token // groups))
    if 0 < parameters.top_k < vocab_size:
        order = sorted(range(vocab_size), key=lambda token: (-logits[token], token))[: parameters.top_k]
    elif parameters.top_p < 1 or parameters.min_p > 0:
        order = sorted(range(vocab_size), key=lambda token: (-weights[token], token))
    if parameters.top_p < 1:
        bound, mass, kept = parameters.top_p * sum(weights[token] for token in order), 0.0, []
        for token in order:
            kept.append(token)
            mass += weights[token]
            if mass >= bound:
                break
        order = kept
    return {token: weights[token] for token in order if weights[token] >= np.float32(parameters.min_p)}


def naive_logits(
    logits: NDArray[np.float32], parameters: SamplingParameters, prompt_ids: Iterable[int], text_ids: Sequence[int]
) -> NDArray[np.float32]:
    """Returns the logits with biases and penalties, one token after the other."""
    biases, seen = dict(parameters.logit_biases), {*prompt_ids, *text_ids}
    repetition, frequency, presence = (
        np.float32(getattr(parameters, f"{name}_penalty")) for name in ("repetition", "frequency", "presence")
    )
    logits = logits.copy()
    for token in {*biases, *seen}:
        logit = logits[token] + np.float32(biases.get(token, 0))
        if token in seen:
            logit = logit / repetition if logit > 0 else logit * repetition
        if times := list(text_ids).count(token):
            logit = logit - frequency * np.float32(times) - presence
        logits[token] = logit
    return logits


def naive_number(parameters: SamplingParameters, step: int) -> float:
    """The random number of one step."""
    states = stream_states(np.array([parameters.seed], np.uint64), np.array([parameters.sample], np.uint64))
    return float(uniform(states, np.array([step], np.uint64))[0])


def naive_decode(decoder, input_ids, parameters, *, eos_id, source=None, start_ids=None):
    """Decodes one sequence in slot 0 of `decoder`, a runner; returns its tokens and why it ended."""
    if start_ids is None:
        for start in range(0, len(input_ids), decoder.prefill_chunk):
            logits = decoder.prefill(0, input_ids[start : start + decoder.prefill_chunk], start)
        position = len(input_ids)
    else:
        decoder.set_sources([source])
        for position, token_id in enumerate(start_ids):
            logits = decoder.decode(np.array([token_id]), np.array([position]))[0]
        position = len(start_ids)
    prompt_ids = input_ids.tolist() if start_ids is None else []
    end_ids = {*parameters.stop_token_ids, eos_id}
    token_ids = []
    while True:
        context = {"prompt_ids": prompt_ids, "text_ids": token_ids, "end_ids": end_ids}
        token_ids.append(naive_token(np.asarray(logits), parameters, len(token_ids), **context))
        if token_ids[-1] == eos_id:
            return token_ids, FinishReason.END_OF_SEQUENCE
        if token_ids[-1] in parameters.stop_token_ids:
            return token_ids, FinishReason.STOP
        if len(token_ids) == parameters.max_new_tokens:
            return token_ids, FinishReason.LENGTH
        logits = decoder.decode(np.array(token_ids[-1:]), np.array([position]))[0]
        position += 1
