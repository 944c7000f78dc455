"""Token classification: labelled spans of texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import Answer
from headway_server.tasks.outputs import EMBEDDING, LOGITS, read_embedding
from headway_server.tasks.text.model import TextInputs, TextModel
from headway_server.tasks.tokens.spans import SpanDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledSpan:
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    label: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText:
    """Spans of one text, in order; they do not overlap."""

    spans: tuple[LabeledSpan, ...]
    num_tokens: int
    truncated: bool
    embedding: NDArray[np.float32] | None = None
    """(D,), if requested."""


class TokenClassifier(TextModel):
    """Labels spans of texts."""

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
        """Labels spans of texts.

        Args:
            inputs: Texts.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            embedding: Embedding to return with each text, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        decoder = self._decoder

        def read(row: Tensors, text: str, encoded: EncodedText) -> TaggedText:
            spans = tuple(
                LabeledSpan(
                    label=decoder.labels[span.label], probability=span.probability, start=span.start, end=span.end
                )
                for span in decoder.decode_text(row[LOGITS], text, encoded.offsets, encoded.word_ids)
            )
            return TaggedText(
                spans=spans,
                num_tokens=len(encoded),
                truncated=encoded.truncated,
                embedding=read_embedding(row, embedding),
            )

        outputs = (LOGITS,) if embedding == "none" else (LOGITS, EMBEDDING)
        return await self._answer(inputs, outputs, read, deadline=deadline, with_offsets=True)
