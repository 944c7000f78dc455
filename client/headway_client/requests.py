"""From arguments to the API's requests: the one place where they are built, for both clients.

A function here makes a call that is ready to be sent: its path, its request, and how its response is read. The
server judges what a request says; here only types are checked, because a wrong type cannot be sent at all. The calls
of GenerationService and TranslationService, which have the most arguments, are made in files of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from grpc_health.v1 import health_pb2

from headway.v1 import image_classification_service_pb2 as images_pb2
from headway.v1 import model_service_pb2 as models_pb2
from headway.v1 import text_classification_service_pb2 as texts_pb2
from headway_client import responses
from headway_client.calls import UnaryCall
from headway_client.results import (
    Answer,
    HealthStatus,
    ImageEmbedding,
    ImageLabels,
    ModelDetails,
    ModelList,
    Task,
    TextEmbedding,
    TextLabels,
    TextSpans,
)

Texts = str | Sequence[str]
Image = bytes | str | os.PathLike[str]
"""An encoded image, or the path of a file that holds one."""
Images = Image | Sequence[Image]

_TASK_NUMBERS = {task: number for number, task in responses.TASKS.items()}


def classify(
    texts: Texts,
    *,
    model: str = "",
    model_version: str = "",
    truncate: bool = False,
    top_k: int = 0,
    text_pairs: Texts | None = None,
    threshold: float | None = None,
) -> UnaryCall[texts_pb2.ClassifyTextResponse, Answer[TextLabels]]:
    """ClassifyText; the arguments are those of `options.ClassifyOptions`."""
    request = texts_pb2.ClassifyTextRequest(
        model=model,
        model_version=model_version,
        texts=as_texts("texts", texts),
        top_k=top_k,
        truncate=truncate,
        text_pairs=_as_pairs(text_pairs),
        threshold=threshold,
    )
    return UnaryCall(
        path="/headway.v1.TextClassificationService/ClassifyText",
        request=request,
        response_type=texts_pb2.ClassifyTextResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.text_labels, len(request.texts)),
    )


def classify_tokens(
    texts: Texts, *, model: str = "", model_version: str = "", truncate: bool = False
) -> UnaryCall[texts_pb2.ClassifyTokensResponse, Answer[TextSpans]]:
    """ClassifyTokens; the arguments are those of `options.TextOptions`."""
    request = texts_pb2.ClassifyTokensRequest(
        model=model, model_version=model_version, texts=as_texts("texts", texts), truncate=truncate
    )
    return UnaryCall(
        path="/headway.v1.TextClassificationService/ClassifyTokens",
        request=request,
        response_type=texts_pb2.ClassifyTokensResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.text_spans, len(request.texts)),
    )


def embed(
    texts: Texts,
    *,
    model: str = "",
    model_version: str = "",
    truncate: bool = False,
    text_pairs: Texts | None = None,
    normalize: bool = True,
) -> UnaryCall[texts_pb2.EmbedTextResponse, Answer[TextEmbedding]]:
    """EmbedText; the arguments are those of `options.EmbedOptions`."""
    request = texts_pb2.EmbedTextRequest(
        model=model,
        model_version=model_version,
        texts=as_texts("texts", texts),
        truncate=truncate,
        text_pairs=_as_pairs(text_pairs),
        normalize=normalize,
    )
    return UnaryCall(
        path="/headway.v1.TextClassificationService/EmbedText",
        request=request,
        response_type=texts_pb2.EmbedTextResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.text_embedding, len(request.texts)),
    )


def label(
    images: Images, *, model: str = "", model_version: str = "", top_k: int = 0
) -> UnaryCall[images_pb2.ClassifyImageResponse, Answer[ImageLabels]]:
    """ClassifyImage; the arguments are those of `options.LabelOptions`.

    Raises:
        OSError: An image file cannot be read.
    """
    request = images_pb2.ClassifyImageRequest(
        model=model, model_version=model_version, images=as_images("images", images), top_k=top_k
    )
    return UnaryCall(
        path="/headway.v1.ImageClassificationService/ClassifyImage",
        request=request,
        response_type=images_pb2.ClassifyImageResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.image_labels, len(request.images)),
    )


def embed_image(
    images: Images, *, model: str = "", model_version: str = "", normalize: bool = True
) -> UnaryCall[images_pb2.EmbedImageResponse, Answer[ImageEmbedding]]:
    """EmbedImage; the arguments are those of `options.EmbedImageOptions`.

    Raises:
        OSError: An image file cannot be read.
    """
    request = images_pb2.EmbedImageRequest(
        model=model, model_version=model_version, images=as_images("images", images), normalize=normalize
    )
    return UnaryCall(
        path="/headway.v1.ImageClassificationService/EmbedImage",
        request=request,
        response_type=images_pb2.EmbedImageResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.image_embedding, len(request.images)),
    )


def models(task: Task | str | None = None) -> UnaryCall[models_pb2.ListModelsResponse, ModelList]:
    """ListModels, of one task or of all.

    Raises:
        ValueError: There is no such task.
    """
    number = _TASK_NUMBERS[Task(task)] if task is not None else models_pb2.TASK_UNSPECIFIED
    request = models_pb2.ListModelsRequest()
    request.task = number  # type: ignore[assignment]  # the stubs give enum values a type of their own
    return UnaryCall(
        path="/headway.v1.ModelService/ListModels",
        request=request,
        response_type=models_pb2.ListModelsResponse,
        read=responses.model_list,
    )


def model(name: str, *, model_version: str = "") -> UnaryCall[models_pb2.GetModelResponse, ModelDetails]:
    """GetModel."""
    return UnaryCall(
        path="/headway.v1.ModelService/GetModel",
        request=models_pb2.GetModelRequest(model=as_text("name", name), model_version=model_version),
        response_type=models_pb2.GetModelResponse,
        read=responses.model_details,
    )


def health(service: str = "") -> UnaryCall[health_pb2.HealthCheckResponse, HealthStatus]:
    """Health check of the server, or of one service by its full name."""
    return UnaryCall(
        path="/grpc.health.v1.Health/Check",
        request=health_pb2.HealthCheckRequest(service=service),
        response_type=health_pb2.HealthCheckResponse,
        read=responses.health_status,
    )


def as_text(name: str, value: object) -> str:
    """Checks that `value`, which error messages call `name`, is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: a str is needed, got {type(value).__name__}")
    return value


def as_texts(name: str, values: Texts) -> list[str]:
    """Makes a list of one text or several."""
    if isinstance(values, str):
        return [values]
    if not _is_list(values):
        raise TypeError(f"{name}: a str or a sequence of str is needed, got {type(values).__name__}")
    return [as_text(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _as_pairs(pairs: Texts | None) -> list[str]:
    return [] if pairs is None else as_texts("text_pairs", pairs)


def as_images(name: str, values: Images) -> list[bytes]:
    """Makes a list of encoded images from one or several, reading those that are given by path."""
    if isinstance(values, str | os.PathLike) or not _is_list(values):
        return [_as_image(name, values)]
    return [_as_image(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _is_list(values: object) -> TypeGuard[Sequence[object]]:
    """Whether `values` is a sequence of inputs and not one input itself."""
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)


def _as_image(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | os.PathLike):
        return Path(value).read_bytes()
    raise TypeError(f"{name}: bytes or a path is needed, got {type(value).__name__}")
