"""gRPC: the server, and what happens at its edge."""

from headway_server.transports.grpc.doors import Doors, format_address
from headway_server.transports.grpc.server import Beside, HeadwayServer, address_problem

__all__ = ["Beside", "Doors", "HeadwayServer", "address_problem", "format_address"]
