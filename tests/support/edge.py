"""Applications with a door, and the edge of a server whose services a test adds one by one."""

from typing import Any

from google.protobuf import descriptor_pool

from headway_server.services import procedures_of
from headway_server.services.application import Application
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost
from headway_server.serving.peer_waits import PeerWaits, WaitLimits
from headway_server.settings import ServerSettings
from headway_server.transports.grpc import GrpcServer
from headway_server.transports.grpc.interceptor import CallInterceptor


def make_interceptor(
    servicers: dict[str, object], calls: Calls | None = None, *, max_request_bytes: int = 2**20
) -> CallInterceptor:
    """What gives gRPC the methods of servicers, by the names of their services, and holds their calls to `calls`."""
    unlimited = WaitLimits(timeout_s=0, max_slow=100)
    callers = PeerWaits(requests=unlimited, answers=unlimited, max_lasting=100, max_lasting_per_connection=10)
    procedures = {}
    for name, servicer in servicers.items():
        service = descriptor_pool.Default().FindServiceByName(f"headway.v1.{name}")
        procedures |= procedures_of(service, servicer, max_bytes=max_request_bytes, max_text_bytes=max_request_bytes)
    return CallInterceptor(calls or Calls(), callers, procedures)


def make_application(host: ModelHost, settings: ServerSettings, **options: Any) -> Application:
    """An application that answers over gRPC."""
    application = Application(host, settings, **options)
    application.doors.append(GrpcServer(application))
    return application
