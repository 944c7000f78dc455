"""Functions that may hang, such as reads from a network mount, each in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run_in_own_thread(function: Callable[[], _Result], *, name: str) -> asyncio.Future[_Result]:
    """Runs a function that may hang, such as a read from a network mount, in its own thread.

    Unlike an executor's thread, a hanging one blocks neither other work nor the exit of the process.

    Args:
        function: What to run.
        name: Of the thread, for the log.

    Returns: A future of the result or the error, a library's panic included. Cancelling it leaves the thread running.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()
    job = [function]
    del function  # so that no reference to the function is left here once the future is done

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
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(finish, settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
