"""Asks a server of this machine whether it serves: the image's health check.

Exit status 0 when `grpc.health.v1` answers SERVING for the whole server, 1 otherwise. It needs what the server needs,
so the image holds no second gRPC client.
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, timeout_s: float) -> bool:
    """Whether the server at `address` (host:port) answers SERVING within `timeout_s` seconds."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error.code().name}: {error.details()}\n")  # a call error carries both
            return False
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    sys.stdout.write(f"{address}: {status}\n")
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # With encryption the server has a port of its own for probes.
    port = os.environ.get("HEADWAY_HEALTH_PORT") or os.environ.get("HEADWAY_PORT", "")
    if not port.isdigit():  # Kubernetes puts tcp://... there for a Service of that name; the server ignores it too
        port = "50051"
    own_address = f"127.0.0.1:{port}"
    parser.add_argument("--address", default=own_address, help="host:port (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="seconds to wait (default: %(default)s)")
    arguments = parser.parse_args()
    sys.exit(0 if is_serving(arguments.address, arguments.timeout_s) else 1)
