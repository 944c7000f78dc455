"""Object detection."""

from __future__ import annotations

from headway_server.bundles import Bundle, demanded
from headway_server.observers import Observer
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.model import ObjectDetector
from headway_server.tasks.detection.zero_shot import ZeroShotDetector


def load_detector(bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer) -> ObjectDetector:
    """Loads a detector of labels of its own or of the caller's; errors are those of a `Loader`."""
    is_fixed = demanded(bundle.manifest.detection).labels == "fixed"
    return (ObjectDetector if is_fixed else ZeroShotDetector).load(bundle, runtime, settings, observer)
