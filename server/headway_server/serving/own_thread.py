"""Work that may hang, such as reading a file of a network mount: it runs apart, where it keeps nobody waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run_apart(function: Callable[[], _Result], *, name: str) -> asyncio.Future[_Result]:
    """Runs a function that may hang, such as one that reads a file of a network mount, in a thread of its own.

    Unlike the threads of an executor, one that hangs keeps neither other work nor the end of the process waiting.

    Args:
        function: What to run.
        name: Of the thread, for the log.

    Returns:
        What will have its result or its error, whatever that is: a panic of a library too. Cancelling it leaves the
        thread running.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    job = [function]
    del function  # whoever waits may count on it that nothing here holds what the function belongs to

    def finish(settle: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            settle(outcome)

    def run() -> None:
        settle: Callable[[Any], None] = future.set_result
        outcome: object
        try:
            outcome = job.pop()()
        except BaseException as error:
            settle, outcome = future.set_exception, error
        with suppress(RuntimeError):  # the loop has ended meanwhile, and nobody waits
            loop.call_soon_threadsafe(finish, settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
