"""The text of a sequence: detokenized, cut at a stop string, in pieces or at once."""

from __future__ import annotations

from collections.abc import Sequence

from headway_server.decoding.output.detokenizer import Decode, Detokenizer
from headway_server.decoding.output.stop import StopMatcher


class TextAssembly:
    """Makes text of tokens.

    Where nobody needs the text before the end (no stop strings, no streaming), tokens are only kept, and decoded once.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        context_ids: Sequence[int] = (),
        stop_strings: tuple[str, ...] = (),
        eager: bool = False,
    ) -> None:
        """Makes the text after `context_ids`.

        Args:
            decode: Token ids to text.
            context_ids: Tokens that the text continues.
            stop_strings: Strings that end it.
            eager: Whether pieces are wanted as tokens arrive.
        """
        self._decode = decode
        self._context_ids = context_ids
        self._detokenizer = Detokenizer(decode, context_ids)
        self._stop = StopMatcher(stop_strings)
        self._eager = eager or bool(stop_strings)
        self._pending_ids: list[int] = []
        self._pieces: list[str] = []
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Takes the next token and says whether a stop string is complete with it."""
        if not self._eager:
            self._pending_ids.append(token_id)
            return False
        piece, stopped = self._stop.push(self._detokenizer.push((token_id,)))
        if piece:
            self._pieces.append(piece)
        return stopped

    def take(self) -> str:
        """Returns the text that has appeared since the last call."""
        taken = self._pieces[self._num_taken :]
        self._num_taken = len(self._pieces)
        return "".join(taken)

    def whole(self, token_ids: Sequence[int]) -> str:
        """Returns what `token_ids` read as in the same context, whatever was pushed, and whatever would stop it."""
        return Detokenizer(self._decode, self._context_ids).push(token_ids)

    def finish(self) -> str:
        """Returns the whole text: there are no more tokens."""
        if self._pending_ids:
            self._pieces.append(self._detokenizer.push(self._pending_ids))
            self._pending_ids = []
        if held := self._stop.finish():
            self._pieces.append(held)
        return "".join(self._pieces)
