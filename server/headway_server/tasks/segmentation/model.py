"""Served segmentation model: an encoder embeds an image once, and a mask decoder answers prompts.

Both graphs have a batcher. Prompts of different images and callers run in one batch of the decoder.

S side of a mask in cells.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.bundles import Bundle, Segmentation, demanded
from headway_server.errors import BundleError, InvalidInputError
from headway_server.field_rules import maximum
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.pool import image_pool
from headway_server.runtime import Runtime
from headway_server.serving.answers import NO_TIMINGS, CallTimings
from headway_server.serving.calls import current_caller
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_count
from headway_server.serving.lru_cache import LruCache
from headway_server.serving.permits import Admission, MeasuredPace, Permit
from headway_server.settings import ServerSettings
from headway_server.tasks.images.model import MIB, ImageModel, SeenImage
from headway_server.tasks.segmentation.decoder import (
    BOTTOM_RIGHT,
    INSIDE,
    MASKS,
    MAX_POINTS,
    MAX_PROMPTS,
    OUTSIDE,
    PREDICTED_IOU,
    TOP_LEFT,
    PromptGraph,
    PromptKind,
    answer_order,
    as_item,
)
from headway_server.tasks.segmentation.masks import (
    COMPARED,
    Box,
    EdgedMask,
    PixelMask,
    covered_cells,
    drop_duplicates,
    stability,
)
from headway_server.tasks.stateless import StatelessParts


class MaskFormat(Enum):
    """Encoding of masks."""

    RUNS = auto()
    """Run lengths in COCO's format."""
    PNG = auto()


MAX_MASKS: Final = maximum("SegmentImageRequest.max_mask_count")
"""Maximum masks of a prompt of one part; a prompt of several parts has one."""
MAX_SEGMENTS: Final = 256
"""Maximum segments of an image in an everything request."""
MAX_MASK_PIXELS: Final = 2**29
"""Maximum pixels of all masks of an answer. Masks of noise take 30 ns and a quarter of a byte a pixel."""
MAX_STREAMED_PIXELS: Final = 2**31
"""The same for streamed masks, each of which takes the memory of its box."""
MAX_GRID_SIDE: Final = maximum("SegmentEverythingRequest.points_per_side")
"""Maximum points along a side of the grid of an everything request."""
_MIN_STREAM_MIB: Final = 64
"""Minimum budget of the embeddings of streams, where the cache is smaller."""
_LEAST_TOGETHER: Final = 32
"""Minimum prompts of a call run together; the next ones run when these masks are processed."""
_PIXELS_AT_A_TIME: Final = 4 * 2**20
"""Mask pixels resized by a thread at a time; between two batches the event loop checks for cancellation."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A point of an image, in its pixels."""

    x: float
    y: float
    is_inside: bool = True
    """False for a background point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPrompt:
    """Prompt of a segment: points, a box around it, or both."""

    points: tuple[Point, ...] = ()
    box: tuple[float, float, float, float] | None = None
    """Left, top, right, bottom in pixels of the image."""

    @property
    def num_parts(self) -> int:
        """Number of points and boxes."""
        return len(self.points) + (self.box is not None)

    @property
    def kind(self) -> PromptKind:
        """Kind of the prompt."""
        if self.num_parts > 1:
            return "several"
        return "point" if self.box is None else "box"

    @property
    def first_part(self) -> SegmentPrompt:
        """The box alone, or else the first foreground point."""
        if self.box is not None:
            return SegmentPrompt(box=self.box)
        return SegmentPrompt(points=(next(point for point in self.points if point.is_inside),))

    def check_parts(self, field: str) -> None:
        """Checks the prompt without the image.

        Raises:
            InvalidInputError: There are no parts, too many points, or no foreground.
        """
        if not self.num_parts:
            raise InvalidInputError(field, f"has neither points nor a box; give a box, or 1 to {MAX_POINTS} points")
        if len(self.points) > MAX_POINTS:
            raise InvalidInputError(
                f"{field}.points", f"has {len(self.points)} elements, the limit is {MAX_POINTS}; leave some out"
            )
        if self.box is None and not any(point.is_inside for point in self.points):
            raise InvalidInputError(f"{field}.points", "are all background; add a box, or one point inside the segment")

    def check_coordinates(self, field: str, width: int, height: int) -> None:
        """Checks the coordinates of the parts against an image's size in pixels.

        Raises:
            InvalidInputError: A point or a side of the box is outside of the image, or the box is empty.
        """
        for number, point in enumerate(self.points):
            if not (0 <= point.x <= width and 0 <= point.y <= height):  # false for NaN too
                raise InvalidInputError(
                    f"{field}.points[{number}]",
                    f"is ({point.x:g}, {point.y:g}), outside of the image: x goes from 0 to {width}, y to {height}",
                )
        if self.box is None:
            return
        left, top, right, bottom = self.box
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise InvalidInputError(
                f"{field}.box",
                f"is ({left:g}, {top:g}, {right:g}, {bottom:g}); its sides are left, top, right and bottom, left "
                f"before right and top before bottom, within the image of {width} x {height} pixels",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EverythingRequest:
    """Parameters of an everything request, which prompts with a grid of points."""

    points_per_side: int = 16
    min_predicted_iou: float = 0.7
    min_stability: float = 0.8
    max_overlap: float = 0.7
    """Minimum intersection over union of two masks of which the worse is dropped."""

    def __post_init__(self) -> None:
        if not 1 <= self.points_per_side <= MAX_GRID_SIDE:
            raise InvalidInputError(
                "points_per_side", f"is {self.points_per_side}; it goes from 1 to {MAX_GRID_SIDE}, 0 for the default"
            )
        for name in ("min_predicted_iou", "min_stability", "max_overlap"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise InvalidInputError(name, f"is {value:g}; it goes from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMask:
    """A mask in the pixels of the caller's image."""

    counts: NDArray[np.int32] | None
    """Run lengths by columns in COCO's format; None if a PNG is requested."""
    png: bytes | None
    predicted_iou: float
    stability: float
    box: Box
    area: int
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedImage:
    """Masks of each prompt, the best first (`answer_order`), and the image's size in pixels."""

    results: list[list[SegmentMask]]
    width: int
    height: int
    timings: CallTimings


