"""The Open Inference Protocol: models called with named tensors, by clients that were not made for this server."""

from headway_server.services.open_inference.service import PROBES, OpenInferenceService
from headway_server.services.open_inference.statistics import Statistics

__all__ = ["PROBES", "OpenInferenceService", "Statistics"]
