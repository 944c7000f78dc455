"""One sequence at a time, one row at a time: what the engine and its sampler are held against."""

import numpy as np
from numpy.typing import NDArray

from headway_server.engine.random_stream import stream_states, uniform
from headway_server.engine.sequence import FinishReason, SamplingParameters

NUM_GROUPS = 256


def naive_token(logits: NDArray[np.float32], parameters: SamplingParameters, step: int) -> int:
    """Chooses a token as `sampler.py` defines it, in float64 and plain Python."""
    if parameters.temperature == 0 or parameters.top_k == 1:
        return int(np.flatnonzero(logits == logits.max())[0])
    scaled = (logits - logits.max()) / np.float32(parameters.temperature)
    weights = {token: float(w) for token, w in enumerate(np.exp(scaled))}
    by_likelihood = sorted(weights, key=lambda token: (-logits[token], token))
    vocab_size = len(logits)
    groups = min(NUM_GROUPS, vocab_size)
    order = sorted(weights, key=lambda token: (token % groups, token // groups))
    if 0 < parameters.top_k < vocab_size:
        order = by_likelihood = by_likelihood[: parameters.top_k]
    if parameters.top_p < 1:
        order, mass = [], 0.0
        total = sum(weights[token] for token in by_likelihood)
        for token in by_likelihood:
            order.append(token)
            mass += weights[token]
            if mass >= parameters.top_p * total:
                break
    target = naive_number(parameters, step) * sum(weights[token] for token in order)
    running = 0.0
    for token in order:
        running += weights[token]
        if running > target:
            return token
    return next(token for token in reversed(order) if weights[token] > 0)


def naive_number(parameters: SamplingParameters, step: int) -> float:
    """The random number of one step."""
    states = stream_states(np.array([parameters.seed], np.uint64), np.array([parameters.sample], np.uint64))
    return float(uniform(states, np.array([step], np.uint64))[0])


def naive_decode(decoder, input_ids, parameters, *, eos_id, source=None, first_id=None):
    """Decodes one sequence in slot 0 of `decoder`, a runner; returns its tokens and why it ended."""
    if first_id is None:
        for start in range(0, len(input_ids), decoder.prefill_chunk):
            logits = decoder.prefill(0, input_ids[start : start + decoder.prefill_chunk], start)
        position = len(input_ids)
    else:
        decoder.set_sources([source])
        logits, position = decoder.decode(np.array([first_id]), np.array([0]))[0], 1
    token_ids = []
    while True:
        token_ids.append(naive_token(np.asarray(logits), parameters, len(token_ids)))
        if token_ids[-1] == eos_id:
            return token_ids, FinishReason.END_OF_SEQUENCE
        if len(token_ids) == parameters.max_new_tokens:
            return token_ids, FinishReason.LENGTH
        logits = decoder.decode(np.array(token_ids[-1:]), np.array([position]))[0]
        position += 1
