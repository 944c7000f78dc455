"""A Ray of two nodes in this machine, with a store on Ray Serve: takes flags of `headway-server` and says its line.

TESTED_SERVER=tests/support/ray_server.py pytest tests/integration/test_every_rpc.py
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, gRPCOptions

import headway_ray

_STORE_BYTES = 128 * 2**20
_NUM_CPUS = 8
"""That each node declares; it has those of the machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_cluster(num_nodes: int = 2) -> Iterator[tuple[str, str]]:
    """Runs Ray and its Serve; yields the addresses of the proxies of gRPC and HTTP."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    node = {"num_cpus": _NUM_CPUS, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=_NUM_CPUS, object_store_memory=_STORE_BYTES)
        ray.init(address=cluster.address, logging_level="error", log_to_driver=False, namespace="headway")
        grpc_port, http_port = free_port(), free_port()
        serve.start(
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=["headway_ray:add_services"]),
            http_options=HTTPOptions(port=http_port),
        )
        yield f"127.0.0.1:{grpc_port}", f"127.0.0.1:{http_port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def deploy(**arguments: object) -> None:
    """Deploys a store, and waits until it answers."""
    given: Mapping[str, str] = {name.replace("_", "-"): str(value) for name, value in arguments.items()}
    serve.run(headway_ray.app(given))


def main() -> None:
    """Serves until SIGTERM."""
    logging.disable(logging.WARNING)
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    stop = threading.Event()
    with running_cluster() as (address, http):
        deploy(**{name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()})
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        sys.stdout.write(f"headway-ray ready on {address} http={http}\n")
        sys.stdout.flush()
        stop.wait()


if __name__ == "__main__":
    main()
