"""Thread pools for preprocessing of requests, texts, images and audio, off the event loop.

Short texts, long texts and images have separate pools. An image, or a text of a hundred pages, takes a thousand times
as long as a headline, which must not wait behind them. Each kind has one pool for all models, which bounds its use of
the cores. Within a pool callers take turns, so much work of one caller delays no other.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache, partial
from threading import Lock
from typing import Any, Final, ParamSpec, TypeVar

from headway_server.observers import current_call
from headway_server.runtime import usable_cores

LONG_TEXT: Final = 2**16
"""Length of a long text in characters; encoding takes some tens of milliseconds."""
_MAX_THREADS: Final = 2

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class FairPool(Executor):
    """Threads that serve callers round-robin, and each caller first in, first out.

    Attributes:
        num_threads: Limit of threads.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        """Starts without threads; they are named after `name`."""
        self._name = name
        self.num_threads = max_threads
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        """Queued work by caller; the first caller is next."""

    def submit(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Queues a function for the current call's caller; returns its future."""
        future: Future[Result] = Future()
        call = current_call()
        caller = "" if call is None else call.caller
        with self._lock:
            self._waiting.setdefault(caller, deque()).append((future, partial(function, *args, **kwargs)))
        self._threads.submit(self._work)  # one for each function; the choice of the function comes when it runs
        return future

    def _work(self) -> None:
        with self._lock:
            caller, pieces = next(iter(self._waiting.items()))
            future, work = pieces.popleft()
            if pieces:
                self._waiting.move_to_end(caller)
            else:
                del self._waiting[caller]
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # a panic too, else the caller would wait for ever
            future.set_exception(error)
        finally:
            del future, work  # an error's traceback refers to this frame

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def __repr__(self) -> str:
        with self._lock:
            waiting = {caller: len(pieces) for caller, pieces in self._waiting.items()}
        return f"FairPool({self._name}, waiting: {waiting})"


def text_pool(num_characters: int = 0) -> FairPool:
    """Returns the process's pool for texts of a total number of characters; tokenizers release the GIL."""
    return _long_text_pool() if num_characters > LONG_TEXT else _short_text_pool()


async def off_loop(size: int, make: Callable[[], Result], *, most_on_loop: int) -> Result:
    """Returns what `make` returns, called on the event loop for a size of at most `most_on_loop`, else in a thread."""
    if size <= most_on_loop:
        return make()
    return await asyncio.get_running_loop().run_in_executor(text_pool(size), make)


@cache
def request_pool() -> FairPool:
    """Returns the process's pool for parsing large requests, of one thread."""
    return _pool("requests", 1)


@cache
def image_pool() -> FairPool:
    """Returns the process's pool for images; decoders release the GIL."""
    return _pool("images", _MAX_THREADS)


@cache
def audio_pool() -> FairPool:
    """Returns the process's pool for audio; decoders and NumPy release the GIL."""
    return _pool("audio", _MAX_THREADS)


@cache
def constraint_pool() -> FairPool:
    """Returns the process's pool for constraints; the library releases the GIL."""
    return FairPool("constraints", _MAX_THREADS)


@cache
def _short_text_pool() -> FairPool:
    return _pool("texts", _MAX_THREADS)


@cache
def _long_text_pool() -> FairPool:
    return _pool("long-texts", 1)


def _pool(name: str, max_threads: int) -> FairPool:
    return FairPool(f"preprocessing-{name}", min(usable_cores(), max_threads))
