"""What the workers of libraries share: they run in-process, each in the way that is fastest for what is asked.

A worker is asked `{"case": file, "callers": int, "seconds": float}` and runs batches of as many inputs as there are
callers. Nothing of headway is imported here: workers run in the environments of other libraries.
"""

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

    def __init__(self, load: Callable[[Case], Any], ways: Callable[[Any, Case, int], Mapping[str, Run]]) -> None:
        """Takes what loads a case's model, once, and what returns the ways worth trying, by a description."""
        self._load, self._ways = load, ways
        self._models: dict[str, Any] = {}
        self._cases: dict[str, Case] = {}
        self._best: dict[tuple[str, int], tuple[str, Run]] = {}
        self._rates: dict[tuple[str, str], float] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures a case; the figures name the way in `setting`."""
        file, callers, seconds = request["case"], request["callers"], request["seconds"]
        if file not in self._cases:
            self._cases[file] = json.loads(Path(file).read_text(encoding="utf-8"))
        if (file, callers) not in self._best:
            case = self._cases[file]
            if case["bundle"] not in self._models:
                self._models[case["bundle"]] = self._load(case)
            ways = self._ways(self._models[case["bundle"]], case, callers)
            for index, (name, run) in enumerate(ways.items()):
                if (file, name) not in self._rates:
                    figures = run(_TRIAL_SHARE * seconds)
                    if index == 0 and len(ways) > 1:  # that met cold memory
                        figures = run(_TRIAL_SHARE * seconds)
                    self._rates[file, name] = figures.get("tokens_per_s") or figures["inputs_per_s"]
            best = max(ways, key=lambda name: self._rates[file, name])
            self._best[file, callers] = best, ways[best]
        setting, run = self._best[file, callers]
        return run(seconds) | {"setting": setting}


def decoding_run(case: Case, callers: int, generate: Generate) -> Run:
    """Returns a run over batches of `callers` texts; of an answer, only as many tokens count as it was to have.

    Texts whose answers have lengths of their own (translation) are put together by length, the best that a library can
    get: next to no padding, and all end together. These batches come in random order.
    """
    limits = case["new_tokens"] or [case["max_new_tokens"]] * len(case["token_ids"])
    pairs = list(zip(case["token_ids"], limits, strict=True))
    if case["new_tokens"]:
        pairs.sort(key=lambda pair: pair[1])
    batches = [pairs[start : start + callers] for start in range(0, len(pairs), callers)]
    if case["new_tokens"]:
        random.Random(0).shuffle(batches)  # noqa: S311 (an order, no secret)

    def run(seconds: float) -> dict[str, Any]:
        count, begun_s = 0, time.perf_counter()
        for batch in cycle(batches):
            longest = max(limit for _, limit in batch)
            lengths = {len(answer) for answer in generate([ids for ids, _ in batch], longest)}
            if lengths != {longest}:
                raise RuntimeError(f"answers have {sorted(lengths)} tokens, {longest} were asked for")
            count += sum(limit for _, limit in batch)
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
    """Returns a way for each fixed batch of at most as many prepared items as there are callers.

    `collate` joins items to the inputs of a graph, which `run` runs. An order is `in order`, as a server gets its
    inputs, or `sorted` by length, which no server can know beforehand.
    """
    ways = {}
    for order in orders:
        ordered = sorted(items, key=len) if order == "sorted" else items
        for size in (size for size in BATCH_SIZES if size <= callers):
            starts = range(0, -(-len(ordered) // size) * size, size)
            rows = [[ordered[(start + offset) % len(ordered)] for offset in range(size)] for start in starts]
            ways[f"batches of {size}, {order}"] = _classifying_run(run, [collate(row) for row in rows], size)
    return ways


def _classifying_run(run: Callable[[dict[str, Any]], object], batches: Sequence[dict[str, Any]], size: int) -> Run:
    def run_for(seconds: float) -> dict[str, Any]:
        """Runs all batches equally often, so that a long one counts for what it is."""
        times_s: list[float] = []
        while sum(times_s) < seconds or not times_s:
            for feeds in batches:
                begun_s = time.perf_counter()
                run(feeds)
                times_s.append(time.perf_counter() - begun_s)
        ascending = sorted(times_s)
        return {
            "inputs_per_s": len(times_s) * size / sum(times_s),
            "latency_p50_ms": ascending[len(ascending) // 2] * 1e3,
            "latency_p99_ms": ascending[len(ascending) * 99 // 100] * 1e3,
        }

    return run_for
