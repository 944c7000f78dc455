"""Scoring of texts, or of pairs of texts: one number each, such as the relevance of a document to a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway_server.batching import Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import NO_TIMINGS, Answer
from headway_server.serving.limits import check_text, check_texts
from headway_server.tasks.outputs import LOGITS
from headway_server.tasks.text.labels import MAX_LABELS
from headway_server.tasks.text.model import Relevance, TextInputs, TextModel, TokenInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """Score of one text, or of one pair."""

    score: float
    num_tokens: int
    truncated: bool


class TextScorer(TextModel):
    """Scores texts by the graph's single logit, after a sigmoid if the manifest has one."""

    async def score(self, inputs: TextInputs | TokenInputs, *, deadline: float | None) -> Answer[ScoredText]:
        """Scores texts.

        Args:
            inputs: Texts. A single text with several second texts makes a pair with each.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        if isinstance(inputs, TextInputs) and inputs.text_pairs and len(inputs.texts) == 1:
            inputs = replace(inputs, texts=[inputs.texts[0]] * len(inputs.text_pairs))

        def read(row: Tensors, _: str, encoded: EncodedText) -> ScoredText:
            score = float(row[LOGITS][0])
            if not math.isfinite(score):
                raise FloatingPointError("the model's score is not finite")
            return ScoredText(score=score, num_tokens=len(encoded), truncated=encoded.truncated)

        return await self._answer(inputs, (LOGITS,), read, deadline=deadline)

    async def relevance(
        self,
        query: str,
        texts: Sequence[str],
        *,
        query_prompt_name: str,
        prompt_name: str,
        truncate: bool,
        deadline: float | None,
    ) -> Relevance:
        """Scores each text as the second of a pair with the query; see `TextModel.relevance`."""
        for field, name in (("query_prompt_name", query_prompt_name), ("prompt_name", prompt_name)):
            if name:
                raise InvalidInputError(
                    field,
                    f"is set, and model {self.bundle.manifest.name} scores pairs without prompts; leave it out",
                )
        fields = check_texts("texts", texts, MAX_LABELS, self._max_text_bytes)
        check_text("query_text", query, self._max_text_bytes)
        scores, num_tokens, timings = np.empty(len(texts), np.float32), 0, NO_TIMINGS
        for start in range(0, len(texts), MAX_TEXTS):
            part = slice(start, start + MAX_TEXTS)
            some = TextInputs(
                texts=[query] * len(fields[part]), text_pairs=texts[part], fields=fields[part], truncate=truncate
            )
            answer = await self.score(some, deadline=deadline)
            scores[part] = [result.score for result in answer.results]
            num_tokens += sum(result.num_tokens for result in answer.results)
            timings += answer.timings
        return Relevance(scores=scores, num_tokens=num_tokens, timings=timings)
