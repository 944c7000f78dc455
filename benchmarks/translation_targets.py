"""What translation is to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from targets import Verdict, paired_ratio

OURS = "headway int8, served"
_SHARE_OF_BARE = 0.85
_TIMES_CTRANSLATE2 = {1: 2.5, 8: 1.5, 32: 1.1}
"""By concurrent calls."""
_TIMES_TRANSFORMERS = 4.0


def judge(rounds: Mapping[tuple[str, str, int], Sequence[float]]) -> Iterator[Verdict]:
    """Holds what was measured against the targets.

    Args:
        rounds: Tokens a second of each round, by row, case and concurrent calls.
    """
    for (row, case, callers), tokens_per_s in rounds.items():
        targets = {
            OURS.replace("served", "bare loop"): _SHARE_OF_BARE,
            "CTranslate2 int8": _TIMES_CTRANSLATE2.get(callers),
            "transformers fp32": _TIMES_TRANSFORMERS,
        }
        if (target := targets.get(row)) is not None:
            yield Verdict(
                name=f"{case}, {callers} calls: times {row}",
                target=target,
                value=paired_ratio(rounds[OURS, case, callers], tokens_per_s),
                at_least=True,
            )
