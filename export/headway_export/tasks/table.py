"""The one table of tasks that are exported. What a model of a task is served by is in the server's own table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final, cast

from headway_server.bundles import Task

if TYPE_CHECKING:  # a task is imported with its first model: shared modules, which it is made of, read this table
    from headway_export.tasks.task import ExportTask

TASKS: Final[dict[Task, str]] = {
    Task.GENERATION: "headway_export.tasks.generation:Generation",
    Task.TRANSLATION: "headway_export.tasks.text_to_text:Translation",
    Task.TEXT_TO_TEXT: "headway_export.tasks.text_to_text:TextToText",
    Task.CAPTIONING: "headway_export.tasks.captioning:Captioning",
    Task.TEXT_CLASSIFICATION: "headway_export.tasks.text:TextClassification",
    Task.TOKEN_CLASSIFICATION: "headway_export.tasks.tokens:TokenClassification",
    Task.IMAGE_CLASSIFICATION: "headway_export.tasks.images:ImageClassification",
    Task.OBJECT_DETECTION: "headway_export.tasks.detection:ObjectDetection",
    Task.SEMANTIC_SEGMENTATION: "headway_export.tasks.pixels:PixelLabels",
    Task.DEPTH_ESTIMATION: "headway_export.tasks.pixels:PixelDepth",
    Task.SEGMENTATION: "headway_export.tasks.segmentation:PromptedSegmentation",
    Task.IMAGE_GENERATION: "headway_export.tasks.image_generation:ImageGeneration",
    Task.SPEECH_SYNTHESIS: "headway_export.tasks.speech_synthesis:SpeechSynthesis",
    Task.FLOW_SYNTHESIS: "headway_export.tasks.flow_synthesis:FlowSynthesis",
    Task.STAGED_SYNTHESIS: "headway_export.tasks.staged_synthesis:StagedSynthesis",
    Task.SPECTROGRAM_SYNTHESIS: "headway_export.tasks.spectrogram_synthesis:SpectrogramSynthesis",
    Task.DELAYED_SYNTHESIS: "headway_export.tasks.delayed_synthesis:DelayedSynthesis",
    Task.TRANSCRIPTION: "headway_export.tasks.transcription:Transcription",
    Task.CTC_TRANSCRIPTION: "headway_export.tasks.sounds:CtcTranscription",
    Task.AUDIO_CLASSIFICATION: "headway_export.tasks.sounds:AudioClassification",
    Task.VIDEO_CLASSIFICATION: "headway_export.tasks.videos:VideoClassification",
    Task.TEXT_SCORING: "headway_export.tasks.text:TextScoring",
    Task.QUESTION_ANSWERING: "headway_export.tasks.text:QuestionAnswering",
    Task.FILL_MASK: "headway_export.tasks.text:FillMask",
    Task.TEXT_EMBEDDING: "headway_export.tasks.text:TextEmbedding",
    Task.IMAGE_EMBEDDING: "headway_export.tasks.images:ImageEmbedding",
    Task.TENSORS: "headway_export.tasks.tensors:NamedTensors",
}
"""The `ExportTask` of each, `module:class`, in the order in which messages name them."""


def task_of(task: Task) -> ExportTask:
    """Returns what export does with the models of a task."""
    return _load(TASKS[task], task)


def tasks_where(holds: Callable[[ExportTask], bool]) -> list[Task]:
    """Returns the tasks of which something holds, in order."""
    return [task for task in TASKS if holds(task_of(task))]


@cache
def _load(name: str, task: Task) -> ExportTask:
    return cast("type[ExportTask]", resolve_name(name))(task)
