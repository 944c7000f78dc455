"""Captioning model as served: the encoder-decoder of translation, with an image encoder.

S patches of an image.

A question is read by the encoder behind an image, whose patches stand in front of it as one token S times.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import Bundle, ImageQuestion, Languages, Manifest, PatchGrid, demanded
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.sequence import Delta
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImagePreprocessor, TextTokenizer
from headway_server.preprocessing.image import ImageLimits, PreparedImage
from headway_server.serving.answers import Answer
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_count, check_one_each, check_size_of_call, num_bytes
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
    """Converts images to pixels for an encoder of patches, with the questions about them."""

    def __init__(self, manifest: Manifest, limits: ImageLimits, tokenizer: TextTokenizer) -> None:
        """Takes the manifest's image settings; errors are those of `ImagePreprocessor`."""
        preprocessing = demanded(manifest.image_preprocessing)
        self._preprocessor = ImagePreprocessor(preprocessing, limits)
        self._size = preprocessing.height, preprocessing.width
        self._tokenizer = tokenizer
        self._owner = manifest.name
        self._question = manifest.image_question
        self._most_tokens = demanded(manifest.limits.max_input_tokens)
        self.grid = demanded(manifest.patches)

    @property
    def num_image_bytes(self) -> int:
        """Bytes of a prepared image."""
        return self._preprocessor.num_image_bytes

    def blank(self) -> EncoderInput:
        """Returns a single-coloured image."""
        return self._input(np.zeros((3, *self._size), np.float32), np.zeros(0, np.int64))

    async def prepare(self, images: Elements[bytes], fields: Elements[str]) -> list[PreparedImage]:
        """Decodes images off the event loop; errors are those of `ImagePreprocessor.prepare_batch`."""
        return await self._preprocessor.prepare_batch(images, fields=fields)

    def check_questions(self, questions: Elements[str], names: Elements[str]) -> None:
        """Checks questions before any work is done for them.

        Raises:
            InvalidInputError: The model reads none, or one has more than the name of a task that takes nothing.
        """
        for name, question in zip(names, questions, strict=True):
            if not question:
                continue
            if self._question is None:
                raise InvalidInputError(name, f"is set, and {self._owner} reads no text with an image; leave it out")
            if self._question.spelled_out(question) is None:
                raise InvalidInputError(name, "has more than the name of a task that takes nothing; leave out the rest")

    async def read(
        self, images: Elements[PreparedImage], questions: Elements[str], names: Elements[str]
    ) -> list[Reading]:
        """Returns the readings of images with the questions about them.

        Raises:
            InvalidInputError: A question has too many tokens, or a special one.
        """
        asked = await self._encode_questions(questions, names) if self._question is not None else [None] * len(images)
        return [
            Reading(source=self._input(image.pixel_values, ids), input_index=index)
            for index, (image, ids) in enumerate(zip(images, asked, strict=True))
        ]

    async def _encode_questions(self, questions: Elements[str], names: Elements[str]) -> list[NDArray[np.int64]]:
        asked = demanded(self._question)
        texts = [demanded(asked.spelled_out(question or asked.default)) for question in questions]
        given = [index for index, text in enumerate(texts) if text]
        encoded = await self._tokenizer.encode_limited(
            [texts[index] for index in given],
            fields=[names[index] for index in given],
            max_tokens=self._most_tokens - self.grid.num_tokens - asked.num_framing,
            truncate=False,
            add_special_tokens=False,
        )
        ids = [np.zeros(0, np.int64)] * len(texts)
        for index, text in zip(given, encoded, strict=True):
            ids[index] = text.input_ids
            if special := sorted(self._tokenizer.special_ids.intersection(text.input_ids.tolist())):
                token = self._tokenizer.library_tokenizer.id_to_token(special[0])
                raise InvalidInputError(
                    names[index],
                    f"has {token!r}, a special token of {self._owner}, which no question has; leave it out",
                )
        return ids

    def _input(self, pixel_values: NDArray[np.float32], question: NDArray[np.int64] | None) -> EncoderInput:
        """Returns the encoder's input of an image, (3, height, width), and of a question about it, (T,)."""
        if self._question is None:
            return EncoderInput.of_pixels(pixel_values, self.grid.num_tokens)
        ids = framed_question(self._question, self.grid, demanded(question))
        return EncoderInput({"pixel_values": pixel_values, "input_ids": ids}, len(ids))

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
        assert parts.image_limits is not None, "`load` sets them"
        self._reader = ImageReader(bundle.manifest, parts.image_limits, parts.tokenizer)
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
                readings = await self._reader.read(prepared, *_questions(request, len(images)))
                sources = await self._sources(call, readings)
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
                readings = await self._reader.read([prepared], *_questions(request, 1, is_stream=True))
                [source] = await self._sources(call, readings)
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
            InvalidInputError: `max_length_ratio` is set, or a question is none of the model's.
        """
        check_one_each("questions", len(request.questions), count)
        questions, names = _questions(request, count, is_stream=is_stream)
        for name, question in zip(names, questions, strict=True):
            if (size := num_bytes(question)) > self._max_text_bytes:
                raise InvalidInputError(name, f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it")
        check_size_of_call("questions", questions, self._max_text_bytes)
        self._reader.check_questions(questions, names)
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


def framed_question(question: ImageQuestion, grid: PatchGrid, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the tokens that the encoder reads of a question (T,) about an image: (S + T + those around it,)."""
    before = np.array([question.token] * grid.num_tokens + list(question.before), np.int64)
    return np.concatenate([before, ids, np.array(question.after, np.int64)])


def _questions(request: TextToTextRequest, count: int, *, is_stream: bool = False) -> tuple[list[str], list[str]]:
    """Returns the question about each image, which may be empty, and its name in the request."""
    questions = list(request.questions) or [""] * count
    return questions, ["question"] if is_stream else [f"questions[{index}]" for index in range(count)]
