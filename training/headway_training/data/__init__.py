"""Data: public data sets and the user's own files, read into examples and split into parts."""

from headway_training.data.examples import (
    LabeledImages,
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    Span,
    SpanLabeledTexts,
    Splits,
)
from headway_training.data.public import DATASETS, Dataset, RemoteFile, find_dataset
from headway_training.data.sources import OwnData, data_folder, read_splits

__all__ = [
    "DATASETS",
    "Dataset",
    "LabeledImages",
    "LabeledTexts",
    "MultiLabeledTexts",
    "OwnData",
    "ParallelTexts",
    "PlainText",
    "RemoteFile",
    "Span",
    "SpanLabeledTexts",
    "Splits",
    "data_folder",
    "find_dataset",
    "read_splits",
]
