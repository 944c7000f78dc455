"""Labels of texts, or of pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_probability, check_top_k
from headway_server.tasks.outputs import EMBEDDING, LOGITS, ScoredLabel, read_embedding
from headway_server.tasks.text.model import TextInputs, TextModel, TokenInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool
    embedding: NDArray[np.float32] | None = None
    """(D,), if it was asked for."""


class TextClassifier(TextModel):
    """Labels texts."""

    async def classify(
        self,
        inputs: TextInputs | TokenInputs,
        *,
        top_k: int,
        deadline: float | None,
        threshold: float | None = None,
        embedding: Literal["none", "raw", "normalized"] = "none",
    ) -> Answer[ClassifiedText]:
        """Labels texts.

        Args:
            inputs: The texts.
            top_k: Labels to answer a text, 1 to the number of labels; 0: all of them.
            deadline: When the caller stops waiting, by `time.monotonic`.
            threshold: Probability from which a label applies, 0 to 1, in place of the model's.
            embedding: Which vector of each text to answer too, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: An argument is out of its range, the texts cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))
        if threshold is not None:
            check_probability("threshold", threshold)

        def read(row: Tensors, _: str, encoded: EncodedText) -> ClassifiedText:
            return ClassifiedText(
                labels=self._label_reader.read(row[LOGITS], num_labels, threshold),
                num_tokens=len(encoded),
                truncated=encoded.truncated,
                embedding=read_embedding(row, embedding),
            )

        outputs = (LOGITS,) if embedding == "none" else (LOGITS, EMBEDDING)
        return await self._answer(inputs, outputs, read, deadline=deadline)
