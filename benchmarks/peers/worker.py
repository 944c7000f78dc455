"""What the peers' processes share: requests and answers as lines of JSON on standard input and output.

A request is `{"key": str, "batches": [[[token_id]]], "new_tokens": int, "seconds": float}`, with "wanted", a number
for every input of every batch, where only so many of the new tokens count: of a batch of translations the longest
decides how long it runs; and with "beam_size" where it is a search. The answer is
`{"tokens_per_s": float, "settings": str, "answers": [[token_id]]}`, the answers being those to the first batch, or
`{"error": str}`. The first line, once all is loaded, is `{"versions": {name: version}}`.

The scripts of this folder run in an environment of their own (environment.py) and know nothing of headway.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

Batch: TypeAlias = list[list[int]]
Generate: TypeAlias = Callable[[Batch, int], list[list[int]]]
"""Takes prompts and the number of new tokens; returns the new tokens of each."""

_TUNING_TOKENS = 16
"""New tokens of a short run, which also warms up."""
_HOPELESS = 2.0
"""Times the fastest short run past which a way is not tried further."""


class Contestant:
    """A library with several ways to run; of each kind of load it is measured in the way that was fastest."""

    def __init__(self, ways: Callable[[Batch, int], Mapping[str, Generate]]) -> None:
        """Takes a function from a batch and a number of beams to the ways worth trying, by a description."""
        self._ways = ways
        self._best: dict[str, tuple[str, Generate]] = {}

    def measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Generates for batch after batch until the time is over; counts whole batches."""
        batches: list[Batch] = request["batches"]
        wanted = request.get("wanted") or [[request["new_tokens"]] * len(batch) for batch in batches]
        if request["key"] not in self._best:
            middle = len(batches) // 2
            found = self._fastest(batches[middle], max(wanted[middle]), request.get("beam_size", 1))
            self._best[request["key"]] = found
        settings, generate = self._best[request["key"]]
        first: list[list[int]] = []
        count = 0
        begun_s = time.perf_counter()
        for batch, lengths in cycle(zip(batches, wanted, strict=True)):
            answers = generate(batch, max(lengths))
            _check(answers, max(lengths))
            first = first or answers
            count += sum(lengths)
            if (elapsed_s := time.perf_counter() - begun_s) >= request["seconds"]:
                break
        return {"tokens_per_s": count / elapsed_s, "settings": settings, "answers": first}

    def _fastest(self, batch: Batch, new_tokens: int, beam_size: int) -> tuple[str, Generate]:
        """Tries every way on a batch, but those in full only whose short run was not far behind the others'."""
        ways = self._ways(batch, beam_size)
        short_s = {settings: _time(generate, batch, _TUNING_TOKENS) for settings, generate in ways.items()}
        limit_s = _HOPELESS * min(short_s.values())
        hopeful = [settings for settings in ways if short_s[settings] <= limit_s]
        if len(hopeful) == 1:
            return hopeful[0], ways[hopeful[0]]
        full_s = {settings: _time(ways[settings], batch, new_tokens) for settings in hopeful}
        best = min(full_s, key=full_s.__getitem__)
        return best, ways[best]


def _time(generate: Generate, batch: Batch, new_tokens: int) -> float:
    begun_s = time.perf_counter()
    generate(batch, new_tokens)
    return time.perf_counter() - begun_s


def serve(packages: Sequence[str], load: Callable[[], Contestant]) -> None:
    """Loads, then answers until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    contestant = load()
    print(json.dumps({"versions": {name: importlib.metadata.version(name) for name in packages}}), file=answers)
    answers.flush()
    for line in sys.stdin:
        try:
            answer = contestant.measure(json.loads(line))
        except Exception as error:  # the report names what a peer cannot do
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _check(answers: list[list[int]], new_tokens: int) -> None:
    """Makes sure that the work was done."""
    lengths = {len(answer) for answer in answers}
    if lengths != {new_tokens}:
        raise RuntimeError(f"answers have {sorted(lengths)} tokens, {new_tokens} were asked for")
