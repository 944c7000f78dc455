"""Labels and embeddings of images.

D is the width of an embedding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchGraph, RunCosts
from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle, Precision
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import ImagePreprocessor, PreparedImage
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_count, check_top_k
from headway_server.settings import ServerSettings
from headway_server.tasks.outputs import EMBEDDING, LOGITS, ScoredLabel, label_postprocess, read_vector
from headway_server.tasks.stateless import StatelessModel, expected_outputs

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedImage:
    """The labels of one image, the most likely first, and the image's size in pixels."""

    labels: tuple[ScoredLabel, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedImage:
    """The vector of one image, and the image's size in pixels."""

    values: NDArray[np.float32]
    """(D,)"""
    width: int
    height: int


class ImageClassifier(StatelessModel):
    """Labels images, and turns them into vectors where its graph gives embeddings."""

    _noun = "images"

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: BatchGraph,
        preprocessor: ImagePreprocessor,
        settings: ServerSettings,
        *,
        costs: RunCosts,
        observer: Observer,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts."""
        batching = settings.batching
        super().__init__(
            bundle,
            precision,
            graph,
            budget=batching.batch_images(graph.device, preprocessor.num_pixels),
            costs=costs,
            max_waiting=batching.max_waiting_images,
            max_waiting_mib=batching.max_waiting_mib,
            observer=observer,
        )
        self._preprocessor = preprocessor

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph cannot be loaded, or it or its preprocessing does not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        assert manifest.image_preprocessing is not None, "the manifest's validator demands it"
        preprocessor = ImagePreprocessor(manifest.image_preprocessing, settings.image_limits)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graph = BatchGraph(runtime.open(bundle, variant.graphs["model"]), postprocess=label_postprocess(manifest))
        blank = np.zeros((3, manifest.image_preprocessing.height, manifest.image_preprocessing.width), np.float32)
        costs = graph.warm_up({"pixel_values": blank}, 1, expected_outputs(manifest))
        return cls(bundle, precision, graph, preprocessor, settings, costs=costs, observer=observer)

    async def classify(self, images: Sequence[bytes], *, top_k: int, deadline: float | None) -> Answer[ClassifiedImage]:
        """Labels encoded images.

        Args:
            images: 1 to `MAX_IMAGES` images.
            top_k: Labels to answer an image, 1 to the number of labels; 0: all of them.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the images cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))

        def read(probabilities: NDArray[Any], image: PreparedImage) -> ClassifiedImage:
            labels = self._label_reader.read(probabilities, num_labels)
            return ClassifiedImage(labels=labels, width=image.width, height=image.height)

        return await self._answer(images, LOGITS, read, deadline)

    async def embed(self, images: Sequence[bytes], *, normalize: bool, deadline: float | None) -> Answer[EmbeddedImage]:
        """Turns encoded images into vectors; for bundles whose graphs give embeddings.

        Args:
            images: 1 to `MAX_IMAGES` images.
            normalize: True to scale vectors to length 1.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: As `classify`.
        """

        def read(embedding: NDArray[Any], image: PreparedImage) -> EmbeddedImage:
            values = read_vector(embedding, normalize=normalize)
            return EmbeddedImage(values=values, width=image.width, height=image.height)

        return await self._answer(images, EMBEDDING, read, deadline)

    async def _answer(
        self,
        images: Sequence[bytes],
        output: str,
        read: Callable[[NDArray[Any], PreparedImage], Result],
        deadline: float | None,
    ) -> Answer[Result]:
        """Decodes images, runs them and reads one output of each, off the event loop."""
        check_count("images", len(images), MAX_IMAGES)
        fields = [f"images[{index}]" for index in range(len(images))]
        caller = current_caller()
        with self._admission.admit(len(images), sum(map(len, images)), deadline=deadline, caller=caller):
            began = time.monotonic()
            prepared = await self._preprocessor.prepare_batch(images, fields=fields)
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [{"pixel_values": image.pixel_values} for image in prepared],
                [1] * len(prepared),
                outputs=(output,),
                read=lambda row, index: read(row[output], prepared[index]),
                deadline=deadline,
                caller=caller,
            )
        timings = CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)
        return Answer(results=batched.results, timings=timings)
