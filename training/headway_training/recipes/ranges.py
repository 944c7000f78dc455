"""Checks of numbers in recipes."""

from __future__ import annotations


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Checks that a number is in its range.

    Raises:
        ValueError: `value` is not in low..high.
    """
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be {low} to {high}")
