"""What classification is to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from targets import Verdict, paired_ratio

OURS, BARE, BARE_SORTED, ECHO = "headway, served", "bare, in order", "bare, sorted", "gRPC echo"
OPENVINO = "OpenVINO"
_SHARE_OF_BARE = 0.95
_TIMES_PEER = 1.0
_TIMES_PADDING_PEER = 1.3
_TIMES_PEER_SMALL = 1.5
_SHARE_OF_LIMITS = 0.8
_P99_TIMES_BARE = 1.1

Rounds = Mapping[tuple[str, str, int], Sequence[float]]
"""Inputs a second of each round, by model, row and callers; the bare rows hold their best batch of at most so many."""


def judge(
    rounds: Rounds, p99_ms: Rounds, *, big: Sequence[str], padded: Collection[tuple[str, str, int]]
) -> Iterator[Verdict]:
    """Holds what was measured against the targets.

    Args:
        rounds: Inputs a second.
        p99_ms: Of the served and the bare row with one caller.
        big: Models judged as such; the others are small.
        padded: Of the keys of `rounds`, those of peers that join inputs of different lengths.
    """
    for model, row, callers in rounds:
        if row == OURS:
            judged = _big(rounds, p99_ms, model, callers) if model in big else _small(rounds, model, callers)
            yield from judged
            yield from _peers(rounds, model, callers, is_big=model in big, padded=padded)


def _big(rounds: Rounds, p99_ms: Rounds, model: str, callers: int) -> Iterator[Verdict]:
    yield Verdict(
        name=f"{model}, {callers} callers: share of the best fixed batch, bare",
        target=_SHARE_OF_BARE,
        value=paired_ratio(rounds[model, OURS, callers], rounds[model, BARE, callers]),
        at_least=True,
    )
    if callers == 1:
        yield Verdict(
            name=f"{model}, 1 caller: p99 as a multiple of the bare p99",
            target=_P99_TIMES_BARE,
            value=paired_ratio(p99_ms[model, OURS, 1], p99_ms[model, BARE, 1]),
            at_least=False,
        )


def _small(rounds: Rounds, model: str, callers: int) -> Iterator[Verdict]:
    pairs = zip(rounds[model, ECHO, callers], rounds[model, BARE, callers], strict=True)
    limits = [1 / (1 / echo + 1 / bare) for echo, bare in pairs]
    yield Verdict(
        name=f"{model}, {callers} callers: share of echo and best batch one after the other",
        target=_SHARE_OF_LIMITS,
        value=paired_ratio(rounds[model, OURS, callers], limits),
        at_least=True,
    )


def _peers(
    rounds: Rounds, model: str, callers: int, *, is_big: bool, padded: Collection[tuple[str, str, int]]
) -> Iterator[Verdict]:
    for (name, row, number), inputs_per_s in rounds.items():
        in_process = row.startswith(OPENVINO)
        if (name, number) != (model, callers) or row in (OURS, BARE, BARE_SORTED, ECHO) or (in_process and not is_big):
            continue
        target_of_big = _TIMES_PADDING_PEER if (name, row, number) in padded else _TIMES_PEER
        target = target_of_big if is_big else _TIMES_PEER_SMALL
        yield Verdict(
            name=f"{model}, {callers} callers: times {row}",
            target=target,
            value=paired_ratio(rounds[model, OURS, callers], inputs_per_s),
            at_least=True,
        )
