"""Errors of training.

TrainingError             what this package raises for its user; the message says what to do
├── RecipeError           a recipe, or a `--set`, that cannot be used: names the key
├── DataError             data that is missing or malformed: names the file, the line and what is expected
│   ├── MissingDataError  files that are not there: names the command that gets them
│   └── DownloadError     a download that failed or whose checksum is wrong
├── CheckpointError       a folder that is not a checkpoint, is of another schema, or does not fit its weights
├── ResumeError           a run that cannot be resumed, or a folder already taken by one
├── EvaluationError       a served model that cannot be measured: says why, and what can be
└── StoppedError          a signal ended the run early; its state is saved

Model configurations raise `ValueError`; `headway_training.recipe` turns it into a `RecipeError`.
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
    """A download failed or brought something else than expected."""


class CheckpointError(TrainingError):
    """A folder cannot be read as a checkpoint."""


class ResumeError(TrainingError):
    """A run cannot be resumed."""


class EvaluationError(TrainingError):
    """A served model cannot be measured."""


class StoppedError(TrainingError):
    """A signal ended the run early; its state is saved."""
