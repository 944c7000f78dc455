"""What the servicers share: reading requests, and the messages of `common.proto`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration

from headway.v1 import common_pb2
from headway_server.bundles import Bundle, Precision
from headway_server.errors import InvalidInputError
from headway_server.serving.answers import CallTimings
from headway_server.tasks.stateless import ScoredLabel

_LARGEST_TEXTS_OF_A_CALL: Final = 16
"""Texts of the largest size that a call may hold, or as much in more and smaller ones."""


class ModelThatAnswered(Protocol):
    """What a reference to a model needs."""

    bundle: Bundle
    precision: Precision


def model_reference(model: ModelThatAnswered) -> common_pb2.ModelReference:
    """Names the model that answered a call."""
    manifest = model.bundle.manifest
    return common_pb2.ModelReference(name=manifest.name, version=manifest.version, variant=model.precision.value)


def timings_message(
    *, total_s: float, queue_s: float, preprocessing_s: float, inference_s: float
) -> common_pb2.Timings:
    """Tells where the time of a call went, from seconds."""
    return common_pb2.Timings(
        total=duration(total_s),
        queue=duration(queue_s),
        preprocessing=duration(preprocessing_s),
        inference=duration(inference_s),
    )


def timings_of_call(timings: CallTimings, arrived: float) -> common_pb2.Timings:
    """Tells where the time of a stateless model's call went; it `arrived` at that time by `time.monotonic`."""
    return timings_message(
        total_s=time.monotonic() - arrived,
        queue_s=timings.queue_s,
        preprocessing_s=timings.preprocessing_s,
        inference_s=timings.inference_s,
    )


def label_scores(labels: Iterable[ScoredLabel]) -> list[common_pb2.LabelScore]:
    """Makes messages of labels."""
    return [
        common_pb2.LabelScore(label=scored.label, probability=scored.probability, selected=scored.is_selected)
        for scored in labels
    ]


def duration(seconds: float) -> Duration:
    """Makes a `Duration` of seconds, to the nanosecond."""
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def deadline_of(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Returns when the caller stops waiting, by `time.monotonic`; None where it named no deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def check_count(field: str, count: int, maximum: int, advice: str = "send them in several calls") -> None:
    """Checks how many elements a repeated field has; `advice` is for who gives more than `maximum`.

    Raises:
        InvalidInputError: None, or more than `maximum`.
    """
    if count < 1:
        raise InvalidInputError(field, f"is empty; give 1 to {maximum}")
    if count > maximum:
        raise InvalidInputError(field, f"has {count} elements, the limit is {maximum}; {advice}")


def check_text(field: str, text: str, max_bytes: int) -> str:
    """Checks one text of a request and returns what to call it in messages.

    A text is held to its size before anything reads it: to count its tokens takes a thousand times as long.

    Raises:
        InvalidInputError: It is empty, or has more than `max_bytes` in UTF-8.
    """
    if not text:
        raise InvalidInputError(field, "is empty; give at least one character")
    if (size := num_bytes(text)) > max_bytes:
        raise InvalidInputError(field, f"has {size} bytes, the limit is {max_bytes}; split or shorten it")
    return field


def check_texts(field: str, texts: Sequence[str], maximum: int, max_bytes: int) -> list[str]:
    """Checks the texts of a request and returns what to call each of them in messages, such as `texts[3]`.

    Raises:
        InvalidInputError: There are none, more than `maximum`, one is empty or has more than `max_bytes` in UTF-8, or
            together they have more than `_LARGEST_TEXTS_OF_A_CALL` times that.
    """
    check_count(field, len(texts), maximum)
    names = [check_text(f"{field}[{index}]", text, max_bytes) for index, text in enumerate(texts)]
    check_size_of_call(field, texts, max_bytes)
    return names


def check_size_of_call(field: str, texts: Iterable[str], max_bytes: int) -> None:
    """Checks the texts of a call, each of at most `max_bytes`, together.

    Raises:
        InvalidInputError: They have more than `_LARGEST_TEXTS_OF_A_CALL` times that.
    """
    limit = _LARGEST_TEXTS_OF_A_CALL * max_bytes
    if (size := sum(map(num_bytes, texts))) > limit:
        raise InvalidInputError(
            field, f"has {size} bytes in all, the limit of a call is {limit}; send them in several calls"
        )


def num_bytes(text: str) -> int:
    """Returns the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def check_top_k(top_k: int, num_labels: int) -> int:
    """Returns how many labels to answer; 0 stands for all.

    Raises:
        InvalidInputError: It is below 0 or above the model's labels.
    """
    if not 0 <= top_k <= num_labels:
        raise InvalidInputError(
            "top_k", f"is {top_k}, the model has {num_labels} labels; give 1 to {num_labels}, or 0 for all"
        )
    return top_k or num_labels
