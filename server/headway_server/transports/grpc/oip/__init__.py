"""The Open Inference Protocol: models called with named tensors, by clients that were not made for this server."""

from headway_server.transports.grpc.oip.service import ADMIN_METHODS, PROBES, SERVICE, OpenInferenceService
from headway_server.transports.grpc.oip.statistics import Statistics

__all__ = ["ADMIN_METHODS", "PROBES", "SERVICE", "OpenInferenceService", "Statistics"]
