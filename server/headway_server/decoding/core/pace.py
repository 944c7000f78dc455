"""Pace of an engine: time of a step, and the share of the maximum length that texts reach."""

from __future__ import annotations

from collections.abc import Sequence as Elements

_SMOOTHING = 0.05


class EnginePace:
    """Means of late, of one engine. Written by its thread and read by any."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Seconds of a step, prefill included."""
        self.share = 1.0
        """New tokens of a sequence that has finished, by the most that it might have had."""

    def note_step(self, seconds: float) -> None:
        """Counts a step that has decoded."""
        self.step_s = self.step_s + _SMOOTHING * (seconds - self.step_s) if self.step_s else seconds

    def note_end(self, num_new_tokens: int, max_new_tokens: int) -> None:
        """Counts a sequence that has finished."""
        self.share += _SMOOTHING * (num_new_tokens / max_new_tokens - self.share)

    def service_s(self, max_new_tokens: float) -> float:
        """Returns the seconds that a sequence is likely to take once it has a slot; 0.0 while that is not known."""
        return self.step_s * self.share * max_new_tokens

    def __repr__(self) -> str:
        return f"EnginePace({self.step_s * 1e3:.2f} ms a step, {self.share:.2f} of the most tokens)"


class LanesPace:
    """The pace of several engines that share the work; that is tokens at most, of all beams."""

    def __init__(self, paces: Elements[EnginePace], num_slots: int) -> None:
        """Takes the paces of engines that have `num_slots` slots together."""
        self._paces = paces
        self._num_slots = num_slots

    def queue_s(self, ahead: float, work: float) -> float | None:
        """Returns the seconds until a sequence of `work` gets a slot, behind others of `ahead`; None: not known."""
        service_s = self.service_s(ahead)
        if not service_s:
            return None
        return max(0.0, service_s - self.service_s(work) * (self._num_slots - 1)) / self._num_slots

    def service_s(self, work: float) -> float:
        """Returns the seconds that a sequence of `work` takes once it has a slot."""
        return sum(pace.service_s(work) for pace in self._paces) / len(self._paces)

    def __repr__(self) -> str:
        return f"LanesPace({self._paces!r}, {self._num_slots} slots)"
