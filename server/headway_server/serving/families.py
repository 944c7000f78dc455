"""How a bundle of each task becomes a model that can be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from headway_server.bundles import Bundle, Precision, Task
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

    def stalled_s(self) -> float:
        """Returns for how many seconds what is running has made no progress; 0.0 where nothing runs.

        A piece of work is a step of an engine or a run of a batch. Called on the event loop: it takes no lock that a
        run may hold.
        """

    def start(self) -> None:
        """Starts threads and tasks; called with the event loop running."""

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, for what was taken."""

    def close(self) -> bool:
        """Stops; what still waits fails with DrainingError.

        May be called from any thread. Waits for what is running, `CLOSE_TIMEOUT_S` at most; False where a thread did
        not end in that time and was left behind (`join_threads`).
        """


Loader: TypeAlias = Callable[[Bundle, Runtime, ServerSettings], ServedModel]


def _load_generation(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return GenerationModel.load(bundle, runtime, settings.engine, precision=settings.precision)


def _load_translation(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TranslationModel.load(bundle, runtime, settings.engine, precision=settings.precision)


def _load_text_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TextClassifier.load(bundle, runtime, settings)


def _load_token_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return TokenClassifier.load(bundle, runtime, settings)


def _load_image_classifier(bundle: Bundle, runtime: Runtime, settings: ServerSettings) -> ServedModel:
    return ImageClassifier.load(bundle, runtime, settings)


LOADERS: Mapping[Task, Loader] = {
    Task.GENERATION: _load_generation,
    Task.TRANSLATION: _load_translation,
    Task.TEXT_CLASSIFICATION: _load_text_classifier,
    Task.TOKEN_CLASSIFICATION: _load_token_classifier,
    Task.IMAGE_CLASSIFICATION: _load_image_classifier,
}
