"""Tasks: what each kind of training reads, minimises and measures."""

from headway_training.tasks.base import Task, TrainingBatch
from headway_training.tasks.factory import make_task

__all__ = ["Task", "TrainingBatch", "make_task"]
