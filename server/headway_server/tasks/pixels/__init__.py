"""Maps of an image's pixels: labels and depth."""

from __future__ import annotations

from headway_server.bundles import Bundle, demanded
from headway_server.observers import Observer
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.pixels.model import PixelClassifier
from headway_server.tasks.pixels.zero_shot import ZeroShotPixelClassifier


def load_pixel_classifier(
    bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer
) -> PixelClassifier | ZeroShotPixelClassifier:
    """Loads a model that labels pixels with labels of its own or of the caller; errors are those of a `Loader`."""
    if demanded(bundle.manifest.semantic_segmentation).labels == "fixed":
        return PixelClassifier.load(bundle, runtime, settings, observer)
    return ZeroShotPixelClassifier.load(bundle, runtime, settings, observer)
