"""The edge of a server whose services a test adds one by one."""

from headway_server.serving.calls import Calls
from headway_server.transports.grpc.interceptor import CallInterceptor

SERVICES = ("GenerationService", "TranslationService", "TextClassificationService", "ImageClassificationService")


def make_interceptor(calls: Calls | None = None, *, max_request_bytes: int = 2**20) -> CallInterceptor:
    """An interceptor for these services, which holds their calls to `calls`."""
    return CallInterceptor(
        calls or Calls(), max_request_bytes={f"headway.v1.{name}": max_request_bytes for name in SERVICES}
    )
