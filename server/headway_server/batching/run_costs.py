"""What a run of a graph costs, and what follows for its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

_RUN_S = 2e-3
"""What a run costs beside its tokens: starting operators, changing threads, waiting for the interpreter's lock."""
_INLINE_S = 1e-3
"""A run that takes no longer costs a single caller less than waking a thread for it and hearing of it again, and keeps
nobody else waiting for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """Lengths, in what items take of a batch's budget, up to which something pays."""

    most_padding: int | None = None
    """Padding that an item may bring to a batch: more takes longer than a run of its own; None: any."""
    most_inline: int = 0
    """Length of an item that is run where it is submitted, if its caller is alone."""

    @classmethod
    def of(cls, run_s: float | None, length: int) -> Self:
        """Derives the lengths from a run of one item.

        Args:
            run_s: The least it took, on the CPU; None: that is not known, or hardly depends on the length.
            length: Of the item.
        """
        if run_s is None:
            return cls()
        return cls(
            most_padding=round(_RUN_S * length / run_s),
            most_inline=int(_INLINE_S * length / run_s),
        )


UNKNOWN_COSTS = RunCosts()
"""Any padding, and nothing inline: of images, too, whose files may keep a decoder busy for longer than a run."""
