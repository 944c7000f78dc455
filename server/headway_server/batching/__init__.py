"""Batches for stateless models: classifiers of text and of images."""

from headway_server.batching.embedder import EmbeddedImage, EmbeddedText
from headway_server.batching.image_classifier import ClassifiedImage, ImageClassifier
from headway_server.batching.model import CallTimings, Classification, ScoredLabel
from headway_server.batching.settings import BatchingSettings
from headway_server.batching.text_classifier import ClassifiedText, TextClassifier
from headway_server.batching.token_classifier import LabeledSpan, TaggedText, TokenClassifier

__all__ = [
    "BatchingSettings",
    "CallTimings",
    "Classification",
    "ClassifiedImage",
    "ClassifiedText",
    "EmbeddedImage",
    "EmbeddedText",
    "ImageClassifier",
    "LabeledSpan",
    "ScoredLabel",
    "TaggedText",
    "TextClassifier",
    "TokenClassifier",
]
