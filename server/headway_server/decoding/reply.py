"""The caller's end of a sequence, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway_server.decoding.sequence import SequenceResult, TokenLogProbability


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What has appeared since the last piece."""

    text: str
    """Whole characters, possibly none."""
    num_new_tokens: int
    """Tokens produced so far."""
    tokens: tuple[TokenLogProbability, ...] = ()
    """Those produced since the last piece, where log-probabilities were asked for."""


class Reply:
    """Receives what the engine hands out for one sequence. For the event loop alone."""

    def __init__(self) -> None:
        self.result: asyncio.Future[SequenceResult] = asyncio.get_running_loop().create_future()
        self._text: list[str] = []
        self._num_new_tokens = 0
        self._tokens: list[TokenLogProbability] = []
        self._arrival = asyncio.Event()

    def add(self, text: str, num_new_tokens: int, tokens: tuple[TokenLogProbability, ...] = ()) -> None:
        """Takes text that has appeared."""
        self._text.append(text)
        self._tokens += tokens
        self._num_new_tokens = num_new_tokens
        self._arrival.set()

    def end(self, outcome: SequenceResult | BaseException) -> None:
        """Takes the end: a result, or the error instead."""
        if not self.result.done():  # cancelled, if the caller has gone
            if isinstance(outcome, BaseException):
                self.result.set_exception(outcome)
            else:
                self.result.set_result(outcome)
        self._arrival.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields pieces as they appear; a slow reader gets several joined into one.

        Raises:
            Exception: What ended the sequence instead of a result.
        """
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            ended = self.result.done()  # before the reader takes its time: what comes meanwhile is the next round's
            if self._text:
                text, self._text = "".join(self._text), []
                tokens, self._tokens = tuple(self._tokens), []
                yield Piece(text=text, num_new_tokens=self._num_new_tokens, tokens=tokens)
            if ended:
                self.result.result()
                return

    def __repr__(self) -> str:
        return f"Reply({'ended' if self.result.done() else 'open'}, {self._num_new_tokens} tokens)"
