"""gRPC: the server, what happens at its edge, and one servicer a file."""

from headway_server.transports.grpc.doors import Doors, format_address
from headway_server.transports.grpc.oip import Statistics
from headway_server.transports.grpc.server import Beside, HeadwayServer, address_problem, service_descriptors
from headway_server.transports.grpc.status import to_status

__all__ = [
    "Beside",
    "Doors",
    "HeadwayServer",
    "Statistics",
    "address_problem",
    "format_address",
    "service_descriptors",
    "to_status",
]
