"""How many runs of long texts and sounds there are at a time, by the memory of each: decided when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from headway_server.errors import MemoryUnavailableError
from headway_server.runtime import format_size

_SHARE = 0.5
"""Share of the available memory that runs may take: other models follow, and answers need some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Runs of a model of texts or sounds. `str` gives the arithmetic."""

    num_lanes: int
    """Runs at a time."""
    num_bytes: int
    """Of the largest run."""

    def __str__(self) -> str:
        total = format_size(self.num_lanes * self.num_bytes)
        return f"{self.num_lanes} runs x {format_size(self.num_bytes)} = {total} at most"


def plan_runs(
    run_bytes: int,
    *,
    num_lanes: int,
    largest: int,
    batch: int,
    available: int | None,
    owner: str,
    unit: str = "tokens",
) -> RunPlan:
    """Decides how many runs there are at a time.

    Args:
        run_bytes: Memory of a run with one input of `largest`.
        num_lanes: Runs that the cores allow.
        largest: Size of the largest input, in `unit`.
        batch: Size of a batch, unless one input is larger.
        available: Available memory in bytes, without the weights'; None if unknown.
        owner: The model, for error messages.
        unit: Name of the unit: tokens of texts, or samples of sounds.

    Raises:
        MemoryUnavailableError: Not even one run fits.
    """
    num_bytes = -(-run_bytes * max(largest, batch) // largest)
    if available is None:
        return RunPlan(num_lanes=num_lanes, num_bytes=num_bytes)
    if num_bytes > available:
        smaller_batches = "lower --max-batch-tokens, " if batch > largest else ""
        smaller = "export the model with a smaller --max-length" if unit == "tokens" else "take a smaller model"
        raise MemoryUnavailableError(
            f"{owner}: a run with {max(largest, batch):,} {unit} takes {format_size(num_bytes)}, and beside "
            f"the weights there are {format_size(available)} of memory; free memory, {smaller_batches}or "
            f"{smaller}"
        )
    most = max(1, int(_SHARE * available / num_bytes))
    return RunPlan(num_lanes=min(num_lanes, most), num_bytes=num_bytes)
