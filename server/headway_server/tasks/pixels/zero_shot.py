"""Labels of the caller for pixels: images and texts are encoded apart, and a decoder makes a map of each pair.

Images and sets of labels that come again are encoded once; their maps are made anew.

C labels, D width of an embedding, R, S rows and columns of a map.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.bundles import Bundle, GraphRole, Manifest
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.observers import NO_OBSERVER, ModelId, ModelUsage, Observer
from headway_server.preprocessing.pool import image_pool
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.settings import ServerSettings
from headway_server.tasks.images.labels import LabelEncoder, check_given, width_of
from headway_server.tasks.images.model import ImageModel, Images, SeenImage
from headway_server.tasks.outputs import EMBEDDING, LOGITS
from headway_server.tasks.pixels.maps import ProbabilityMaps
from headway_server.tasks.pixels.model import MAX_PIXELS, ClassifiedPixels, FoundLabel

FEATURES: Final = "features"
"""Output of the graph that reads images, and input of the decoder."""
MAX_LABELS: Final = most_elements("ClassifyPixelsRequest.labels")
_MAX_RUN_BYTES: Final = 2**26
"""Maximum bytes of a batch of the decoder."""
_BYTES_PER_PIXEL: Final = 16
"""Memory of an image's maps while they are made, besides a byte for each label."""


class ZeroShotPixelClassifier(ImageModel):
    """Finds pixels of the caller's labels in images."""

    _memory_noun = "maps"
    _encoder: LabelEncoder
    _decoder: Batcher

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the three graphs; errors are those of `ImageModel.load`."""
        model = super().load(bundle, runtime, settings, observer)
        encoder = LabelEncoder.load(bundle, runtime, settings, observer)
        manifest = bundle.manifest
        _, variant = runtime.choose_variant(manifest, settings.precision)
        graph = BatchGraph(runtime.open(bundle, variant.graphs["decoder"]))
        features = np.zeros(cls._expected(manifest)[FEATURES], np.float32)
        blank = {FEATURES: features, EMBEDDING: np.zeros(width_of(manifest), np.float32)}
        cells = map_size(manifest)
        max_padding = graph.warm_up(blank, 1, {LOGITS: cells})
        model.decode_by(
            encoder,
            Batcher(
                graph,
                budget=max(1, _MAX_RUN_BYTES // (features.nbytes + 4 * cells[0] * cells[1])),
                model=ModelId(name=manifest.name, version=manifest.version),
                session=graph.session,
                max_padding=max_padding,
                observer=observer,
            ),
        )
        return model

    def decode_by(self, encoder: LabelEncoder, decoder: Batcher) -> None:
        """Takes what embeds labels and what makes maps, whose life is the model's."""
        self._encoder, self._decoder = encoder, decoder
        self.workers += [*encoder.workers, decoder]
        self.closers += encoder.closers

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        return {FEATURES: _shape_of(manifest, "model")}

    def usage(self) -> ModelUsage:
        """Returns the number of waiting inputs, and the sizes of the caches of images and of labels."""
        usage = super().usage()
        return replace(usage, caches=(*usage.caches, self._encoder.label_vectors.usage()))

    async def classify(
        self, images: Images, labels: Sequence[str] = (), *, deadline: float | None
    ) -> Answer[ClassifiedPixels]:
        """Finds pixels of labels; other arguments are those of `PixelClassifier.classify`.

        Args:
            images: 1 to `MAX_IMAGES` images.
            labels: 1 to `MAX_LABELS` texts, each once.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: There are no labels, one is empty, too long or repeated, the images cannot be read or have too
                many pixels for so many labels, the queue is full, the deadline passed, the server is draining.
        """
        labels = tuple(labels)
        if len(labels) > MAX_LABELS:
            raise InvalidInputError("labels", f"has {len(labels)} elements, the limit is {MAX_LABELS}; leave some out")
        check_given(labels, MAX_LABELS, owner=self.bundle.manifest.name)
        vectors = await self._encoder.encode(labels, deadline=deadline)  # (C, D)

        def read(row: Tensors, image: SeenImage) -> tuple[NDArray[np.float32], SeenImage]:
            return row[FEATURES].copy(), image

        encoded = await self._answer(images, (FEATURES,), read, deadline)
        num_pixels = sum(image.width * image.height for _, image in encoded.results)
        if num_pixels * len(labels) > MAX_PIXELS:
            raise InvalidInputError(
                "images",
                f"have {num_pixels} pixels together, of {len(labels)} labels each; the limit of pixels times labels is "
                f"{MAX_PIXELS}: send them in several calls, or smaller ones",
            )
        rows, columns = map_size(self.bundle.manifest)
        largest = max(image.width * image.height for _, image in encoded.results)
        reserved = num_pixels * (len(labels) + 1) + largest * _BYTES_PER_PIXEL + 2 * 4 * len(labels) * rows * columns
        caller = current_caller()
        with self._memory.admit(len(encoded.results), reserved, caller=caller):
            results = [
                await self._label(features, image, labels, vectors, deadline=deadline, caller=caller)
                for features, image in encoded.results
            ]
        return Answer(results=results, timings=encoded.timings)

    async def _label(
        self,
        features: NDArray[np.float32],
        image: SeenImage,
        labels: Sequence[str],
        vectors: NDArray[np.float32],
        *,
        deadline: float | None,
        caller: str,
    ) -> ClassifiedPixels:
        """Makes the maps of an image, one for each label."""
        found = await self._decoder.submit(
            [{FEATURES: features, EMBEDDING: vector} for vector in vectors],
            [1] * len(labels),
            outputs=(LOGITS,),
            read=lambda row, _: row[LOGITS].copy(),
            deadline=deadline,
            caller=caller,
        )

        def draw() -> ClassifiedPixels:
            maps = ProbabilityMaps.of(np.stack(found.results), (image.width, image.height))
            num_pixels = image.width * image.height
            return ClassifiedPixels(
                class_map=maps.png(),
                labels=[
                    FoundLabel(
                        label=labels[index],
                        index=index,
                        share=int(maps.counts[index]) / num_pixels,
                        score=float(maps.scores[index]),
                        probability_map=maps.pngs[index],
                    )
                    for index in np.argsort(-maps.counts, kind="stable").tolist()
                ],
                width=image.width,
                height=image.height,
            )

        return await asyncio.get_running_loop().run_in_executor(image_pool(), draw)


def map_size(manifest: Manifest) -> tuple[int, int]:
    """Returns the rows and columns of a label's map."""
    rows, columns = _shape_of(manifest, "decoder")
    return rows, columns


def _shape_of(manifest: Manifest, role: GraphRole) -> tuple[int, ...]:
    """Returns the shape of a graph's output, without the batch."""
    [output] = next(iter(manifest.variants.values())).graphs[role].outputs
    return tuple(axis for axis in output.shape[1:] if isinstance(axis, int))  # which the manifest's validator demands
