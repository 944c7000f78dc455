"""Captioning model as served: the encoder-decoder of translation, with an image encoder.

S patches of an image.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle, ImagePreprocessing, Languages, PatchGrid, demanded
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.sequence import Delta
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits, PreparedImage
from headway_server.serving.answers import Answer
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_count
from headway_server.tasks.decoding import ModelParts
from headway_server.tasks.text_to_text.answer import WrittenText
from headway_server.tasks.text_to_text.call import Reading, TextToTextCall
from headway_server.tasks.text_to_text.model import WritingModel
from headway_server.tasks.text_to_text.phrases import Tokens
from headway_server.tasks.text_to_text.request import TextToTextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """Result of one image."""

    written: WrittenText
    """Caption; its alignment is the attention of each token over the image's tokens: `grid.num_leading`, then the
    patches, row by row."""
    grid: PatchGrid
    seen_part: tuple[float, float, float, float]
    """Left, top, right and bottom of the area covered by patches, in pixels of the upright image."""
    width: int
    """Width of the upright image, in pixels."""
    height: int


class ImageReader:
    """Converts images to pixels for an encoder of patches."""

    def __init__(self, preprocessing: ImagePreprocessing, limits: ImageLimits, grid: PatchGrid) -> None:
        """Takes the manifest's image settings; errors are those of `ImagePreprocessor`."""
        self._preprocessor = ImagePreprocessor(preprocessing, limits)
        self._size = preprocessing.height, preprocessing.width
        self.grid = grid

    @property
    def num_image_bytes(self) -> int:
        """Bytes of a prepared image."""
        return self._preprocessor.num_image_bytes

    def blank(self) -> EncoderInput:
        """Returns a single-coloured image."""
        return EncoderInput.of_pixels(np.zeros((3, *self._size), np.float32), 1)

    async def prepare(self, images: Elements[bytes], fields: Elements[str]) -> list[PreparedImage]:
        """Decodes images off the event loop; errors are those of `ImagePreprocessor.prepare_batch`."""
        return await self._preprocessor.prepare_batch(images, fields=fields)

    def read(self, images: Elements[PreparedImage]) -> list[Reading]:
        """Returns the readings of images."""
        return [
            Reading(source=EncoderInput.of_pixels(image.pixel_values, self.grid.num_tokens), input_index=index)
            for index, image in enumerate(images)
        ]

    def seen_part(self, image: PreparedImage) -> tuple[float, float, float, float]:
        """Returns left, top, right and bottom of the area covered by patches, in pixels of the upright image."""
        height, width = self._size
        (left, top), (right, bottom) = image.transform.to_image([[0, 0], [width, height]]).tolist()
        return left, top, right, bottom


class CaptioningModel(WritingModel):
    """Writes a caption for each image, in a choice of languages."""

    _noun = "images"
    _field = "images"
    _prefix_field = "prefix"

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; errors are those of `WritingModel`, and of `ImagePreprocessor`."""
        super().__init__(bundle, parts)
        manifest = bundle.manifest
        assert parts.image_limits is not None, "`load` sets them"
        self._reader = ImageReader(
            demanded(manifest.image_preprocessing), parts.image_limits, demanded(manifest.patches)
        )
        self._blank = self._reader.blank

    async def caption(
        self, images: Elements[bytes] | Elements[SentImage], *, request: TextToTextRequest
    ) -> Answer[Caption]:
        """Writes a caption for each image; all of them, or none.

        Args:
            images: 1 to `MAX_IMAGES` images.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter is out of its range, an image cannot be read, there is no room, the deadline
                passed, the server is draining.
        """
        check_count("images", len(images), MAX_IMAGES)
        call = self._call(request, len(images))
        num_bytes = len(images) * self._reader.num_image_bytes + call.most_rule_bytes
        with self._begin(
            len(images), num_tokens=call.plan.num_tokens, num_bytes=num_bytes, deadline=request.deadline
        ) as job:
            with job.preparing():
                data = [one.data if isinstance(one, SentImage) else one for one in images]
                names = [one.field if isinstance(one, SentImage) else f"images[{i}]" for i, one in enumerate(images)]
                prepared = await self._reader.prepare(data, names)
                sources = await self._sources(call, self._reader.read(prepared))
            results = await job.run([call.sequence(source) for source in sources])
        written = await self._written(call, sources, results, [])
        return job.answer([self._caption(*pair) for pair in zip(written, prepared, strict=True)])

    async def stream_caption(
        self, image: bytes | SentImage, *, field: str, request: TextToTextRequest
    ) -> AsyncGenerator[Delta | Answer[Caption], None]:
        """Writes a caption for an image: yields deltas of it as they appear, and last the answer.

        The first delta has the whole prefix. Errors are those of `caption`.
        """
        call = self._call(request, 1, is_stream=True)
        num_bytes = self._reader.num_image_bytes + call.most_rule_bytes
        with self._begin(1, num_tokens=call.plan.num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                data = image.data if isinstance(image, SentImage) else image
                [prepared] = await self._reader.prepare([data], [field])
                [source] = await self._sources(call, self._reader.read([prepared]))
            async with aclosing(self._write_source(job, call, source)) as parts:
                async for part in parts:
                    yield part if isinstance(part, Delta) else job.answer([self._caption(part, prepared)])

    def _caption(self, written: WrittenText, image: PreparedImage) -> Caption:
        left, top, right, bottom = self._reader.seen_part(image)
        return Caption(
            written=written,
            grid=self._reader.grid,
            seen_part=(left, top, right, bottom),
            width=image.width,
            height=image.height,
        )

    def _call(self, request: TextToTextRequest, count: int, *, is_stream: bool = False) -> TextToTextCall:
        """See `WritingModel`.

        Raises:
            InvalidInputError: `max_length_ratio` is set.
        """
        if request.parameters.max_length_ratio is not None:
            raise InvalidInputError(
                "parameters.max_length_ratio", "is set, and an image has no tokens; set max_new_tokens instead"
            )
        return super()._call(request, count, is_stream=is_stream)

    def _start(self, request: TextToTextRequest) -> tuple[Tokens, Tokens]:
        """See `WritingModel`; a caption starts with a language token.

        Raises:
            InvalidInputError: The model does not have the language, or none of several is named.
        """
        given = (self._bos_id, *self.bundle.manifest.prompt_prefix)
        languages, code = self.bundle.manifest.languages, request.target_language
        if languages is None:
            if code:
                raise InvalidInputError("language", f"is {code[:64]!r}; {self.bundle.manifest.name} names none")
            return (), given
        language = Languages.match(code, languages.targets)
        if language is None:
            says = f"is {code[:64]!r}" if code else "is empty"
            raise InvalidInputError(
                "language", f"{says}; {self.bundle.manifest.name} writes {', '.join(languages.targets)}: name one"
            )
        token = languages.target_tokens.get(language)
        return (), given if token is None else (*given, token)
