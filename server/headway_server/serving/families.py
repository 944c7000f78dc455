"""The one table of the tasks that are served: what loads a bundle of each, and what a loaded model offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Final, Protocol, TypeAlias, cast

from headway_server.bundles import Bundle, Precision, Task
from headway_server.observers import ModelUsage, Observer
from headway_server.runtime import Device, Runtime
from headway_server.settings import ServerSettings


class ServedModel(Protocol):
    """What every loaded model offers, whatever its task."""

    bundle: Bundle
    precision: Precision
    device: Device

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless the model has ended by itself."""

    def stalled_s(self) -> float:
        """Returns for how many seconds what is running has made no progress; 0.0 where nothing runs.

        A piece of work is a step of an engine or a run of a batch. Called on the event loop: it takes no lock that a
        run may hold.
        """

    def usage(self) -> ModelUsage:
        """Returns how much of the model is in use. Called from any thread: it takes no lock that a run may hold."""

    def start(self) -> None:
        """Starts threads and tasks; called with the event loop running."""

    def close(self) -> bool:
        """Stops; what still waits fails with DrainingError.

        May be called from any thread. Waits for what is running, `CLOSE_TIMEOUT_S` at most; False where a thread did
        not end in that time and was left behind (`join_threads`).
        """


Loader: TypeAlias = Callable[[Bundle, Runtime, ServerSettings, Observer], ServedModel]
"""Loads a bundle in the variant that the settings and the runtime ask for, and runs it once.

Raises:
    BundleError: The bundle does not hold what its manifest says, or cannot be run.
    MemoryUnavailableError: The model does not fit into memory.
    RuntimeUnavailableError: The bundle has no variant for this runtime, or not the one that was asked for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a task is served. What its bundles must hold is the manifest's part (`bundles/manifest.py`)."""

    loader: str
    """Name of a `Loader`, `module:object`. It is imported with the first bundle of the task, so that nobody pays for
    families that are not used, and so that this layer knows none of them."""

    def load(self, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer) -> ServedModel:
        """Loads a bundle of this family; errors are those of `Loader`."""
        return cast("Loader", resolve_name(self.loader))(bundle, runtime, settings, observer)


FAMILIES: Final[Mapping[Task, Family]] = {
    Task.GENERATION: Family(loader="headway_server.tasks.generation.model:GenerationModel.load"),
    Task.TRANSLATION: Family(loader="headway_server.tasks.text_to_text.translation:TranslationModel.load"),
    Task.TEXT_TO_TEXT: Family(loader="headway_server.tasks.text_to_text.model:TextToTextModel.load"),
    Task.CAPTIONING: Family(loader="headway_server.tasks.captioning.model:CaptioningModel.load"),
    Task.TRANSCRIPTION: Family(loader="headway_server.tasks.speech.model:SpeechModel.load"),
    Task.TEXT_CLASSIFICATION: Family(loader="headway_server.tasks.text.classifier:TextClassifier.load"),
    Task.TOKEN_CLASSIFICATION: Family(loader="headway_server.tasks.tokens.classifier:TokenClassifier.load"),
    Task.IMAGE_CLASSIFICATION: Family(loader="headway_server.tasks.images.classifier:ImageClassifier.load"),
    Task.TEXT_EMBEDDING: Family(loader="headway_server.tasks.text.model:TextModel.load"),
    Task.TEXT_SCORING: Family(loader="headway_server.tasks.text.scorer:TextScorer.load"),
    Task.IMAGE_EMBEDDING: Family(loader="headway_server.tasks.images.classifier:ImageClassifier.load"),
    Task.SEGMENTATION: Family(loader="headway_server.tasks.segmentation.model:SegmentationModel.load"),
    Task.IMAGE_GENERATION: Family(loader="headway_server.tasks.image_generation.model:ImageGenerationModel.load"),
    Task.SPEECH_SYNTHESIS: Family(loader="headway_server.tasks.synthesis.model:SynthesisModel.load"),
}
