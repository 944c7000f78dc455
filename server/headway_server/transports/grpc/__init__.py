"""gRPC: the server, and what happens at its edge."""

from headway_server.transports.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
