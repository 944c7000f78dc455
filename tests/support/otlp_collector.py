"""A collector of traces, as small as one can be: takes spans by OTLP over gRPC and keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it was sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[trace_pb2.Span] = []
        self.resources: list[dict[str, str]] = []
        self._arrived = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802 (the protocol's name)
        """The one call of the protocol."""
        with self._arrived:
            for of_resource in request.resource_spans:
                self.resources.append({item.key: item.value.string_value for item in of_resource.resource.attributes})
                for of_scope in of_resource.scope_spans:
                    self.spans += of_scope.spans
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, count: int, timeout_s: float = 20) -> list[trace_pb2.Span]:
        """Returns the spans once there are so many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.spans) >= count, timeout_s), self.spans
            return list(self.spans)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Gives a collector that listens on a free port of this machine."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    """The attributes of a span that are texts or whole numbers."""
    values = {item.key: item.value for item in span.attributes}
    return {key: value.string_value or value.int_value for key, value in values.items()}
