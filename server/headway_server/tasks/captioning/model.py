"""A model that says what images show, as it is served: the engine of translations, whose encoder reads pixels.

S patches of an image.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle, Languages, PatchGrid
from headway_server.decoding.interfaces import Decoder, Encoder, EncoderInput
from headway_server.decoding.sequence import Delta
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText, ImagePreprocessor
from headway_server.preprocessing.image import PreparedImage
from headway_server.serving.answers import Answer
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_count
from headway_server.tasks.decoding import ModelParts
from headway_server.tasks.text_to_text.answer import WrittenText
from headway_server.tasks.text_to_text.call import Passage, Source, TextToTextCall
from headway_server.tasks.text_to_text.model import TextToTextModel
from headway_server.tasks.text_to_text.phrases import Tokens
from headway_server.tasks.text_to_text.request import TextToTextRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    """What became of an image."""

    written: WrittenText
    """The caption; its alignments have what each token attended to, over the patches row by row."""
    grid: PatchGrid
    seen_part: tuple[float, float, float, float]
    """Left, top, right and bottom of what the patches cover, in pixels of the upright image."""
    width: int
    """Of the upright image, in pixels."""
    height: int


class CaptioningModel(TextToTextModel):
    """Writes a caption for each image, in one language or another."""

    _noun = "images"
    _field = "images"

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Makes a model of its parts; errors are those of `TextToTextModel`, and of `ImagePreprocessor`."""
        super().__init__(bundle, parts)
        manifest = bundle.manifest
        assert manifest.image_preprocessing is not None, "the manifest's validator demands it"
        assert manifest.patches is not None, "the manifest's validator demands it"
        assert parts.image_limits is not None, "`load` gives them"
        self._preprocessor = ImagePreprocessor(manifest.image_preprocessing, parts.image_limits)
        self._grid = manifest.patches
        self._size = (manifest.image_preprocessing.height, manifest.image_preprocessing.width)
        self._image_bytes = self._preprocessor.num_image_bytes
        num_patches = self._grid.rows * self._grid.columns
        self._patches = EncodedText(input_ids=np.zeros(num_patches, np.int64), offsets=((0, 0),) * num_patches)

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`."""
        assert encoder is not None, "the manifest's validator demands the graph"
        preprocessing = self.bundle.manifest.image_preprocessing
        assert preprocessing is not None, "the manifest's validator demands it"
        blank = np.zeros((3, preprocessing.height, preprocessing.width), np.float32)
        decoder.set_sources(encoder.encode([EncoderInput.of_pixels(blank, 1)]))
        for token_id in (self._bos_id, self._tokenizer.largest_id):
            decoder.decode(np.array([token_id]), np.zeros(1, np.int64))
        decoder.set_sources([])

    async def caption(
        self, images: Elements[bytes] | Elements[SentImage], *, request: TextToTextRequest
    ) -> Answer[Caption]:
        """Writes a caption for each image; all of them, or none.

        Args:
            images: 1 to `MAX_IMAGES` images.
            request: What is asked for beside them.

        Raises:
            RequestError: A parameter is out of its range, an image cannot be read, there is no room, the deadline
                passed, the server is draining.
        """
        check_count("images", len(images), MAX_IMAGES)
        with _named_prefixes():
            request.check_one_each(len(images))
            self._check_prefixes(request.target_prefixes, "target_prefixes[{}]")
        call = self._call(request, len(images))
        num_bytes = len(images) * self._image_bytes + call.most_rule_bytes
        with self._begin(
            len(images), num_tokens=call.plan.num_tokens, num_bytes=num_bytes, deadline=request.deadline
        ) as job:
            with job.preparing():
                prepared = await self._prepare(images)
                sources = await self._see(call, prepared)
            results = await job.run([call.sequence(source) for source in sources])
        written = await self._written(call, sources, results, [])
        return job.answer([self._caption(*pair) for pair in zip(written, prepared, strict=True)])

    async def stream_caption(
        self, image: bytes | SentImage, *, field: str, request: TextToTextRequest
    ) -> AsyncGenerator[Delta | Answer[Caption], None]:
        """Writes a caption for an image: yields deltas of it as they appear, and last the answer.

        The first delta has the whole prefix. Errors are those of `caption`.
        """
        with _named_prefixes():
            self._check_prefixes(request.target_prefixes, "target_prefix")
        call = self._call(request, 1, is_stream=True)
        num_bytes = self._image_bytes + call.most_rule_bytes
        with self._begin(1, num_tokens=call.plan.num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                data = image.data if isinstance(image, SentImage) else image
                [prepared] = await self._preprocessor.prepare_batch([data], fields=[field])
                [source] = await self._see(call, [prepared])
            async with aclosing(self._write_source(job, call, source)) as parts:
                async for part in parts:
                    yield part if isinstance(part, Delta) else job.answer([self._caption(part, prepared)])

    async def _prepare(self, images: Elements[bytes] | Elements[SentImage]) -> list[PreparedImage]:
        data = [one.data if isinstance(one, SentImage) else one for one in images]
        fields = [one.field if isinstance(one, SentImage) else f"images[{i}]" for i, one in enumerate(images)]
        return await self._preprocessor.prepare_batch(data, fields=fields)

    async def _see(self, call: TextToTextCall, prepared: Elements[PreparedImage]) -> list[Source]:
        """Makes sources of images, with the prefixes of their captions."""
        passages = [Passage(text="", field=f"images[{i}]", text_index=i) for i in range(len(prepared))]
        with _named_prefixes():
            sources = await self._sources(call, passages, [self._patches] * len(prepared))
        return [
            replace(source, read=EncoderInput.of_pixels(image.pixel_values, len(self._patches)))
            for source, image in zip(sources, prepared, strict=True)
        ]

    def _caption(self, written: WrittenText, image: PreparedImage) -> Caption:
        height, width = self._size
        (left, top), (right, bottom) = image.transform.to_image([[0, 0], [width, height]]).tolist()
        return Caption(
            written=written,
            grid=self._grid,
            seen_part=(left, top, right, bottom),
            width=image.width,
            height=image.height,
        )

    def _call(self, request: TextToTextRequest, num_texts: int, *, is_stream: bool = False) -> TextToTextCall:
        """See `TextToTextModel`.

        Raises:
            InvalidInputError: A limit for each token of the source is set.
        """
        if request.parameters.max_length_ratio is not None:
            raise InvalidInputError(
                "parameters.max_length_ratio", "is set, and an image has no tokens; set max_new_tokens instead"
            )
        return super()._call(request, num_texts, is_stream=is_stream)

    def _start(self, request: TextToTextRequest) -> tuple[Tokens, Tokens]:
        """See `TextToTextModel`; a caption's first token tells its language.

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


@contextmanager
def _named_prefixes() -> Iterator[None]:
    """Names prefixes in an error as requests for captions do."""
    try:
        yield
    except InvalidInputError as error:
        raise error.renamed(lambda field: re.sub("^target_prefix", "prefix", field)) from None