@dataclass(frozen=True, slots=True, eq=False)
class _Embedded:
    """An embedded image."""

    embedding: Tensors
    """By the names of the encoder's outputs."""
    image: SeenImage

    @property
    def nbytes(self) -> int:
        """Bytes of the embedding."""
        return sum(tensor.nbytes for tensor in self.embedding.values())


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """An image among a model's masks."""

    image: SeenImage
    model_size: tuple[int, int]
    """Width and height of the model's input."""
    side: int
    """S"""
    scheme: Segmentation

    @property
    def by_model_pixels(self) -> bool:
        """True if pixels are interpolated between the model's."""
        return self.scheme.pixels == "of_model_pixels"

    @property
    def _size(self) -> tuple[int, int]:
        return self.image.width, self.image.height

    def of_image(self, masks: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the cells of masks, (..., S, S), that are not padding: (..., rows, columns)."""
        rows, columns = covered_cells(self.image.transform, self._size, self.model_size, self.side)
        return masks[..., :rows, :columns]

    def edged(self, logits: NDArray[np.float32]) -> EdgedMask:
        """Keeps the edge of a mask, (S, S), in the image; cells that affect none of its pixels are outside."""
        rows, columns = covered_cells(self.image.transform, self._size, self.model_size, self.side)
        if min(rows, columns) < self.side - 1:
            logits = logits.copy()
            logits[rows + 1 :] = logits[:, columns + 1 :] = -1
        return EdgedMask.of_logits(logits, by_model_pixels=self.by_model_pixels)

    def pixels(self, logits: NDArray[np.float32]) -> PixelMask:
        """Resizes a mask, (S, S), to the image's pixels."""
        return PixelMask.of_logits(
            logits, self.image.transform, self._size, self.model_size, by_model_pixels=self.by_model_pixels
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A mask of the decoder."""

    logits: NDArray[np.float32]
    """(S, S)"""
    predicted_iou: float
    stability: float


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A mask before non-maximum suppression."""

    edged: EdgedMask
    predicted_iou: float
    stability: float

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits of the same pixels, (S, S)."""
        return self.edged.with_all_logits()


Mask = TypeVar("Mask", _Found, _Candidate)


class SegmentationModel(ImageModel):
    """Answers prompts with masks."""

    _memory_noun = "masks"

    def __init__(
        self,
        bundle: Bundle,
        parts: StatelessParts,
        preprocessor: ImagePreprocessor,
        decoder: PromptGraph,
        decoder_max_padding: int | None,
    ) -> None:
        """Assembles a model from its parts; `load` makes the parts."""
        settings, observer = parts.settings, parts.observer
        max_bytes = settings.max_image_embeddings_mib * MIB
        super().__init__(
            bundle,
            parts,
            preprocessor,
            outputs=tuple(decoder.embedding_shapes),
            cache=LruCache("image_embeddings", max_bytes=max_bytes, ttl_s=settings.image_ttl),
        )
        manifest = bundle.manifest
        sizes = demanded(manifest.image_preprocessing)
        self._model_size = sizes.width, sizes.height
        self._scheme = manifest.segmentation or Segmentation()
        self._mask_size = decoder.mask_size
        budget = settings.batching.batch_prompts(self.device)
        self._decoder = Batcher(
            decoder,
            budget=budget,
            model=ModelId(name=manifest.name, version=manifest.version),
            session=decoder.session,
            max_padding=decoder_max_padding,
            observer=observer,
        )
        self.workers.append(self._decoder)
        self._prompts = Admission(
            limit=settings.batching.max_waiting_prompts,
            noun="prompts",
            owner=manifest.name,
            max_bytes=settings.batching.max_waiting_bytes,
            pace=MeasuredPace(),
        )
        self._mask_bytes = 4 * decoder.mask_size**2
        self._edged_bytes = EdgedMask.most_bytes(decoder.mask_size)
        self._num_together = max(budget, _LEAST_TOGETHER)
        self._embeddings = Admission(
            limit=None,
            noun="embeddings of streams",
            owner=manifest.name,
            max_bytes=max(max_bytes, _MIN_STREAM_MIB * MIB),
        )
        self.max_idle_s = settings.image_ttl
        """Seconds without a click after which a stream ends, which frees its embedding."""
        _log.info(
            "segmentation",
            model=manifest.name,
            embedding_kib=decoder.embedding_bytes >> 10,
            cached_images=max_bytes // decoder.embedding_bytes,
        )

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once.

        Raises:
            BundleError: A graph cannot be loaded, or it or its preprocessing does not fit the manifest.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        sizes = demanded(manifest.image_preprocessing)
        preprocessor = ImagePreprocessor(sizes, settings.image_limits)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        try:
            decoder = PromptGraph(runtime.open(bundle, variant.graphs["decoder"]))
        except KeyError as error:
            raise BundleError(f"{manifest.name}: its decoder has no tensor {error}; export the model again") from error
        encoder = BatchGraph(runtime.open(bundle, variant.graphs["encoder"]))
        blank = np.zeros((3, sizes.height, sizes.width), np.float32)
        parts = StatelessParts(
            precision=precision,
            graph=encoder,
            max_padding=encoder.warm_up({"pixel_values": blank}, 1, decoder.embedding_shapes),
            runtime=runtime,
            settings=settings,
            observer=observer,
        )
        return cls(bundle, parts, preprocessor, decoder, decoder.warm_up())

    async def segment(
        self,
        image: SentImage,
        prompts: Sequence[SegmentPrompt],
        *,
        max_masks: int = 0,
        mask_format: MaskFormat = MaskFormat.RUNS,
        deadline: float | None,
    ) -> SegmentedImage:
        """Answers prompts with masks of an image.

        Args:
            image: The image.
            prompts: 1 to `MAX_PROMPTS` prompts.
            max_masks: Masks of a prompt of one part, 1 to `MAX_MASKS`; 0: all of them.
            mask_format: Encoding of the masks.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the image cannot be read, a queue is full, the deadline
                passed, the server is draining.
        """
        check_count("prompts", len(prompts), MAX_PROMPTS)
        _check_max_masks(max_masks)
        for number, prompt in enumerate(prompts):
            prompt.check_parts(f"prompts[{number}]")
        embedded, timings = await self._embed_image(image, deadline)
        seen = embedded.image
        for number, prompt in enumerate(prompts):
            prompt.check_coordinates(f"prompts[{number}]", seen.width, seen.height)
        most = max_masks or MAX_MASKS
        num_masks = sum(1 if prompt.num_parts > 1 else most for prompt in prompts)
        if num_masks * seen.width * seen.height > MAX_MASK_PIXELS:
            raise InvalidInputError(
                "prompts",
                f"ask for {num_masks} masks of {seen.width} x {seen.height} pixels, the limit is {MAX_MASK_PIXELS} "
                "pixels of all masks together; send them in several calls, or a smaller image",
            )
        several = any(prompt.num_parts > 1 for prompt in prompts)
        frame, results = self._frame(seen), []
        with (
            self._reserve(min(len(prompts), self._num_together) * (most + several)),
            self._ask(embedded, prompts, deadline),
        ):
            for some in self._in_turn(prompts):
                found, more = await self._answer_prompts(embedded, some, deadline, partial(_read, most, frame))
                timings += more
                rendered = self._render(frame, [mask for row in found for mask in row], mask_format)
                results += [[await anext(rendered) for _ in row] for row in found]
        return SegmentedImage(results=results, width=seen.width, height=seen.height, timings=timings)

    async def segment_everything(
        self, image: SentImage, request: EverythingRequest, *, mask_format: MaskFormat, deadline: float | None
    ) -> Segments:
        """Finds all segments of an image; errors are those of `segment`.

        The call's memory grows with its masks. If other calls leave no room for them, it is refused then.

        Returns:
            At most `MAX_SEGMENTS` masks, the best first by the product of predicted IoU and stability.
        """
        embedded, timings = await self._embed_image(image, deadline)
        seen = embedded.image
        positions = (np.arange(request.points_per_side) + 0.5) / request.points_per_side
        prompts = [
            SegmentPrompt(points=(Point(x * seen.width, y * seen.height),)) for y in positions for x in positions
        ]
        most = max(1, min(MAX_SEGMENTS, MAX_STREAMED_PIXELS // (seen.width * seen.height)))
        candidates: list[_Candidate] = []
        frame, num_bytes = self._frame(seen), 0
        permit = self._memory.admit(0, caller=current_caller())
        try:
            with self._ask(embedded, prompts, deadline):
                for some in self._in_turn(prompts):
                    num_new = len(some) * MAX_MASKS
                    permit.resize(len(candidates) + num_new, num_bytes + num_new * self._edged_bytes)
                    found, more = await self._answer_prompts(
                        embedded, some, deadline, partial(_read_good, request, frame)
                    )
                    timings += more
                    new = [mask for row in found for mask in row]
                    candidates += new
                    num_bytes += sum(mask.edged.nbytes for mask in new)
            compared = COMPARED * sum(mask.edged.inside.nbytes for mask in candidates)
            permit.resize(len(candidates), num_bytes + compared)
            loop = asyncio.get_running_loop()
            candidates = await loop.run_in_executor(image_pool(), _choose, candidates, request.max_overlap, most)
            permit.resize(len(candidates), sum(mask.edged.nbytes for mask in candidates))
        except BaseException:
            permit.release()
            raise
        return Segments(masks=self._render(frame, candidates, mask_format), timings=timings, _permit=permit)

    def _in_turn(self, prompts: Sequence[SegmentPrompt]) -> list[Sequence[SegmentPrompt]]:
        """Divides prompts into groups that run together."""
        step = self._num_together
        return [prompts[start : start + step] for start in range(0, len(prompts), step)]

    def _ask(self, embedded: _Embedded, prompts: Sequence[SegmentPrompt], deadline: float | None) -> Permit:
        """Admits prompts until the permit is released.

        Raises:
            OverloadedError: The queue is full, or too long for the deadline.
        """
        return self._prompts.admit(len(prompts), embedded.nbytes, deadline=deadline, caller=current_caller())

    def _reserve(self, num_masks: int) -> Permit:
        """Reserves memory for a number of masks, until the permit is released.

        Raises:
            OverloadedError: Other calls leave no memory for them.
        """
        return self._memory.admit(num_masks, num_masks * self._mask_bytes, caller=current_caller())

    async def open_clicks(self, image: SentImage, *, deadline: float | None) -> ClickSession:
        """Embeds an image for a sequence of clicks; errors are those of `segment`."""
        embedded, timings = await self._embed_image(image, deadline)
        permit = self._embeddings.admit(1, embedded.nbytes + self._mask_bytes, caller=current_caller())
        return ClickSession(self, embedded, permit, timings)

    async def click(
        self, clicks: ClickSession, *, max_masks: int, mask_format: MaskFormat, deadline: float | None
    ) -> tuple[list[SegmentMask], CallTimings]:
        """Answers all clicks so far, refining the mask of the last answer, if there is one."""
        _check_max_masks(max_masks)
        earlier = clicks.earlier_mask if clicks.prompt.num_parts > 1 else None
        frame = self._frame(clicks.embedded.image)
        prompts, read = [clicks.prompt], partial(_read, max_masks or MAX_MASKS, frame)
        with self._reserve(MAX_MASKS + 1), self._ask(clicks.embedded, prompts, deadline):
            [chosen], timings = await self._answer_prompts(clicks.embedded, prompts, deadline, read, earlier=earlier)
            clicks.earlier_mask = chosen[0].logits
            return [mask async for mask in self._render(frame, chosen, mask_format)], timings

    def _frame(self, image: SeenImage) -> Frame:
        """Returns where an image is among the masks."""
        return Frame(image, self._model_size, self._mask_size, self._scheme)

    async def _embed_image(self, image: SentImage, deadline: float | None) -> tuple[_Embedded, CallTimings]:
        """Computes an image's embedding, or takes it from the cache."""
        answer = await self._answer([image], self._outputs, _Embedded, deadline)
        return answer.results[0], answer.timings

    async def _answer_prompts(
        self,
        embedded: _Embedded,
        prompts: Sequence[SegmentPrompt],
        deadline: float | None,
        read: Callable[[PromptKind, Tensors], list[Mask]],
        *,
        earlier: NDArray[np.float32] | None = None,
    ) -> tuple[list[list[Mask]], CallTimings]:
        """Runs prompts and returns the result of `read` for each.

        A prompt of several parts is run as the manifest says: at once, or its first part alone and then all of them
        with that mask. An earlier mask replaces the first run.
        """

        async def run(
            asked: Sequence[SegmentPrompt], masks: Sequence[NDArray[np.float32] | None]
        ) -> tuple[list[list[Mask]], CallTimings]:
            batched = await self._decoder.submit(
                self._items(embedded, asked, masks),
                [1] * len(asked),
                outputs=(MASKS, PREDICTED_IOU),
                read=lambda row, number: read(asked[number].kind, row),
                deadline=deadline,
                caller=current_caller(),
            )
            return batched.results, CallTimings.of(batched.runs, preprocessing_s=0.0)

        if earlier is not None or self._scheme.several_parts == "at_once":
            return await run(prompts, [earlier] * len(prompts))
        several = [number for number, prompt in enumerate(prompts) if prompt.num_parts > 1]
        firsts = [prompt.first_part if prompt.num_parts > 1 else prompt for prompt in prompts]
        found, timings = await run(firsts, [None] * len(firsts))
        if several:
            masks = [found[number][0].logits for number in several]
            answers, more = await run([prompts[number] for number in several], masks)
            timings += more
            for number, answer in zip(several, answers, strict=True):
                found[number] = answer
        return found, timings

    def _items(
        self, embedded: _Embedded, prompts: Sequence[SegmentPrompt], earlier: Sequence[NDArray[np.float32] | None]
    ) -> list[Tensors]:
        """Makes the decoder's inputs of all prompts at once: an array for each prompt would take 15 µs."""
        positions: list[tuple[float, float]] = []
        labels: list[int] = []
        ends: list[int] = []
        for prompt in prompts:
            positions += [(point.x, point.y) for point in prompt.points]
            labels += [INSIDE if point.is_inside else OUTSIDE for point in prompt.points]
            if prompt.box is not None:
                positions += [prompt.box[:2], prompt.box[2:]]
                labels += [TOP_LEFT, BOTTOM_RIGHT]
            ends.append(len(positions))
        shares = np.clip(embedded.image.transform.to_model(positions) / self._model_size, 0, 1).astype(np.float32)
        kinds = np.array(labels, np.int64)
        return [
            as_item(embedded.embedding, shares[start:end], kinds[start:end], mask)
            for start, end, mask in zip([0, *ends], ends, earlier, strict=False)
        ]

    async def _render(
        self, frame: Frame, masks: Sequence[_Found | _Candidate], mask_format: MaskFormat
    ) -> AsyncGenerator[SegmentMask, None]:
        """Resizes masks to the image's size, some at a time, off the event loop."""
        pool, loop = image_pool(), asyncio.get_running_loop()
        step = max(1, _PIXELS_AT_A_TIME // (frame.image.width * frame.image.height))
        for start in range(0, len(masks), step):
            some = masks[start : start + step]
            for mask in await loop.run_in_executor(pool, _render, some, frame, mask_format):
                yield mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments(AbstractAsyncContextManager["Segments"]):
    """Segments of an image: a context manager that releases unread ones."""

    masks: AsyncGenerator[SegmentMask, None]
    """Masks, resized one by one."""
    timings: CallTimings
    """Timings without resizing."""
    _permit: Permit

    async def __aexit__(self, *exception: object) -> None:
        await self.masks.aclose()
        self._permit.release()


@dataclass(slots=True, eq=False)
class ClickSession(AbstractContextManager["ClickSession"]):
    """A sequence of clicks in one image: a context manager that releases its embedding."""

    model: SegmentationModel
    embedded: _Embedded
    _reserved: AbstractContextManager[Any]
    timings: CallTimings = NO_TIMINGS
    """Timings of the embedding."""
    prompt: SegmentPrompt = field(default_factory=SegmentPrompt)
    """All clicks so far."""
    earlier_mask: NDArray[np.float32] | None = None
    """Logits of the last answer, (S, S)."""

    def add(self, more: SegmentPrompt) -> None:
        """Adds points, and a box that replaces an earlier one.

        Raises:
            InvalidInputError: The resulting prompt is invalid.
        """
        prompt = SegmentPrompt(points=self.prompt.points + more.points, box=more.box or self.prompt.box)
        prompt.check_parts("prompt")
        more.check_coordinates("prompt", self.embedded.image.width, self.embedded.image.height)
        self.prompt = prompt

    def restart(self) -> None:
        """Removes all clicks and the last answer."""
        self.prompt, self.earlier_mask = SegmentPrompt(), None

    def __exit__(self, *exception: object) -> None:
        self._reserved.__exit__(None, None, None)


def _check_max_masks(max_masks: int) -> None:
    if not 0 <= max_masks <= MAX_MASKS:
        raise InvalidInputError("max_mask_count", f"is {max_masks}; it goes from 1 to {MAX_MASKS}, 0 for all")


def _read(most: int, frame: Frame, kind: PromptKind, row: Tensors) -> list[_Found]:
    """Returns at most `most` masks that answer a prompt, the best first."""
    masks, predicted_iou = row[MASKS], row[PREDICTED_IOU]
    order = answer_order(masks, predicted_iou, kind, frame.scheme.stable_mask)[:most]
    return [
        _Found(masks[number].copy(), float(predicted_iou[number]), float(share))
        for number, share in zip(order, stability(frame.of_image(masks[order])), strict=True)
    ]


def _read_good(wanted: EverythingRequest, frame: Frame, kind: PromptKind, row: Tensors) -> list[_Candidate]:
    """Returns the masks that answer a prompt with sufficient quality, the best first."""
    masks, predicted_iou = row[MASKS], row[PREDICTED_IOU]
    order = answer_order(masks, predicted_iou, kind, frame.scheme.stable_mask)
    shown = frame.of_image(masks[order])
    shares = stability(shown)
    good = (predicted_iou[order] >= wanted.min_predicted_iou) & (shares >= wanted.min_stability)
    good &= (shown > 0).any(axis=(-2, -1))
    return [
        _Candidate(frame.edged(masks[number]), float(predicted_iou[number]), float(share))
        for number, share in zip(order[good], shares[good], strict=True)
    ]


def _choose(masks: Sequence[_Candidate], max_overlap: float, most: int) -> list[_Candidate]:
    """Drops masks that nearly equal better ones, and returns the best."""
    if not masks:
        return []
    scores = np.array([mask.predicted_iou * mask.stability for mask in masks], np.float32)
    inside = [mask.edged.inside for mask in masks]
    return [masks[number] for number in drop_duplicates(inside, scores, max_overlap, most)]


def _render(masks: Sequence[_Found | _Candidate], frame: Frame, mask_format: MaskFormat) -> list[SegmentMask]:
    rendered = []
    for mask in masks:
        pixels = frame.pixels(mask.logits)
        rendered.append(
            SegmentMask(
                counts=pixels.runs() if mask_format is MaskFormat.RUNS else None,
                png=pixels.png() if mask_format is MaskFormat.PNG else None,
                predicted_iou=mask.predicted_iou,
                stability=mask.stability,
                box=pixels.box,
                area=pixels.area,
                width=frame.image.width,
                height=frame.image.height,
            )
        )
    return rendered
