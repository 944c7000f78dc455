"""Object detection."""

from __future__ import annotations

from headway_server.bundles import Bundle, demanded
from headway_server.observers import Observer
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.joined import JoinedDetector
from headway_server.tasks.detection.model import ObjectDetector
from headway_server.tasks.detection.zero_shot import ZeroShotDetector


def load_detector(bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer) -> ObjectDetector:
    """Loads a detector of labels of its own or of the caller's; errors are those of a `Loader`."""
    kinds = {"fixed": ObjectDetector, "embedded": ZeroShotDetector, "joined": JoinedDetector}
    return kinds[demanded(bundle.manifest.detection).labels].load(bundle, runtime, settings, observer)
