"""What models of images have in common: images are prepared, batched, and what is made of them is kept.

An image that comes again, as bytes or by its id, is neither decoded nor computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle
from headway_server.observers import ModelUsage
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageTransform
from headway_server.preprocessing.pool import image_pool
from headway_server.serving.answers import NO_TIMINGS, Answer, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.images import SentImage, name_images
from headway_server.serving.limits import check_count
from headway_server.serving.lru_cache import LruCache
from headway_server.tasks.stateless import StatelessModel, StatelessParts

Result = TypeVar("Result")
Images: TypeAlias = Sequence[bytes] | Sequence[SentImage] | NDArray[np.float32]
"""Encoded images, those found by id among them, or the values of their pixels as the model reads them, (N, 3, H, W)."""

_ENTRY_BYTES: Final = 500
"""What an image takes beside its outputs where they are kept."""
_FEW_LABELS: Final = 1000
"""So many are read of kept outputs on the event loop, in half a millisecond."""
MIB: Final = 2**20


class SeenImage(NamedTuple):
    """What is known of an image that a model has read."""

    width: int
    """Of the upright image as it was sent, in pixels."""
    height: int
    transform: ImageTransform
    """From the image's pixels to the model's."""


class Outputs(NamedTuple):
    """What the model has made of an image."""

    row: Tensors
    image: SeenImage


class ImageModel(StatelessModel):
    """A model whose graph reads images."""

    _noun = "images"

    def __init__(
        self,
        bundle: Bundle,
        parts: StatelessParts,
        preprocessor: ImagePreprocessor,
        *,
        outputs: Sequence[str],
        kept: LruCache[bytes, Outputs],
    ) -> None:
        """Makes a model of its parts.

        Args:
            bundle: The bundle.
            parts: Its parts; the graph reads `pixel_values`.
            preprocessor: Makes them of images.
            outputs: Names of what is computed of an image and kept.
            kept: Where.
        """
        batching = parts.settings.batching
        budget = batching.batch_images(parts.graph.device, preprocessor.num_pixels)
        super().__init__(bundle, parts, budget=budget, max_waiting=batching.max_waiting_images)
        self._preprocessor = preprocessor
        self._outputs = tuple(outputs)
        self._kept = kept

    def usage(self) -> ModelUsage:
        """Returns how many images wait for a batch, and how much is kept of those that were computed."""
        return replace(super().usage(), caches=(self._kept.usage(),))

    async def prepare(self, images: Sequence[SentImage], *, deadline: float | None) -> Answer[None]:
        """Computes and keeps all that the model makes of images; errors are those of `classify`.

        Args:
            images: 1 to `MAX_IMAGES` images.
            deadline: When the caller stops waiting, by `time.monotonic`.
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
        """Reads outputs of each image: of those that are kept, and of the others once they are computed.

        Args:
            images: The images.
            outputs: Names of the outputs.
            read: Makes an image's result of these outputs and what is known of it.
            deadline: When the caller stops waiting, by `time.monotonic`.
            num_labels: That `read` looks at.
        """
        check_count("images", len(images), MAX_IMAGES)
        if isinstance(images, np.ndarray) or not self._kept.max_bytes:
            return await self._compute(images, outputs, read, deadline)
        sent = await _as_sent(images)
        kept = {index: found for index, one in enumerate(sent) if (found := self._kept.get(one.key)) is not None}
        missing = [index for index in range(len(sent)) if index not in kept]
        timings: CallTimings = NO_TIMINGS
        computed: Iterator[tuple[Result, Outputs]] = iter(())
        if missing:

            def read_and_keep(row: Tensors, image: SeenImage) -> tuple[Result, Outputs]:
                found = Outputs({name: values.copy() for name, values in row.items()}, image)
                return read(*found), found

            answer = await self._compute([sent[index] for index in missing], self._outputs, read_and_keep, deadline)
            timings, computed = answer.timings, iter(answer.results)

        def read_kept() -> dict[int, Result]:
            return {index: read(*found) for index, found in kept.items()}

        is_quick = len(kept) * num_labels <= _FEW_LABELS
        loop = asyncio.get_running_loop()
        results = read_kept() if is_quick else await loop.run_in_executor(image_pool(), read_kept)
        for index, (result, found) in zip(missing, computed, strict=True):
            num_bytes = _ENTRY_BYTES + sum(values.nbytes for values in found.row.values())
            self._kept.put(sent[index].key, found, num_bytes)
            results[index] = result
        return Answer(results=[results[index] for index in range(len(sent))], timings=timings)

    async def _compute(
        self,
        images: Images,
        outputs: Sequence[str],
        read: Callable[[Tensors, SeenImage], Result],
        deadline: float | None,
    ) -> Answer[Result]:
        """Prepares images, runs them and reads outputs of each, off the event loop."""
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
            batched = await self._batcher.submit(
                [{"pixel_values": image.pixel_values} for image in prepared],
                [1] * len(prepared),
                outputs=outputs,
                read=lambda row, index: read(row, seen[index]),
                deadline=deadline,
                caller=caller,
            )
        timings = CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)
        return Answer(results=batched.results, timings=timings)


async def _as_sent(images: Sequence[bytes] | Sequence[SentImage]) -> Sequence[SentImage]:
    if isinstance(images[0], SentImage):
        return cast("Sequence[SentImage]", images)
    return await name_images(cast("Sequence[bytes]", images))
