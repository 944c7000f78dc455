"""Stateless models as they are served: preprocessing, batching, labels.

B is the number of items of a batch, T the tokens of its longest text, C the labels, N the items of a call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import BatchedResults, Batcher
from headway_server.batching.graph import ImageClassifierGraph, TextClassifierGraph
from headway_server.batching.settings import BatchingSettings
from headway_server.batching.tensors import top_k_indices
from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision
from headway_server.preprocessing import ImageLimits, ImagePreprocessor, TextTokenizer
from headway_server.runtime import Device, Runtime

Result = TypeVar("Result")
_WARM_UP_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimings:
    """Where the time of a call went, in seconds."""

    queue_s: float
    preprocessing_s: float
    inference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredLabel:
    """A label with its probability."""

    label: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedImage:
    """The labels of one image, the most likely first, and the image's size in pixels."""

    labels: tuple[ScoredLabel, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification(Generic[Result]):
    """The answer to a call: one result an input, in order."""

    results: list[Result]
    timings: CallTimings


class StatelessModel:
    """What the models here have in common: one batcher, one admission, labels."""

    def __init__(
        self, bundle: Bundle, precision: Precision, device: Device, batcher: Batcher[Any], admission: Admission
    ) -> None:
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self._batcher = batcher
        self._admission = admission

    @property
    def labels(self) -> tuple[str, ...]:
        """Names in the order of the outputs."""
        return self.bundle.manifest.labels

    def start(self) -> None:
        """Starts the batcher; called with the event loop running."""
        self._batcher.start()

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new and waits, at most `timeout_s`, for what was taken."""
        await self._admission.drain(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether calls are answered: from `start` to `close`."""
        return self._batcher.is_alive

    def close(self) -> None:
        """Stops the batcher; what still waits fails."""
        self._batcher.close()

    def _top_labels(self, rows: NDArray[np.float32], top_k: int) -> list[tuple[ScoredLabel, ...]]:
        """Names the `top_k` largest probabilities of each row: (N, C)."""
        if not np.isfinite(rows).all():
            raise FloatingPointError(f"{self!r} answered probabilities that are not numbers")
        indices = top_k_indices(rows, top_k)  # (N, k)
        scores = np.take_along_axis(rows, indices, axis=-1)  # (N, k)
        return [
            tuple(ScoredLabel(label=self.labels[i], probability=p) for i, p in zip(*row, strict=True))
            for row in zip(indices.tolist(), scores.tolist(), strict=True)
        ]

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"{type(self).__name__}({manifest.name}/{manifest.version}, {self.precision}, {self._admission!r})"


class TextClassifier(StatelessModel):
    """Labels texts."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TextClassifierGraph,
        tokenizer: TextTokenizer,
        settings: BatchingSettings,
    ) -> None:
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None  # the manifest's own check
        self.max_input_tokens: int = manifest.limits.max_input_tokens
        self._tokenizer = tokenizer
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(graph, budget=settings.max_batch_tokens, name=manifest.name),
            Admission(
                limit=settings.max_waiting_texts,
                noun="texts",
                owner=manifest.name,
                max_bytes=settings.max_waiting_mib * 2**20,
            ),
        )

    @classmethod
    def load(
        cls, bundle: Bundle, runtime: Runtime, settings: BatchingSettings, *, precision: Precision | None = None
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph or the tokenizer cannot be loaded, or they do not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        chosen, variant = runtime.choose_variant(manifest, precision)
        tokenizer = TextTokenizer.load(bundle.file(TOKENIZER_FILE))
        pad_id = manifest.special_tokens.pad if manifest.special_tokens else None
        graph = TextClassifierGraph(runtime.open(bundle, variant.graphs["model"]), pad_id=pad_id or 0)
        model = cls(bundle, chosen, graph, tokenizer, settings)
        length = min(_WARM_UP_LENGTH, model.max_input_tokens)
        graph.warm_up([np.zeros(length, np.int64)], num_labels=len(manifest.labels))
        return model

    async def classify(
        self, texts: Sequence[str], *, fields: Sequence[str], top_k: int, truncate: bool, deadline: float | None
    ) -> Classification[ClassifiedText]:
        """Labels texts.

        Args:
            texts: 1 to `MAX_TEXTS` texts of at least one character.
            fields: What the request calls each of them, for messages.
            top_k: Labels to answer a text, 1 to the number of labels.
            truncate: Whether a text past the limit is shortened at its end instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        with self._admission.admit(len(texts), sum(len(text.encode()) for text in texts)):
            began = time.monotonic()
            encoded = await self._tokenizer.encode_limited(
                texts, fields=fields, max_tokens=self.max_input_tokens, truncate=truncate
            )
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [text.input_ids for text in encoded], [len(text) for text in encoded], deadline=deadline
            )
        results = [
            ClassifiedText(labels=labels, num_tokens=len(text), truncated=text.truncated)
            for labels, text in zip(self._top_labels(batched.rows, top_k), encoded, strict=True)
        ]
        return Classification(results=results, timings=_timings(batched, preprocessing_s))


class ImageClassifier(StatelessModel):
    """Labels images."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: ImageClassifierGraph,
        preprocessor: ImagePreprocessor,
        settings: BatchingSettings,
    ) -> None:
        name = bundle.manifest.name
        self._preprocessor = preprocessor
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(graph, budget=settings.max_batch_images, name=name),
            Admission(
                limit=settings.max_waiting_images,
                noun="images",
                owner=name,
                max_bytes=settings.max_waiting_mib * 2**20,
            ),
        )

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        runtime: Runtime,
        settings: BatchingSettings,
        *,
        limits: ImageLimits,
        precision: Precision | None = None,
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph cannot be loaded, or it or its preprocessing does not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        assert manifest.image_preprocessing is not None  # the manifest's own check
        preprocessor = ImagePreprocessor(manifest.image_preprocessing, limits)
        chosen, variant = runtime.choose_variant(manifest, precision)
        graph = ImageClassifierGraph(runtime.open(bundle, variant.graphs["model"]))
        blank = np.zeros((3, manifest.image_preprocessing.height, manifest.image_preprocessing.width), np.float32)
        graph.warm_up([blank], num_labels=len(manifest.labels))
        return cls(bundle, chosen, graph, preprocessor, settings)

    async def classify(
        self, images: Sequence[bytes], *, fields: Sequence[str], top_k: int, deadline: float | None
    ) -> Classification[ClassifiedImage]:
        """Labels encoded images.

        Args:
            images: 1 to `MAX_IMAGES` images.
            fields: What the request calls each of them, for messages.
            top_k: Labels to answer an image, 1 to the number of labels.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The images cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        with self._admission.admit(len(images), sum(map(len, images))):
            began = time.monotonic()
            prepared = await self._preprocessor.prepare_batch(images, fields=fields)
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [image.pixel_values for image in prepared], [1] * len(prepared), deadline=deadline
            )
        results = [
            ClassifiedImage(labels=labels, width=image.width, height=image.height)
            for labels, image in zip(self._top_labels(batched.rows, top_k), prepared, strict=True)
        ]
        return Classification(results=results, timings=_timings(batched, preprocessing_s))


def _timings(batched: BatchedResults, preprocessing_s: float) -> CallTimings:
    return CallTimings(queue_s=batched.queue_s, preprocessing_s=preprocessing_s, inference_s=batched.inference_s)
