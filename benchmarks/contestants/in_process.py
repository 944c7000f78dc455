"""What the workers of libraries share: they run in-process, each in the way that is fastest for what is asked.

A worker is asked `{"case": file, "callers": int, "seconds": float}` and runs batches of as many inputs as there are callers.
Nothing of headway is imported here: workers run in the environments of other libraries.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

Case: TypeAlias = dict[str, Any]
"""What `inputs.Case` writes."""
Batch: TypeAlias = list[list[int]]
Generate: TypeAlias = Callable[[Batch, int], Batch]
"""Takes the tokens of prompts and a number; returns that many new tokens for each."""
Run: TypeAlias = Callable[[float], dict[str, Any]]
"""Runs for so many seconds and returns figures."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Fixed batches that are tried with a classifier, if there are as many callers."""
_TRIAL_SHARE = 0.2
"""Of a measurement's time that each way is tried for."""


class Fastest:
    """Answers requests: the first one of a case and a number of callers finds out which way is the fastest."""

    def __init__(self, ways: Callable[[Case, int], Mapping[str, Run]]) -> None:
        """Takes the function that returns the ways worth trying, by a description."""
        self._ways = ways
        self._cases: dict[str, Case] = {}
        self._best: dict[tuple[str, int], tuple[str, Run]] = {}
        self._trials: dict[tuple[str, str], float] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures a case; the figures name the way in `setting`."""
        file, callers, seconds = request["case"], request["callers"], request["seconds"]
        if file not in self._cases:
            self._cases[file] = json.loads(Path(file).read_text(encoding="utf-8"))
        if (file, callers) not in self._best:
            ways = self._ways(self._cases[file], callers)
            if (file, next(iter(ways))) not in self._trials:
                next(iter(ways.values()))(0)  # meets cold memory
            for name, run in ways.items():
                if (file, name) not in self._trials:
                    figures = run(_TRIAL_SHARE * seconds)
                    self._trials[file, name] = figures.get("tokens_per_s") or figures["inputs_per_s"]
            best = max(ways, key=lambda name: self._trials.get((file, name), 0.0))
            self._best[file, callers] = best, ways[best]
        setting, run = self._best[file, callers]
        return run(seconds) | {"setting": setting}


def decoding_batches(case: Case, callers: int) -> tuple[list[Batch], list[list[int]]]:
    """Returns batches of `callers` texts, and how many tokens each answer gets.

    Texts whose answers have lengths of their own (translation) are put together by length, the best that a library can
    get: next to no padding, and all end together. These batches come in random order.
    """
    limits = case["new_tokens"] or [case["max_new_tokens"]] * len(case["token_ids"])
    pairs = list(zip(case["token_ids"], limits, strict=True))
    if case["new_tokens"]:
        pairs.sort(key=lambda pair: pair[1])
    groups = [pairs[start : start + callers] for start in range(0, len(pairs), callers)]
    if case["new_tokens"]:
        random.Random(0).shuffle(groups)
    return [[ids for ids, _ in group] for group in groups], [[limit for _, limit in group] for group in groups]


def run_decoding(generate: Generate, batches: Sequence[Batch], limits: Sequence[Sequence[int]]) -> Run:
    """Returns a run over batch after batch; of an answer, only as many tokens count as it was to have."""

    def run(seconds: float) -> dict[str, Any]:
        count, begun_s = 0, time.perf_counter()
        for batch, wanted in cycle(zip(batches, limits, strict=True)):
            lengths = {len(answer) for answer in generate(batch, max(wanted))}
            if lengths != {max(wanted)}:
                raise RuntimeError(f"answers have {sorted(lengths)} tokens, {max(wanted)} were asked for")
            count += sum(wanted)
            if (elapsed_s := time.perf_counter() - begun_s) >= seconds:
                break
        return {"tokens_per_s": count / elapsed_s}

    return run


def classifying_ways(
    items: Sequence[Any],
    callers: int,
    *,
    collate: Callable[[Sequence[Any]], dict[str, Any]],
    run: Callable[[dict[str, Any]], object],
    orders: Sequence[str],
) -> dict[str, Run]:
    """Returns a way for each fixed batch of at most as many inputs as there are callers.

    Args:
        items: Prepared inputs.
        callers: Inputs that are there at a time.
        collate: Joins items to the inputs of a graph.
        run: Runs a graph.
        orders: `in order`, as a server gets them, or `sorted` by length, which no server can know beforehand.
    """
    ways = {}
    for order in orders:
        ordered = sorted(items, key=len) if order == "sorted" else items
        for size in (size for size in BATCH_SIZES if size <= callers):
            batches = [
                collate([ordered[(start + offset) % len(ordered)] for offset in range(size)])
                for start in range(0, -(-len(ordered) // size) * size, size)
            ]
            ways[f"batches of {size}, {order}"] = _run_batches(run, batches, size)
    return ways


def _run_batches(run: Callable[[dict[str, Any]], object], batches: Sequence[dict[str, Any]], size: int) -> Run:
    def run_for(seconds: float) -> dict[str, Any]:
        """Runs all batches equally often, so that a long one counts for what it is."""
        times_s: list[float] = []
        begun_s = time.perf_counter()
        for number, feeds in enumerate(cycle(batches), 1):
            start_s = time.perf_counter()
            run(feeds)
            times_s.append(time.perf_counter() - start_s)
            if (elapsed_s := time.perf_counter() - begun_s) >= seconds and number % len(batches) == 0:
                break
        ascending = sorted(times_s)
        return {
            "inputs_per_s": len(times_s) * size / elapsed_s,
            "latency_p50_ms": ascending[len(ascending) // 2] * 1e3,
            "latency_p99_ms": ascending[len(ascending) * 99 // 100] * 1e3,
        }

    return run_for
