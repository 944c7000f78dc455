"""Scores of texts, or of pairs of texts: one number each, such as how well a document answers a query."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headway_server.batching import Tensors
from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import Answer
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.text.model import TextInputs, TextModel, TokenInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """The score of one text, or of one pair."""

    score: float
    num_tokens: int
    truncated: bool


class TextScorer(TextModel):
    """Scores texts: the one logit of its graph, after a sigmoid where the manifest says so."""

    async def score(self, inputs: TextInputs | TokenInputs, *, deadline: float | None) -> Answer[ScoredText]:
        """Scores texts.

        Args:
            inputs: The texts. A single one with several to pair it with stands for as many pairs.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        if isinstance(inputs, TextInputs) and inputs.text_pairs and len(inputs.texts) == 1:
            inputs = replace(inputs, texts=[inputs.texts[0]] * len(inputs.text_pairs))

        def read(row: Tensors, _: str, encoded: EncodedText) -> ScoredText:
            score = float(row[LOGITS][0])
            if not math.isfinite(score):
                raise FloatingPointError("the model's score is not a number")
            return ScoredText(score=score, num_tokens=len(encoded), truncated=encoded.truncated)

        return await self._answer(inputs, (LOGITS,), read, deadline=deadline)
