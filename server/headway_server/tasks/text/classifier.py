"""Labels of texts, or of pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_probability, check_top_k
from headway_server.tasks.outputs import LOGITS, ScoredLabel
from headway_server.tasks.text.model import TextInputs, TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool


class TextClassifier(TextModel):
    """Labels texts."""

    async def classify(
        self, inputs: TextInputs, *, top_k: int, deadline: float | None, threshold: float | None = None
    ) -> Answer[ClassifiedText]:
        """Labels texts.

        Args:
            inputs: The texts.
            top_k: Labels to answer a text, 1 to the number of labels; 0: all of them.
            deadline: When the caller stops waiting, by `time.monotonic`.
            threshold: Probability from which a label applies, 0 to 1, in place of the model's.

        Raises:
            RequestError: An argument is out of its range, the texts cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))
        if threshold is not None:
            check_probability("threshold", threshold)

        def read(probabilities: NDArray[Any], _: str, encoded: EncodedText) -> ClassifiedText:
            labels = self._label_reader.read(probabilities, num_labels, threshold)
            return ClassifiedText(labels=labels, num_tokens=len(encoded), truncated=encoded.truncated)

        return await self._answer(inputs, LOGITS, read, deadline=deadline)
