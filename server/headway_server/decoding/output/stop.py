"""Stop strings: the text ends before the first of them."""

from __future__ import annotations


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces, across their borders.

    The string that is complete first ends the text, and the longest of those complete at the same character: where the
    text ends does not depend on how it was cut into pieces.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        """Watches for `stop_strings`, none of them empty; there may be none."""
        self._stop_strings = stop_strings
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Takes a piece of text.

        Returns:
            The text that can be handed out, and whether a stop string was found. Held back is the longest end of the
            text that could begin a stop string.
        """
        if not self._stop_strings:
            return piece, False
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = max(_overlap(text, stop) for stop in self._stop_strings)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain], False

    def finish(self) -> str:
        """Returns what was held back: the text has ended, so it begins nothing."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `stop`, `stop` itself not counted."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
