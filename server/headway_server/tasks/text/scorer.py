"""Scoring of texts, or of pairs of texts: one number each, such as the relevance of a document to a query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from headway_server.batching import Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.errors import InvalidInputError
from headway_server.observers import note_truncated
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

    async def _encode(self, inputs: TextInputs, fields: Sequence[str], *, with_offsets: bool) -> list[EncodedText]:
        """Tokenizes pairs by the template of the manifest, if it has one; of too long ones the second text is cut."""
        scoring = self.bundle.manifest.scoring
        if scoring is None or scoring.template is None or not inputs.text_pairs:
            return await super()._encode(inputs, fields, with_offsets=with_offsets)
        pairs, limit = list(inputs.text_pairs), self.max_input_tokens
        joined = [scoring.joined(query, text) for query, text in zip(inputs.texts, pairs, strict=True)]
        cuts = inputs.truncate or self._tokenizer.truncates
        encoded: list[EncodedText] = []
        async with aclosing(self._tokenizer.encode_each(joined, add_special_tokens=False)) as each:
            async for whole in each:
                index = len(encoded)
                query, text, found = inputs.texts[index], pairs[index], whole
                excess = len(found) - limit
                while excess > 0 and cuts and text:
                    [second] = await self._tokenized([text], with_offsets=True)
                    kept = max(len(second) - excess, 0)
                    text = text[: int(second.offsets[kept][0])] if kept < len(second) and kept else ""
                    [found] = await self._tokenized([scoring.joined(query, text)])
                    excess = len(found) - limit
                if excess > 0:
                    raise InvalidInputError(
                        fields[index],
                        f"has {len(whole)} tokens with the text that it is joined with, and the limit is {limit}; "
                        + (
                            f"{len(found)} are left without the second text: shorten the first"
                            if cuts
                            else "shorten it, or set truncate, which cuts the second text"
                        ),
                    )
                if found is not whole:
                    note_truncated()
                    found = replace(found, truncated=True)
                encoded.append(found)
        return encoded

    async def _tokenized(self, texts: Sequence[str], *, with_offsets: bool = False) -> list[EncodedText]:
        """Tokenizes texts of any number of tokens, without special ones around them."""
        each = self._tokenizer.encode_each(texts, add_special_tokens=False, with_offsets=with_offsets)
        async with aclosing(each):
            return [text async for text in each]

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
