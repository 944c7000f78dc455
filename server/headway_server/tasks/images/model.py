"""Base of image models: preprocessing, batching, and a cache of outputs.

A repeated image, as bytes or by id, is neither decoded nor computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, NamedTuple, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchGraph, Postprocess, Tensors
from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle, Manifest, demanded
from headway_server.observers import NO_OBSERVER, ModelUsage, Observer
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageTransform
from headway_server.preprocessing.pool import image_pool
from headway_server.runtime import Runtime
from headway_server.serving.answers import NO_TIMINGS, Answer, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.images import SentImage, name_images
from headway_server.serving.limits import check_count
from headway_server.serving.lru_cache import LruCache
from headway_server.settings import ServerSettings
from headway_server.tasks.stateless import StatelessModel, StatelessParts, expected_outputs

Result = TypeVar("Result")
Images: TypeAlias = Sequence[bytes] | Sequence[SentImage] | NDArray[np.float32]
"""Encoded images, found by id or not, or preprocessed pixel values (N, 3, H, W)."""

_ENTRY_BYTES: Final = 500
"""Bytes of a cache entry besides its outputs."""
_FEW_LABELS: Final = 1000
"""Maximum labels read from cached outputs on the event loop, half a millisecond."""
MIB: Final = 2**20


class SeenImage(NamedTuple):
    """Geometry of a preprocessed image."""

    width: int
    """Width of the upright original, in pixels."""
    height: int
    transform: ImageTransform
    """Maps pixels of the original to pixels of the model."""


class Outputs(NamedTuple):
    """Outputs of the model for one image."""

    row: Tensors
    image: SeenImage


class ImageModel(StatelessModel):
    """Model whose graph reads images."""

    _noun = "images"

    def __init__(
        self,
        bundle: Bundle,
        parts: StatelessParts,
        preprocessor: ImagePreprocessor,
        *,
        outputs: Sequence[str],
        cache: LruCache[bytes, Outputs],
    ) -> None:
        """Assembles a model from its parts.

        Args:
            bundle: The bundle.
            parts: Its parts; the graph reads `pixel_values`.
            preprocessor: Converts images to `pixel_values`.
            outputs: Names of the outputs that are computed and cached.
            cache: Cache of outputs.
        """
        batching = parts.settings.batching
        budget = self._batch_images(bundle.manifest, parts, preprocessor)
        super().__init__(bundle, parts, budget=budget, max_waiting=batching.max_waiting_images)
        self._graph = parts.graph
        self._preprocessor = preprocessor
        self._outputs = tuple(outputs)
        self._cache = cache

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once on the largest image.

        Raises:
            BundleError: The graph cannot be loaded, or graph or preprocessing do not match the manifest.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        sizes = demanded(manifest.image_preprocessing)
        preprocessor = ImagePreprocessor(sizes, settings.image_limits)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graph = BatchGraph(runtime.open(bundle, variant.graphs["model"]), postprocess=cls._postprocess(manifest))
        expected = cls._expected(manifest)
        max_padding = graph.warm_up(_blank(manifest), 1, expected)
        parts = StatelessParts(
            precision=precision,
            graph=graph,
            max_padding=max_padding,
            runtime=runtime,
            settings=settings,
            observer=observer,
        )
        return cls(
            bundle,
            parts,
            preprocessor,
            outputs=tuple(expected),
            cache=LruCache("image_outputs", max_bytes=cls._cache_mib(settings) * MIB, ttl_s=settings.image_ttl),
        )

    @classmethod
    def _cache_mib(cls, settings: ServerSettings) -> int:
        """Returns the size of the cache of outputs."""
        return settings.max_image_outputs_mib

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of an image's outputs."""
        return expected_outputs(manifest)

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:  # noqa: ARG003
        """Returns the postprocessing of a batch's outputs; see `BatchGraph`."""
        return None

    @classmethod
    def _batch_images(cls, manifest: Manifest, parts: StatelessParts, preprocessor: ImagePreprocessor) -> int:  # noqa: ARG003
        """Returns the maximum images of a batch."""
        return parts.settings.batching.batch_images(parts.graph.device, preprocessor.num_pixels)

    def _reduce(self, row: Tensors, image: SeenImage) -> Tensors:  # noqa: ARG002
        """Makes of an image's outputs what answers are read from, and what the cache keeps; off the event loop."""
        return row

    def _reserve_answers(self, images: Sequence[SeenImage]) -> AbstractContextManager[object]:  # noqa: ARG002
        """Reserves memory for the answers about images.

        Raises:
            RequestError: They take too much.
        """
        return nullcontext()

    def usage(self) -> ModelUsage:
        """Returns the number of waiting images, and the size of the cache of outputs."""
        return replace(super().usage(), caches=(self._cache.usage(),))

    def blank_outputs(self) -> Tensors:
        """Runs the graph on the largest image, and returns its outputs."""
        items = [_blank(self.bundle.manifest)]
        [row] = self._graph.split(self._graph.run(self._graph.collate(items), self._outputs), items)
        return row

    async def prepare(self, images: Sequence[SentImage], *, deadline: float | None) -> Answer[None]:
        """Computes and caches all outputs of images; errors are those of `classify`.

        Args:
            images: 1 to `MAX_IMAGES` images.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
        """
        return await self._answer(images, self._outputs, lambda *_: None, deadline)

    async def _answer(
        self,
        images: Images,
        outputs: Sequence[str],
        read: Callable[[Tensors, SeenImage], Result],
        deadline: float | None,
        *,
        num_labels: int = 0,
    ) -> Answer[Result]:
        """Reads outputs of each image from the cache, or computes them.

        Args:
            images: Images.
            outputs: Names of the outputs.
            read: Makes an image's result from these outputs, as `_reduce` leaves them, and its geometry.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            num_labels: Number of labels that `read` reads.
        """
        check_count("images", len(images), MAX_IMAGES)
        if isinstance(images, np.ndarray) or not self._cache.max_bytes:
            return await self._compute(
                images, outputs, lambda row, image: read(self._reduce(row, image), image), deadline
            )
        sent = await _as_sent(images)
        cached = {index: found for index, one in enumerate(sent) if (found := self._cache.get(one.key)) is not None}
        missing = [index for index in range(len(sent)) if index not in cached]
        timings: CallTimings = NO_TIMINGS
        computed: Iterator[tuple[Result, Outputs]] = iter(())
        if missing:

            def read_and_cache(row: Tensors, image: SeenImage) -> tuple[Result, Outputs]:
                reduced = self._reduce(row, image)
                found = Outputs({name: values.copy() for name, values in reduced.items()}, image)
                return read(*found), found

            answer = await self._compute([sent[index] for index in missing], self._outputs, read_and_cache, deadline)
            timings, computed = answer.timings, iter(answer.results)

        def read_cached() -> dict[int, Result]:
            return {index: read(*found) for index, found in cached.items()}

        is_quick = len(cached) * num_labels <= _FEW_LABELS
        loop = asyncio.get_running_loop()
        results = read_cached() if is_quick else await loop.run_in_executor(image_pool(), read_cached)
        for index, (result, found) in zip(missing, computed, strict=True):
            num_bytes = _ENTRY_BYTES + sum(values.nbytes for values in found.row.values())
            self._cache.put(sent[index].key, found, num_bytes)
            results[index] = result
        return Answer(results=[results[index] for index in range(len(sent))], timings=timings)

    async def _compute(
        self,
        images: Images,
        outputs: Sequence[str],
        read: Callable[[Tensors, SeenImage], Result],
        deadline: float | None,
    ) -> Answer[Result]:
        """Preprocesses images, runs them and reads the outputs of each, off the event loop."""
        if isinstance(images, np.ndarray):
            num_bytes, encoded, fields = images.nbytes, [], []
        else:
            encoded = [one.data if isinstance(one, SentImage) else one for one in images]
            fields = [one.field if isinstance(one, SentImage) else f"images[{i}]" for i, one in enumerate(images)]
            num_bytes = sum(map(len, encoded)) + len(images) * self._preprocessor.num_image_bytes
        caller = current_caller()
        with self._admission.admit(len(images), num_bytes, deadline=deadline, caller=caller):
            began = time.monotonic()
            if isinstance(images, np.ndarray):
                prepared = await self._preprocessor.take_pixels(images)
            else:
                prepared = await self._preprocessor.prepare_batch(encoded, fields=fields)
            preprocessing_s = time.monotonic() - began
            seen = [SeenImage(image.width, image.height, image.transform) for image in prepared]
            with self._reserve_answers(seen):
                batched = await self._batcher.submit(
                    [{"pixel_values": image.pixel_values} for image in prepared],
                    [1] * len(prepared),
                    outputs=outputs,
                    read=lambda row, index: read(row, seen[index]),
                    deadline=deadline,
                    caller=caller,
                    groups=[
                        image.pixel_values.shape for image in prepared
                    ],  # padding would change what a graph computes
                )
        timings = CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)
        return Answer(results=batched.results, timings=timings)


def _blank(manifest: Manifest) -> Tensors:
    """Returns the largest image that a model reads."""
    return {"pixel_values": np.zeros((3, *demanded(manifest.image_preprocessing).largest), np.float32)}


async def _as_sent(images: Sequence[bytes] | Sequence[SentImage]) -> Sequence[SentImage]:
    if isinstance(images[0], SentImage):
        return cast("Sequence[SentImage]", images)
    return await name_images(cast("Sequence[bytes]", images))
