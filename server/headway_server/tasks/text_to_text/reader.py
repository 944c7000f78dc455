"""Encoder inputs of texts: the tokens of a text, or of each of its sentences."""

from __future__ import annotations

from collections.abc import Sequence as Elements
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from headway_server.decoding.interfaces import EncoderInput
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import SplitText, TextTokenizer
from headway_server.tasks.text_to_text.alignment import source_spans
from headway_server.tasks.text_to_text.call import Reading, TextToTextCall

_NO_TEXT: Final = "has no text; give it at least one word"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Unit of encoding: a text, or a sentence of a text."""

    text: str
    field: str
    """Name of its text in the request."""
    text_index: int
    """Index of its text in the call."""
    sentence_index: int = 0
    location: str = ""
    """Part of the text, for error messages; empty for a whole text."""


class TextReader:
    """Tokenizes texts."""

    def __init__(self, tokenizer: TextTokenizer, *, max_tokens: int) -> None:
        """Takes the model's tokenizer and the maximum tokens of a source."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def blank(self) -> EncoderInput:
        """Returns a source of only the largest token."""
        return EncoderInput.of_tokens(np.array([self._tokenizer.largest_id]))

    async def read(self, call: TextToTextCall, passages: Elements[Passage]) -> list[Reading]:
        """Tokenizes passages, off the event loop.

        Raises:
            InvalidInputError: A passage has too many tokens, or none.
        """
        try:
            encoded = await self._tokenizer.encode_limited(
                [passage.text for passage in passages],
                fields=[str(number) for number in range(len(passages))],
                max_tokens=self._max_tokens - len(call.source_prefix),
                truncate=call.request.truncate or self._tokenizer.truncates,
                with_offsets=call.request.wants_alignment,
            )
        except InvalidInputError as error:
            passage = passages[int(error.field)]
            raise InvalidInputError(passage.field, passage.location, *error.parts) from None
        if call.source_prefix:
            encoded = [text.after(call.source_prefix) for text in encoded]
        return [
            Reading(
                source=EncoderInput.of_tokens(text.input_ids),
                input_index=passage.text_index,
                sentence_index=passage.sentence_index,
                spans=partial(source_spans, passage.text, text),
                truncated=text.truncated,
            )
            for passage, text in zip(passages, encoded, strict=True)
        ]


def whole_texts(texts: Elements[str], fields: Elements[str]) -> list[Passage]:
    """Returns whole texts as passages.

    Raises:
        InvalidInputError: A text is only white space; a model would invent an output for it.
    """
    for text, field in zip(texts, fields, strict=True):
        if text.isspace():
            raise InvalidInputError(field, _NO_TEXT)
    return [
        Passage(text=text, field=field, text_index=index)
        for index, (text, field) in enumerate(zip(texts, fields, strict=True))
    ]


def sentences(splits: Elements[SplitText], fields: Elements[str]) -> list[Passage]:
    """Returns the sentences of all texts as passages, in order.

    Raises:
        InvalidInputError: A text has no sentences.
    """
    for split, field in zip(splits, fields, strict=True):
        if not split.sentences:
            raise InvalidInputError(field, _NO_TEXT)
    return [
        Passage(
            text=sentence.text,
            field=fields[text_index],
            text_index=text_index,
            sentence_index=index,
            location=f"sentence {index + 1} (characters {sentence.start} to {sentence.end}) ",
        )
        for text_index, split in enumerate(splits)
        for index, sentence in enumerate(split.sentences)
    ]
