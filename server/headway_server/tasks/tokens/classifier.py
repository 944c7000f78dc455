"""Token classification: labelled spans of texts, and of the words of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import demanded
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText
from headway_server.preprocessing.pool import off_loop
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_count
from headway_server.tasks.outputs import EMBEDDING, LOGITS, read_embedding
from headway_server.tasks.text.model import TextInputs, TextModel
from headway_server.tasks.tokens.pages import MAX_WORDS, PageInputs, token_boxes
from headway_server.tasks.tokens.spans import Span, SpanDecoder

_FEW_WORDS: Final = 2_000
"""Maximum words and tokens whose boxes are scaled and placed on the event loop, in about 2 ms."""
_WORDS_OF_PAGE: Final = 64
"""Words that take as long as a page beside its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledSpan:
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    label: str
    probability: float
    start: int
    end: int
    words: tuple[int, int] | None = None
    """First word and exclusive end, of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText:
    """Spans of one text or page, in order; they do not overlap."""

    spans: tuple[LabeledSpan, ...]
    num_tokens: int
    truncated: bool
    embedding: NDArray[np.float32] | None = None
    """(D,), if requested."""


class TokenClassifier(TextModel):
    """Labels spans of texts, or of pages if the manifest has boxes of words."""

    _labels_tokens = True

    @cached_property
    def _decoder(self) -> SpanDecoder:
        return SpanDecoder.of(self.bundle.manifest.labels, self.bundle.manifest.tagging)

    @property
    def labels(self) -> tuple[str, ...]:
        """Possible labels of a span."""
        return self._decoder.labels

    async def classify(
        self,
        inputs: TextInputs,
        *,
        deadline: float | None,
        embedding: Literal["none", "raw", "normalized"] = "none",
    ) -> Answer[TaggedText]:
        """Labels spans of texts or pages.

        Args:
            inputs: Texts, `PageInputs` if and only if the model reads boxes.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            embedding: Embedding to return with each text, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        decoder = self._decoder

        def read(row: Tensors, index: int, encoded: EncodedText) -> TaggedText:
            if isinstance(inputs, PageInputs):
                spans = self._of_words(decoder.decode_words(row[LOGITS], encoded.word_ids), inputs.pages[index].words)
            else:
                found = decoder.decode_text(row[LOGITS], inputs.texts[index], encoded.offsets, encoded.word_ids)
                spans = [self._labeled(span, span.start, span.end) for span in found]
            return TaggedText(
                spans=tuple(spans),
                num_tokens=len(encoded),
                truncated=encoded.truncated,
                embedding=read_embedding(row, embedding),
            )

        outputs = (LOGITS,) if embedding == "none" else (LOGITS, EMBEDDING)
        return await self._answer(inputs, outputs, read, deadline=deadline, with_offsets=True)

    def _labeled(self, span: Span, start: int, end: int, words: tuple[int, int] | None = None) -> LabeledSpan:
        return LabeledSpan(
            label=self._decoder.labels[span.label], probability=span.probability, start=start, end=end, words=words
        )

    def _of_words(self, spans: Sequence[Span], words: Sequence[str]) -> list[LabeledSpan]:
        """Adds to spans of words their characters in the page's text."""
        starts = [0, *accumulate(len(word) + 1 for word in words)]
        return [self._labeled(span, starts[span.start], starts[span.end] - 1, span[:2]) for span in spans]

    def _check(self, inputs: TextInputs) -> list[str]:
        """As of texts; the number of pages is told of `pages`."""
        if isinstance(inputs, PageInputs):
            check_count("pages", len(inputs.pages), MAX_TEXTS)
            if (count := sum(len(page.words) for page in inputs.pages)) > MAX_WORDS:
                raise InvalidInputError(
                    "pages", f"have {count} words in all, the limit is {MAX_WORDS}; send them in several calls"
                )
        return super()._check(inputs)

    async def _encode(self, inputs: TextInputs, fields: Sequence[str], *, with_offsets: bool) -> list[EncodedText]:
        """As of texts; of pages with their boxes, errors of which are those of `Page.sides`."""
        if not isinstance(inputs, PageInputs):
            return await super()._encode(inputs, fields, with_offsets=with_offsets)
        unit, pages = demanded(self.bundle.manifest.word_boxes), inputs.pages

        def scale() -> list[NDArray[Any]]:
            return [page.scaled(page.sides(field), unit) for page, field in zip(pages, fields, strict=True)]

        size = sum(_WORDS_OF_PAGE + len(page.words) for page in pages)
        boxes = await off_loop(size, scale, most_on_loop=_FEW_WORDS)
        encoded = await self._tokenizer.encode_limited(
            [page.words for page in pages],
            fields=fields,
            max_tokens=self.max_input_tokens,
            truncate=inputs.truncate or self._tokenizer.truncates,
            with_offsets=True,
        )

        def place() -> list[EncodedText]:
            return [
                replace(text, offsets=(), boxes=token_boxes(own, text.word_ids, unit))
                for text, own in zip(encoded, boxes, strict=True)
            ]

        return await off_loop(size + sum(map(len, encoded)), place, most_on_loop=_FEW_WORDS)
