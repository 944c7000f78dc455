"""The threads on which text and images are prepared, so that the event loop does not wait for them.

Texts and images have threads of their own: decoding a picture takes a thousand times as long as encoding a headline,
which must not wait behind it. Each kind has one pool for all models, which bounds what it takes from the cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

from headway_server.runtime import usable_cores

_MAX_THREADS = 2


@cache
def text_pool() -> ThreadPoolExecutor:
    """Returns the process's threads for texts; tokenizers release the GIL in them."""
    return _pool("texts")


@cache
def image_pool() -> ThreadPoolExecutor:
    """Returns the process's threads for images; decoders release the GIL in them."""
    return _pool("images")


def _pool(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(usable_cores(), _MAX_THREADS), thread_name_prefix=f"preprocessing-{name}")
