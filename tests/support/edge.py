"""The edge of a server whose services a test adds one by one."""

from headway_server.serving.callers import Callers, WaitLimits
from headway_server.serving.calls import Calls
from headway_server.transports.grpc.interceptor import CallInterceptor

SERVICES = (
    "GenerationService",
    "TranslationService",
    "TextToTextService",
    "TextClassificationService",
    "ImageClassificationService",
)


def make_interceptor(calls: Calls | None = None, *, max_request_bytes: int = 2**20) -> CallInterceptor:
    """An interceptor for these services, which holds their calls to `calls`."""
    unlimited = WaitLimits(timeout_s=0, max_slow=100)
    callers = Callers(requests=unlimited, answers=unlimited, max_lasting=100, max_lasting_per_connection=10)
    return CallInterceptor(
        calls or Calls(), callers, max_request_bytes={f"headway.v1.{name}": max_request_bytes for name in SERVICES}
    )
