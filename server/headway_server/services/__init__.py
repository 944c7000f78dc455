"""Services, independent of the transport: one servicer per file, error statuses, and methods as procedures."""

from headway_server.services.open_inference import Statistics
from headway_server.services.procedure import Procedure, StreamedCall, StreamedCalls, procedures_of
from headway_server.services.registry import make_procedures, service_abilities, service_descriptors
from headway_server.services.status import to_status

__all__ = [
    "Procedure",
    "Statistics",
    "StreamedCall",
    "StreamedCalls",
    "make_procedures",
    "procedures_of",
    "service_abilities",
    "service_descriptors",
    "to_status",
]
