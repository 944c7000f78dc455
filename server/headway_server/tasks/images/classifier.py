"""Labels and embeddings of images."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.batcher import Batcher
from headway_server.batching.graph import ImageClassifierGraph, Output, OutputBatches, Wanted, probabilities_by
from headway_server.batching.pending_call import BatchedResults
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Bundle, ClassificationScheme, Precision
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import ImagePreprocessor, SmallImage
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.permits import Admission
from headway_server.settings import ServerSettings
from headway_server.tasks.stateless import ScoredLabel, StatelessModel
from headway_server.tasks.text.embeddings import EmbeddedImage, to_vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedImage:
    """The labels of one image, the most likely first, and the image's size in pixels."""

    labels: tuple[ScoredLabel, ...]
    width: int
    height: int


class ImageClassifier(StatelessModel):
    """Labels images, and turns them into vectors."""

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
        batches = OutputBatches(graph, probabilities_by(bundle.manifest.classification or ClassificationScheme()))
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(
                batches,
                budget=settings.batch_images(graph.device, preprocessor.num_pixels),
                name=name,
                session=graph.session,
                prepare=_decoded,
            ),
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
        settings: ServerSettings,
        observer: Observer = NO_OBSERVER,  # noqa: ARG003 (for what runs to report to)
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph cannot be loaded, or it or its preprocessing does not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        assert manifest.image_preprocessing is not None  # the manifest's own check
        preprocessor = ImagePreprocessor(manifest.image_preprocessing, settings.image_limits)
        chosen, variant = runtime.choose_variant(manifest, settings.precision)
        graph = ImageClassifierGraph(runtime.open(bundle, variant.graphs["model"]))
        blank = np.zeros((3, manifest.image_preprocessing.height, manifest.image_preprocessing.width), np.float32)
        graph.warm_up([blank], manifest)
        return cls(bundle, chosen, graph, preprocessor, settings.batching)

    async def classify(
        self, images: Sequence[bytes], *, fields: Sequence[str], top_k: int, deadline: float | None
    ) -> Answer[ClassifiedImage]:
        """Labels encoded images.

        Args:
            images: 1 to `MAX_IMAGES` images.
            fields: What the request calls each of them, for messages.
            top_k: Labels to answer an image, 1 to the number of labels.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The images cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        sizes, batched, timings = await self._answer(images, fields, Output.LOGITS, deadline)
        results = [
            ClassifiedImage(labels=labels, width=width, height=height)
            for labels, (width, height) in zip(self._top_labels(batched.rows, top_k), sizes, strict=True)
        ]
        return Answer(results=results, timings=timings)

    async def embed(
        self, images: Sequence[bytes], *, fields: Sequence[str], normalize: bool, deadline: float | None
    ) -> Answer[EmbeddedImage]:
        """Turns encoded images into vectors; for bundles whose graphs give embeddings.

        Args:
            images: 1 to `MAX_IMAGES` images.
            fields: What the request calls each of them, for messages.
            normalize: Whether vectors are scaled to length 1.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: As `classify`.
        """
        sizes, batched, timings = await self._answer(images, fields, Output.EMBEDDING, deadline)
        vectors = to_vectors(batched.rows, normalize=normalize)
        results = [
            EmbeddedImage(values=vector, width=width, height=height)
            for vector, (width, height) in zip(vectors, sizes, strict=True)
        ]
        return Answer(results=results, timings=timings)

    async def _answer(
        self, images: Sequence[bytes], fields: Sequence[str], output: Output, deadline: float | None
    ) -> tuple[list[tuple[int, int]], BatchedResults, CallTimings]:
        """Decodes images and waits for what is asked about each; their widths and heights come first."""
        with self._admission.admit(len(images), sum(map(len, images))):
            small = self._preprocessor.small_images(images, fields=fields)
            if small is not None:
                return await self._answer_small(small, output, deadline)
            began = time.monotonic()
            prepared = await self._preprocessor.prepare_batch(images, fields=fields)
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [Wanted(image.pixel_values, output) for image in prepared], [1] * len(prepared), deadline=deadline
            )
        sizes = [(image.width, image.height) for image in prepared]
        return sizes, batched, CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)

    async def _answer_small(
        self, images: list[SmallImage], output: Output, deadline: float | None
    ) -> tuple[list[tuple[int, int]], BatchedResults, CallTimings]:
        """As `_answer`, of images that the batcher's threads decode."""
        batched = await self._batcher.submit(
            [Wanted(image, output) for image in images], [1] * len(images), deadline=deadline
        )
        intervals = [image.interval for image in images]
        own_s = max(end - begin for begin, end in intervals)  # of an item's wait, what was no waiting
        timings = CallTimings.of(batched.runs, preprocessing_s=_covered_s(intervals))
        timings = dataclasses.replace(timings, queue_s=max(0.0, timings.queue_s - own_s))
        return [image.size for image in images], batched, timings


def _covered_s(intervals: Sequence[tuple[float, float]]) -> float:
    """How much time intervals cover together; what several cover counts once."""
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _decoded(wanted: Wanted[NDArray[np.float32] | SmallImage]) -> Wanted[NDArray[np.float32] | SmallImage]:
    """What is wanted of an image, decoded if it is not yet."""
    if isinstance(wanted.item, SmallImage):
        return Wanted(wanted.item.pixel_values(), wanted.output)
    return wanted
