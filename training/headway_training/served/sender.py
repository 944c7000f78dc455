"""Sends many requests to a server, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """Cuts inputs into requests and keeps some of these on their way."""

    batch_size: int = 16
    """Inputs of a request."""
    concurrency: int = 4
    """Requests on their way at a time."""
    begin: Callable[[int], None] = lambda _: None
    """Is told how many inputs are going to be sent."""
    advance: Callable[[int], None] = lambda _: None
    """Is told how many more of them have been answered."""

    def send(
        self, inputs: Sequence[Item], call: Callable[[Sequence[Item]], Sequence[Result]], *, quiet: bool = False
    ) -> list[Result]:
        """Answers every input, in order.

        Args:
            inputs: What is asked.
            call: Makes one request of some inputs; it is called from several threads.
            quiet: Whether `begin` and `advance` are left out.

        Raises:
            Exception: What `call` raised first; no request is begun after it.
        """
        starts = range(0, len(inputs), self.batch_size)
        answers: dict[int, Sequence[Result]] = {}
        waiting = iter(starts)
        running: dict[Future[Sequence[Result]], int] = {}
        if not quiet:
            self.begin(len(inputs))
        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            while True:
                while len(running) < self.concurrency and (start := next(waiting, None)) is not None:
                    running[pool.submit(call, inputs[start : start + self.batch_size])] = start
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    start = running.pop(future)
                    answers[start] = future.result()
                    if not quiet:
                        self.advance(len(answers[start]))
        return [result for start in starts for result in answers[start]]
