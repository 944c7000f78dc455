"""Errors of training.

TrainingError             every error for the user; the message says what to do
├── RecipeError           a recipe or a setting cannot be used: names the key
├── DataError             data is missing or malformed: names the file, the line and what is expected
│   ├── MissingDataError  files of a data set are missing: names the command that gets them
│   └── DownloadError     a download failed, or its checksum is wrong
├── CheckpointError       a folder is not a checkpoint, has another schema, or does not fit its weights
├── ResumeError           a run cannot be resumed, or its folder is taken by another
├── EvaluationError       a served model cannot be measured: says why, and what can be
└── StoppedError          a signal ended the run early; its state is saved

Model configurations raise `ValueError`; `headway_training.run` turns it into a `RecipeError`.
"""

from __future__ import annotations


class TrainingError(Exception):
    """Base of every error this package raises; its message is for the user."""


class RecipeError(TrainingError):
    """A recipe or a setting cannot be used."""


class DataError(TrainingError):
    """Data is missing or malformed."""


class MissingDataError(DataError):
    """Files of a data set are not there."""


class DownloadError(DataError):
    """A download failed, or its checksum is wrong."""


class CheckpointError(TrainingError):
    """A folder cannot be read as a checkpoint, or its weights do not fit."""


class ResumeError(TrainingError):
    """A run cannot be resumed, or its folder is taken."""


class EvaluationError(TrainingError):
    """A served model cannot be measured."""


class StoppedError(TrainingError):
    """A signal ended the run early; its state is saved."""
