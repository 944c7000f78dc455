"""The gRPC server and its interceptor."""

from headway_server.transports.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
