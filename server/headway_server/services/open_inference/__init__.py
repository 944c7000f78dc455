"""The Open Inference Protocol: calls with named tensors, from clients independent of this server."""

from headway_server.services.open_inference.refusals import refusals_of
from headway_server.services.open_inference.service import PROBES, OpenInferenceService
from headway_server.services.open_inference.statistics import Statistics
from headway_server.services.open_inference.tasks import tensors_of

__all__ = ["PROBES", "OpenInferenceService", "Statistics", "refusals_of", "tensors_of"]
