"""What access control costs a call on the event loop: python -m benchmarks.access.

Times `Calls.identify` and `Calls.answer` around nothing, in microseconds of one core: without an access file, with an
API key, with a key that has every budget, and with a certificate's name. Prints the least of several rounds; the last
line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from headway_server.bundles import Task
from headway_server.serving.access import Access, AccessFile, format_grant, new_key
from headway_server.serving.calls import Calls

_CALLS, _ROUNDS = 10_000, 5
_CERTIFICATE = "search.example.org"


async def _cost_us(calls: Calls, metadata: list[tuple[str, str]], names: tuple[str, ...] = ()) -> float:
    """Returns the microseconds of a call that finds one model."""
    least_s = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            rights = calls.identify("/m", metadata=metadata, certificate_names=names)
            async with calls.answer("/m", metadata=metadata, caller="127.0.0.1", rights=rights) as call:
                if call.rights is not None:
                    call.rights.check_model(Task.GENERATION, "model")
        least_s = min(least_s, time.perf_counter() - began)
    return round(least_s / _CALLS * 1e6, 2)


async def _measure() -> dict[str, float]:
    key = new_key()
    scopes = {"scopes": ["model:*"]}
    budgets = {"calls_per_s": 1e9, "concurrency": 9, "tokens_per_minute": 10**12}
    plain = AccessFile.parse(
        f'[certificates."{_CERTIFICATE}"]\nscopes = ["model:*"]\n' + format_grant("one", key, scopes), "plain"
    )
    full = AccessFile.parse(format_grant("one", key, scopes | budgets), "full")
    anonymous = [("user-agent", "grpc-python/1.85")]
    metadata = [*anonymous, ("authorization", f"Bearer {key}")]
    return {
        "open": await _cost_us(Calls(), anonymous),
        "key": await _cost_us(Calls(access=Access(plain)), metadata),
        "key_with_budgets": await _cost_us(Calls(access=Access(full)), metadata),
        "certificate": await _cost_us(Calls(access=Access(plain)), anonymous, (_CERTIFICATE,)),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"us_per_call": asyncio.run(_measure())}) + "\n")
