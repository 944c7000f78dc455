"""gRPC: the server, what happens at its edge, and one servicer a file."""

from headway_server.transports.grpc.doors import Doors, format_address
from headway_server.transports.grpc.oip import Statistics
from headway_server.transports.grpc.server import HeadwayServer, address_problem

__all__ = ["Doors", "HeadwayServer", "Statistics", "address_problem", "format_address"]
