"""A gRPC server that gives back what it got, in a process of its own: what the transport alone can do.

python echo.py      # prints its address, and ends when standard input does
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from closed_loop import measure_callers

_METHOD = "/headway.benchmark.Echo/Echo"


@contextmanager
def running_echo() -> Iterator[str]:
    """Runs the server and gives its address."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=10)


def measure_echo(address: str, payloads: list[bytes], *, num_callers: int, seconds: float) -> dict[str, Any]:
    """Sends payloads in turn and waits for each to come back."""

    async def measure() -> dict[str, Any]:
        async with grpc.aio.insecure_channel(address) as channel:
            echo = channel.unary_unary(_METHOD)

            async def ask(number: int) -> None:
                await echo(payloads[number % len(payloads)])

            return await measure_callers(ask, num_callers=num_callers, seconds=seconds)

    return asyncio.run(measure())


async def _give_back(request: bytes, _: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return request


async def _serve() -> None:
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_give_back)
    _, service, method = _METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_serve())
