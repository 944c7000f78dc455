"""How many slots there are, by the memory they take: decided and allocated at start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway_server.decoding.settings import EngineSettings
from headway_server.errors import MemoryUnavailableError
from headway_server.runtime import format_size

DEFAULT_MAX_SLOTS = 32
"""Slots if the setting is left out and memory allows."""
_DEFAULT_SHARE = 0.5
"""Share of the available memory that a default may take: other models follow, and answers need some."""
_LARGEST_SHARE = 0.95
_SLOTS_PER_PREFIX_SLOT = 8
"""Slots that run for each slot of the prefix cache, if the setting is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """Memory of a slot, in bytes."""

    state_bytes: int
    """The decoder's state, at the model's maximum length."""
    source_bytes: int = 0
    """Bytes of the longest encoded source; 0 without an encoder."""
    windows: str = ""
    """How many of its caches hold fewer positions than the slot has; empty if none does."""
    prefix_slot_bytes: int
    """A slot of the prefix cache; 0 if the model reads no prompts whose chunks can be cached, as in translation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a model's state. `str` gives the arithmetic."""

    num_slots: int
    num_prefix_slots: int
    sizes: SlotSizes

    @property
    def total_bytes(self) -> int:
        """Memory that is allocated at start, in bytes."""
        slots = self.num_slots * (self.sizes.state_bytes + self.sizes.source_bytes)
        return slots + self.num_prefix_slots * self.sizes.prefix_slot_bytes

    def __str__(self) -> str:
        slots, size = f"{self.num_slots} slots", format_size(self.sizes.state_bytes)
        if self.sizes.windows:
            size = f"{size} ({self.sizes.windows})"
        if self.sizes.source_bytes:
            size = f"({size} + {format_size(self.sizes.source_bytes)} of its source)"
        if not self.num_prefix_slots:
            sizes = f"{slots} x {size}"
        elif self.sizes.prefix_slot_bytes == self.sizes.state_bytes:
            sizes = f"({slots} + {self.num_prefix_slots} of prefix cache) x {size}"
        else:
            prefix_size = format_size(self.sizes.prefix_slot_bytes)
            sizes = f"{slots} x {size} + {self.num_prefix_slots} of prefix cache x {prefix_size}"
        return f"{sizes} = {format_size(self.total_bytes)}"


def plan_memory(settings: EngineSettings, sizes: SlotSizes, *, available: int | None, owner: str) -> MemoryPlan:
    """Decides the number of slots.

    Args:
        settings: Requested engine settings.
        sizes: Memory of a slot.
        available: Available memory in bytes; None if unknown.
        owner: The model, for error messages.

    Raises:
        MemoryUnavailableError: The requested slots, or a single slot, do not fit; the message gives the number that
            does.
    """
    if available is None:
        return _plan(settings, settings.num_slots or DEFAULT_MAX_SLOTS, sizes)
    if settings.num_slots is None:
        num_slots = _most_slots(settings, DEFAULT_MAX_SLOTS, sizes, _DEFAULT_SHARE * available) or 1
    else:
        num_slots = settings.num_slots
    plan = _plan(settings, num_slots, sizes)
    if plan.total_bytes > _LARGEST_SHARE * available:
        raise MemoryUnavailableError(_too_much(settings, plan, sizes, available, owner))
    return plan


def _plan(settings: EngineSettings, num_slots: int, sizes: SlotSizes) -> MemoryPlan:
    num_prefix_slots = settings.num_prefix_slots
    if num_prefix_slots is None:
        num_prefix_slots = math.ceil(num_slots / _SLOTS_PER_PREFIX_SLOT)
    return MemoryPlan(
        num_slots=num_slots, num_prefix_slots=num_prefix_slots if sizes.prefix_slot_bytes else 0, sizes=sizes
    )


def _most_slots(settings: EngineSettings, at_most: int, sizes: SlotSizes, budget: float) -> int:
    """Returns the largest number of slots within a budget in bytes; 0 if none fits."""
    return next((n for n in range(at_most, 0, -1) if _plan(settings, n, sizes).total_bytes <= budget), 0)


def _too_much(settings: EngineSettings, plan: MemoryPlan, sizes: SlotSizes, available: int, owner: str) -> str:
    most = _most_slots(settings, plan.num_slots - 1, sizes, _LARGEST_SHARE * available)
    advice = (
        f"--num-slots {most} is the largest setting that fits"
        if most
        else "not even --num-slots 1 fits; free memory, or export the model with a smaller maximum length"
    )
    return f"{owner}: {plan} is more than the {format_size(available)} of memory there is; {advice}"
