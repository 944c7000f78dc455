"""The threads on which texts and images are prepared, so that the event loop does not wait for them.

Short texts, long texts and images have threads of their own: decoding a picture takes a thousand times as long as
encoding a headline, and so does a text of a hundred pages; a headline must not wait behind either. Each kind has one
pool for all models, which bounds what it takes from the cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

from headway_server.runtime import usable_cores

LONG_TEXT: Final = 2**16
"""Characters past which a text is long; so many are encoded in some tens of milliseconds."""
_MAX_THREADS: Final = 2


def text_pool(num_characters: int = 0) -> ThreadPoolExecutor:
    """Returns the process's threads for texts of so many characters together; tokenizers release the GIL in them."""
    return _long_text_pool() if num_characters > LONG_TEXT else _short_text_pool()


@cache
def image_pool() -> ThreadPoolExecutor:
    """Returns the process's threads for images; decoders release the GIL in them."""
    return _pool("images", _MAX_THREADS)


@cache
def _short_text_pool() -> ThreadPoolExecutor:
    return _pool("texts", _MAX_THREADS)


@cache
def _long_text_pool() -> ThreadPoolExecutor:
    return _pool("long-texts", 1)


def _pool(name: str, max_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(usable_cores(), max_threads), thread_name_prefix=f"preprocessing-{name}")
