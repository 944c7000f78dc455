"""A gRPC server that gives back what it got: what the transport alone can do.

python -m benchmarks.contestants.echo      # prints its address and runs until it is ended
"""

import asyncio
import sys
from typing import Any

import grpc

from benchmarks.caller import RAW_METHODS


async def _give_back(request: bytes, _: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return request


async def _serve() -> None:
    server = grpc.aio.server()
    _, service, method = RAW_METHODS["echo"].split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(_give_back)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
