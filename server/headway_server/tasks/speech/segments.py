"""Segments of a window from its timestamp tokens, and the start of the next window.

Radford et al. 2022 (arXiv 2212.04356), section 3.8. Two adjacent timestamps end one segment and begin the next. Text
after the last such pair is unfinished unless it ends with a timestamp. The next window begins there and transcribes it
again.
"""

from __future__ import annotations

from collections.abc import Sequence as Elements
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSegment:
    """Tokens of a segment with its timestamps; start and end in steps from the beginning of the window."""

    token_ids: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSegments:
    """Segments of a window."""

    segments: tuple[WindowSegment, ...]
    next_start: int | None
    """Start of the next window, in steps; None: after this one."""


def read_segments(token_ids: Elements[int], *, first: int, num_steps: int) -> WindowSegments:
    """Reads the segments of a window.

    Args:
        token_ids: Output tokens without the end token.
        first: The first timestamp token.
        num_steps: Length of the window in steps.
    """
    tokens = tuple(token_ids)
    is_time = [token >= first for token in tokens]
    ends = [number for number in range(1, len(tokens)) if is_time[number] and is_time[number - 1]]
    ends_with_one = is_time[-2:] == [False, True]
    if not ends:
        times = [token - first for token in tokens if token >= first]
        end = times[-1] if times and times[-1] else num_steps
        whole = WindowSegment(token_ids=tokens, start=0, end=end)
        return WindowSegments(segments=(whole,), next_start=None)
    if ends_with_one:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # the last segment includes the next one's start timestamp
    segments, start = [], 0
    for number, end in enumerate(ends):
        part = tokens[start:end]
        is_open = number == len(ends) - 1 and not ends_with_one
        stop = part[-2 if is_open else -1]
        segments.append(WindowSegment(token_ids=part, start=part[0] - first, end=stop - first))
        start = end
    return WindowSegments(segments=tuple(segments), next_start=None if ends_with_one else tokens[start - 2] - first)
