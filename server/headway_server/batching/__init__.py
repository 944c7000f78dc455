"""Batches for stateless models: classifiers of text and of images."""

from headway_server.batching.model import (
    CallTimings,
    Classification,
    ClassifiedImage,
    ClassifiedText,
    ImageClassifier,
    ScoredLabel,
    TextClassifier,
)
from headway_server.batching.settings import BatchingSettings

__all__ = [
    "BatchingSettings",
    "CallTimings",
    "Classification",
    "ClassifiedImage",
    "ClassifiedText",
    "ImageClassifier",
    "ScoredLabel",
    "TextClassifier",
]
