"""Server reflection, versions v1 and v1alpha, which differ in the name of their package alone.

The library serves v1alpha. v1 is made of its description, and answered by the same servicer, as the bytes are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA: Final = reflection.SERVICE_NAME
_STABLE: Final = _ALPHA.replace("v1alpha", "v1")


def enable_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Serves reflection of these services, by full name, and of itself."""
    _describe_stable()
    names = [*sorted(services), _STABLE, _ALPHA]
    reflection.enable_server_reflection(names, server)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_STABLE, handlers),))


def _describe_stable() -> None:
    """Adds the messages of v1 to the descriptors of the process, unless another library has."""
    described = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    words = text_format.MessageToString(described).replace("v1alpha", "v1")
    file = text_format.Parse(words, descriptor_pb2.FileDescriptorProto())
    try:
        descriptor_pool.Default().FindFileByName(file.name)
    except KeyError:
        descriptor_pool.Default().Add(file)
