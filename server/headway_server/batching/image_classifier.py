"""Labels of images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import Batcher
from headway_server.batching.graph import ImageClassifierGraph
from headway_server.batching.model import Classification, ScoredLabel, StatelessModel, call_timings
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Bundle, Precision
from headway_server.preprocessing import ImageLimits, ImagePreprocessor
from headway_server.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedImage:
    """The labels of one image, the most likely first, and the image's size in pixels."""

    labels: tuple[ScoredLabel, ...]
    width: int
    height: int


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
        return Classification(results=results, timings=call_timings(batched, preprocessing_s))
