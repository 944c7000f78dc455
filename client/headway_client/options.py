"""Keyword arguments of the calls, the same for both clients; what is not given takes the server's default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class ModelOptions(TypedDict, total=False):
    """Which model answers."""

    model: str
    """Name of the model. Default: the server's only model for the task."""
    model_version: str
    """Version of the model. Default: the latest one loaded."""


class TextOptions(ModelOptions, total=False):
    """Options of every call that reads text."""

    truncate: bool
    """Shorten a text that is past the model's limit instead of refusing it. Default: False."""


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens; what is not given takes the model's own default."""

    max_new_tokens: int | None
    """Most tokens to produce, from 1 to the room the model has left."""
    temperature: float | None
    """Softmax temperature, 0 to 2; 0 is greedy decoding."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 turns it off."""
    top_p: float | None
    """Sample among the smallest set of tokens whose probability reaches p, above 0 to 1."""
    seed: int | None
    """Seed of the random stream: a seed gives the same text whatever else runs."""
    stop: Sequence[str]
    """Strings that end the text; they are not part of it."""


class GenerateOptions(TextOptions, SamplingOptions, total=False):
    """Options of text generation."""


class TranslateOptions(TextOptions, total=False):
    """Options of translation."""

    source_language: str
    """Language of the texts as a BCP 47 code. Default: the model's."""
    target_language: str
    """Language to translate to as a BCP 47 code. Default: the model's."""
    max_new_tokens: int | None
    """Most tokens of a translation."""


class ClassifyOptions(TextOptions, total=False):
    """Options of text classification."""

    top_k: int
    """Labels to answer a text, the most likely first; 0, the default, is all of them."""


class LabelOptions(ModelOptions, total=False):
    """Options of image labels."""

    top_k: int
    """Labels to answer an image, the most likely first; 0, the default, is all of them."""
