"""Waiting for what another task or thread does."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds; fails where it does not within half a minute."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)
