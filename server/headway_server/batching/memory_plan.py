"""How many runs of long texts there are at a time, by the memory that each takes: decided when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from headway_server.errors import MemoryUnavailableError
from headway_server.runtime import format_size

_SHARE = 0.5
"""Share of the available memory that runs may take: other models follow, and answers need some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Runs of a model of texts. `str` gives the arithmetic."""

    num_lanes: int
    """Runs at a time."""
    num_bytes: int
    """Of the largest run."""

    def __str__(self) -> str:
        total = format_size(self.num_lanes * self.num_bytes)
        return f"{self.num_lanes} runs x {format_size(self.num_bytes)} = {total} at most"


def plan_runs(
    run_bytes: int, *, num_lanes: int, max_tokens: int, batch_tokens: int, available: int | None, owner: str
) -> RunPlan:
    """Decides how many runs there are at a time.

    Args:
        run_bytes: Memory of a run with one text of `max_tokens`.
        num_lanes: Runs that the cores allow.
        max_tokens: Tokens of the longest text.
        batch_tokens: Tokens of a batch, unless one text has more.
        available: Available memory in bytes, without the weights'; None if unknown.
        owner: The model, for error messages.

    Raises:
        MemoryUnavailableError: Not even one run fits.
    """
    num_bytes = -(-run_bytes * max(max_tokens, batch_tokens) // max_tokens)
    if available is None:
        return RunPlan(num_lanes=num_lanes, num_bytes=num_bytes)
    if num_bytes > available:
        smaller_batches = "lower --max-batch-tokens, " if batch_tokens > max_tokens else ""
        raise MemoryUnavailableError(
            f"{owner}: a run with {max(max_tokens, batch_tokens):,} tokens takes {format_size(num_bytes)}, and beside "
            f"the weights there are {format_size(available)} of memory; free memory, {smaller_batches}or export the "
            "model with a smaller --max-length"
        )
    most = max(1, int(_SHARE * available / num_bytes))
    return RunPlan(num_lanes=min(num_lanes, most), num_bytes=num_bytes)
