"""Asks a server of this machine whether it serves: health_probe.py [HOST:PORT]; the image's health check.

Exit status 0 when `grpc.health.v1` answers SERVING for the whole server, 1 otherwise.
"""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def problem() -> str | None:
    """Returns why the server is not serving; None where it is."""
    # With encryption the server has a port of its own for probes.
    own_port = os.environ.get("HEADWAY_HEALTH_PORT") or os.environ.get("HEADWAY_PORT", "")
    if not own_port.isdigit():  # Kubernetes puts tcp://... there for a Service of that name; the server ignores it too
        own_port = "50051"
    address = sys.argv[1] if len(sys.argv) > 1 else f"127.0.0.1:{own_port}"
    try:
        with grpc.insecure_channel(address) as channel:
            status = (
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
            )
    except grpc.RpcError as error:
        return f"{address}: {error.details()}"
    return None if status == health_pb2.HealthCheckResponse.SERVING else f"{address}: not serving"


if __name__ == "__main__":
    sys.exit(problem())
