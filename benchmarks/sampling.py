"""What choosing the tokens of a step costs: python -m benchmarks.sampling [--vocab-size N] [--num-rows N].

Milliseconds of processor time of a step, in this process on one core, medians. Each row of a step has parameters and
logits of its own. Logits are *flat* (standard normal), *steep* (they fall like 1 / rank^1.8, nearer to a trained
model's) or *peaked* (one token has nearly all).
"""

import json
import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.machine import describe_run
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.sampler import TokenSampler
from headway_server.decoding.slots import Slots

_SHAPES = ("flat", "steep", "peaked")
_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 40": {"top_k": 40},
    "top-k 1000": {"top_k": 1000},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.5": {"top_p": 0.5},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.9, min-p 0.05": {"top_p": 0.9, "min_p": 0.05},
    "top-k 40, top-p 0.9, min-p 0.05": {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
}


def main(
    vocab_size: Annotated[list[int] | None, typer.Option(min=1)] = None,
    num_rows: Annotated[list[int] | None, typer.Option(min=1)] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
) -> None:
    """Measures every way of choosing in turns and prints tables, and one JSON object as the last line."""
    rows = []
    for size in vocab_size or [1_000, 50_000, 128_000]:
        for count in num_rows or [1, 8, 32]:
            logits = {shape: _logits(shape, count, size) for shape in _SHAPES}
            medians = _measure(logits, repeats)
            typer.echo(f"\n{count} rows of {size}, ms{'':16}" + "".join(f"{shape:>9}" for shape in _SHAPES))
            for way in _WAYS:
                typer.echo(f"{way:<34}" + "".join(f"{medians[way, shape]:>9.3f}" for shape in _SHAPES))
            rows += [
                {"vocab_size": size, "num_rows": count, "way": way, "logits": shape, "cpu_ms": milliseconds}
                for (way, shape), milliseconds in medians.items()
            ]
    typer.echo(json.dumps(describe_run() | {"repeats": repeats, "rows": rows}))


def _measure(logits: dict[str, NDArray[np.float32]], repeats: int) -> dict[tuple[str, str], float]:
    """Returns the medians by way and shape."""
    samplers = {}
    for way, parameters in _WAYS.items():
        for shape, some in logits.items():
            sampler = samplers[way, shape] = TokenSampler(TokenMasks(Slots(len(some)), vocab_size=some.shape[1]))
            for slot in range(len(some)):
                one = {"temperature": 1.0, "seed": slot} | parameters
                sampler.assign(slot, SamplingParameters(max_new_tokens=1_000, **one))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in samplers}
    for _ in range(repeats + 1):  # the first time allocates memory
        for (way, shape), sampler in samplers.items():
            began = time.process_time()
            sampler.sample(logits[shape])
            times[way, shape].append((time.process_time() - began) * 1e3)
    return {key: statistics.median(found[1:]) for key, found in times.items()}


def _logits(shape: str, count: int, vocab_size: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(1)
    if shape == "steep":
        ranks = np.stack([generator.permutation(vocab_size) + 1 for _ in range(count)])
        return (-1.8 * np.log(ranks)).astype(np.float32)
    logits = generator.normal(size=(count, vocab_size)).astype(np.float32)
    if shape == "peaked":
        logits[:, vocab_size // 3] = 25
    return logits


if __name__ == "__main__":
    typer.run(main)
