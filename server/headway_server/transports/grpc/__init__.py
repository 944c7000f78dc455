"""gRPC: the server, what happens at its edge, and one servicer a file."""

from headway_server.transports.grpc.oip.statistics import Statistics
from headway_server.transports.grpc.server import HeadwayServer, address_problem, format_address

__all__ = ["HeadwayServer", "Statistics", "address_problem", "format_address"]
