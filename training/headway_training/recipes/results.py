"""What a recipe file says of itself: what its command gave, and what was tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the recipe's command gave, once."""

    command: str
    """The command."""
    hardware: str
    """What it ran on, and what else ran there."""
    wall_time_s: float
    """How long it took."""
    metric: str
    """What was measured on the test data."""
    value: float
    """What that was."""
    note: str = ""
    """Whatever else should be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """A change of the recipe that was tried."""

    what: str
    """The change, from the recipe as it is, or as it was."""
    metric: str
    """What was measured, and on which part of the data."""
    value: float
    """With the change."""
    without: float
    """Without it."""
    kept: bool
    """Whether it earned its place."""
    note: str = ""
    """Whatever else should be known."""
