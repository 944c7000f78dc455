"""The threads on which text and images are prepared, so that the event loop never waits for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from headway_server.runtime.processor import usable_cores

_MAX_THREADS = 4


@lru_cache(maxsize=1)
def preprocessing_pool() -> ThreadPoolExecutor:
    """Returns the process's pool; tokenizers and image decoders release the GIL in it.

    One pool for all models bounds what decoding takes from the cores and, for images, from memory.
    """
    return ThreadPoolExecutor(min(usable_cores(), _MAX_THREADS), thread_name_prefix="preprocessing")
