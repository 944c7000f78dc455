"""How a bundle of each task becomes a model that can be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from headway_server.bundles import Bundle, Precision, Task
from headway_server.preprocessing import ImageLimits
from headway_server.runtime import Device, Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.images.classifier import ImageClassifier
from headway_server.tasks.text.classifier import TextClassifier
from headway_server.tasks.tokens.classifier import TokenClassifier
from headway_server.tasks.translation.model import TranslationModel


class ServedModel(Protocol):
    """What every loaded model offers, whatever its task."""

    bundle: Bundle
    precision: Precision
    device: Device

    @property
    def is_alive(self) -> bool:
        """Whether calls are answered: from `start` to `close`, unless the model has ended by itself."""

    def start(self) -> None:
        """Starts threads and tasks; called with the event loop running."""

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, for what was taken."""

    def close(self) -> None:
        """Stops; what still waits fails. May be called from any thread and waits for the step that runs."""


Loader: TypeAlias = Callable[[Bundle, Runtime, ServerSettings], ServedModel]


def _load_generation(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return GenerationModel.load(bundle, runtime, settings.engine, precision=settings.precision)


def _load_translation(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TranslationModel.load(bundle, runtime, settings.engine, precision=settings.precision)


def _load_text_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TextClassifier.load(bundle, runtime, settings.batching, precision=settings.precision)


def _load_token_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TokenClassifier.load(bundle, runtime, settings.batching, precision=settings.precision)


def _load_image_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    limits = ImageLimits(
        max_bytes=int(settings.max_image_mib * 2**20), max_pixels=int(settings.max_image_megapixels * 1e6)
    )
    return ImageClassifier.load(bundle, runtime, settings.batching, limits=limits, precision=settings.precision)


LOADERS: Mapping[Task, Loader] = {
    Task.GENERATION: _load_generation,
    Task.TRANSLATION: _load_translation,
    Task.TEXT_CLASSIFICATION: _load_text_classifier,
    Task.TOKEN_CLASSIFICATION: _load_token_classifier,
    Task.IMAGE_CLASSIFICATION: _load_image_classifier,
}
