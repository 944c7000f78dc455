"""Callers of a peer that speaks HTTP: python call_http.py URL INPUTS_FILE CALLERS SECONDS MIN_ANSWERS.

INPUTS_FILE holds a JSON list of request bodies. Prints the figures of `closed_loop.measure_callers` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.append(str(Path(__file__).resolve().parents[1]))
from closed_loop import measure_callers

START_TIMEOUT_S = 120.0


class _NotReadyError(RuntimeError):
    """The server is not up yet, or has broken."""


async def _measure(url: str, bodies: list[bytes], callers: int, seconds: float, min_answers: int) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def ask(number: int) -> None:
            async with session.post(url, data=bodies[number % len(bodies)]) as response:
                answer = await response.read()
                if response.status >= 500:
                    raise _NotReadyError(f"status {response.status}: {answer[:200]!r}")
                if response.status != 200:
                    raise RuntimeError(f"status {response.status}: {answer[:200]!r}")

        await _wait_until_ready(ask)
        return await measure_callers(ask, num_callers=callers, seconds=seconds, min_answers=min_answers)


async def _wait_until_ready(ask: Any) -> None:
    begun_s = time.monotonic()
    while True:
        try:
            await ask(0)
        except (aiohttp.ClientError, _NotReadyError):
            if time.monotonic() - begun_s > START_TIMEOUT_S:
                raise
            await asyncio.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    requests = [json.dumps(body).encode() for body in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))]
    print(
        json.dumps(asyncio.run(_measure(sys.argv[1], requests, int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))))
    )
