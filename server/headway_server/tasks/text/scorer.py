"""Scoring of texts, or of pairs of texts: one number each, such as the relevance of a document to a query."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import LateInteraction, demanded
from headway_server.errors import InvalidInputError
from headway_server.observers import note_truncated
from headway_server.preprocessing import EncodedText
from headway_server.preprocessing.pool import text_pool
from headway_server.runtime import format_size
from headway_server.serving.answers import NO_TIMINGS, Answer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_text, check_texts
from headway_server.tasks.outputs import LOGITS, VECTORS
from headway_server.tasks.stateless import late_interaction
from headway_server.tasks.text.labels import MAX_LABELS
from headway_server.tasks.text.model import BYTES_OF_OFFSETS, Relevance, TextInputs, TextModel, TokenInputs

_COPIES: Final = 2
"""Of vectors that are asked for: as arrays and in the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """Score of one text, or of one pair."""

    score: float
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart(TextInputs):
    """One side of pairs whose texts are read apart."""

    are_queries: bool
    most_vectors: int | None = None
    """Tokens that are read at most of all texts; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTokens:
    """Vectors of a text's tokens that a score is made of."""

    vectors: NDArray[np.float32]
    """(T, D), of length one."""
    token_ids: NDArray[np.int64]
    """(T,)"""
    texts: tuple[str, ...] = ()
    """Each token by itself; empty unless asked for."""
    num_tokens: int
    """Tokens of the text; some may be skipped, and what fills up a query is not counted."""
    truncated: bool


QUERY: Final = "query"
DOCUMENT: Final = "document"
"""Forms of a text that is read apart."""
MOST_VECTOR_BYTES: Final = 32 << 20
"""Of the vectors of a call that asks for them."""


class TextScorer(TextModel):
    """Scores texts by the graph's single logit, after a sigmoid if the manifest has one.

    Where the manifest has `late_interaction`, the graph reads the texts of a pair apart, and the score is made of
    the vectors of their tokens.
    """

    async def score(
        self, inputs: TextInputs | TokenInputs, *, deadline: float | None, query_field: str = ""
    ) -> Answer[ScoredText]:
        """Scores texts.

        Args:
            inputs: Texts. A single text with several second texts makes a pair with each.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            query_field: Name of a first text that all pairs have, for error messages; empty: each has its own.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        if (late := late_interaction(self.bundle.manifest)) is not None:
            return await self._score_apart(inputs, late, deadline=deadline, query_field=query_field)
        if isinstance(inputs, TextInputs) and inputs.text_pairs and len(inputs.texts) == 1:
            inputs = replace(inputs, texts=[inputs.texts[0]] * len(inputs.text_pairs))

        def read(row: Tensors, _: int, encoded: EncodedText) -> ScoredText:
            score = float(row[LOGITS][0])
            if not math.isfinite(score):
                raise FloatingPointError("the model's score is not finite")
            return ScoredText(score=score, num_tokens=len(encoded), truncated=encoded.truncated)

        return await self._answer(inputs, (LOGITS,), read, deadline=deadline)

    async def _score_apart(
        self, inputs: TextInputs | TokenInputs, late: LateInteraction, *, deadline: float | None, query_field: str
    ) -> Answer[ScoredText]:
        """Scores pairs by the vectors of their tokens; each different first text is read once."""
        if isinstance(inputs, TokenInputs):
            name = self.bundle.manifest.name
            raise InvalidInputError(
                "input_ids", f"is set, and model {name} reads the texts of a pair apart; give texts"
            )
        if inputs.text_pairs and len(inputs.texts) == 1:
            inputs = replace(inputs, texts=[inputs.texts[0]] * len(inputs.text_pairs))
        fields, pairs = self._check(inputs), list(inputs.text_pairs or ())
        firsts = dict(zip(reversed(inputs.texts), reversed(fields), strict=True))  # the first field of each query
        queries = list(dict.fromkeys(inputs.texts))
        asked_fields = [query_field or firsts[query] for query in queries]
        most = TextInputs(texts=pairs).most_tokens(self.max_input_tokens)
        num_vectors = len(queries) * late.max_query_tokens + most
        with self._memory.admit(1, 4 * late.dimension * num_vectors, caller=current_caller()):
            each, seconds = inputs.truncate, [field.replace("texts", "text_pairs") for field in fields]
            asked = await self._read_apart(
                _Apart(texts=queries, fields=asked_fields, truncate=each, are_queries=True), late, deadline
            )
            found = await self._read_apart(
                _Apart(texts=pairs, fields=fields if query_field else seconds, truncate=each, are_queries=False),
                late,
                deadline,
            )
            of_query = dict(zip(queries, asked.results, strict=True))
            sides = [(of_query[query], text) for query, text in zip(inputs.texts, found.results, strict=True)]
            results = await asyncio.get_running_loop().run_in_executor(text_pool(), _compared, sides)
        return Answer(results=results, timings=asked.timings + found.timings)

    async def embed_tokens(
        self, inputs: TextInputs, *, prompt_name: str, deadline: float | None
    ) -> Answer[EmbeddedTokens]:
        """Embeds the tokens of texts; for bundles with `late_interaction`.

        Args:
            inputs: Single texts.
            prompt_name: `QUERY` or `DOCUMENT`, the form of the texts; empty: `DOCUMENT`.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, are pairs, or have more vectors than `MOST_VECTOR_BYTES`; there is
                no such form; the queue is full, the deadline passed, the server is draining.
        """
        late = late_interaction(self.bundle.manifest)
        assert late is not None, "the ability requires it"
        if prompt_name not in ("", QUERY, DOCUMENT):
            name = self.bundle.manifest.name
            raise InvalidInputError("prompt_name", f"is {prompt_name!r}; model {name} reads a {QUERY} or a {DOCUMENT}")
        if inputs.text_pairs:
            raise InvalidInputError("text_pairs", "is set, and vectors of tokens are of single texts; leave it out")
        fields = check_texts("texts", inputs.texts, MAX_TEXTS, self._max_text_bytes)
        apart = _Apart(
            texts=inputs.texts,
            fields=inputs.fields or fields,
            truncate=inputs.truncate,
            are_queries=prompt_name == QUERY,
            most_vectors=MOST_VECTOR_BYTES // (4 * late.dimension),
        )
        most = len(fields) * late.max_query_tokens if apart.are_queries else inputs.most_tokens(self.max_input_tokens)
        most = min(most, demanded(apart.most_vectors))
        num_bytes = most * (_COPIES * 4 * late.dimension + BYTES_OF_OFFSETS)
        with self._memory.admit(1, num_bytes, caller=current_caller()):
            return await self._read_apart(apart, late, deadline, with_texts=True)

    async def _read_apart(
        self, inputs: _Apart, late: LateInteraction, deadline: float | None, *, with_texts: bool = False
    ) -> Answer[EmbeddedTokens]:
        """Returns the vectors that count of each query or text."""
        skipped = () if inputs.are_queries else late.skipped_tokens

        def read(row: Tensors, _: int, encoded: EncodedText) -> EmbeddedTokens:
            counts = ~np.isin(encoded.input_ids, skipped)
            vectors, token_ids = row[VECTORS][counts], encoded.input_ids[counts]
            if not np.isfinite(vectors).all():
                raise FloatingPointError("the model's vectors are not finite")
            return EmbeddedTokens(
                vectors=vectors,
                token_ids=token_ids,
                texts=tuple(map(self._tokenizer.token_text, token_ids.tolist())) if with_texts else (),
                num_tokens=len(encoded) if encoded.num_seen is None else encoded.num_seen,
                truncated=encoded.truncated,
            )

        return await self._answer(inputs, (VECTORS,), read, deadline=deadline)

    def _check(self, inputs: TextInputs) -> list[str]:
        """Validates the texts of a call, as `TextModel` does; those that are read apart have been validated."""
        return list(inputs.fields) if isinstance(inputs, _Apart) else super()._check(inputs)

    async def _encode_apart(self, inputs: _Apart, fields: Sequence[str], late: LateInteraction) -> list[EncodedText]:
        """Tokenizes queries or texts, with the markers of their kind; queries are filled up."""
        marker = late.query_marker if inputs.are_queries else late.text_marker
        limit = late.max_query_tokens if inputs.are_queries else self.max_input_tokens
        encoded = await self._tokenizer.encode_limited(
            inputs.texts,
            fields=fields,
            max_tokens=limit - (marker is not None),
            truncate=inputs.truncate or self._tokenizer.truncates,
        )
        filler = late.query_filler if inputs.are_queries else None
        marked = [_marked(text, marker, filler, limit, sees_filler=late.attends_to_filler) for text in encoded]
        if inputs.most_vectors is not None and (count := sum(map(len, marked))) > inputs.most_vectors:
            raise InvalidInputError(
                "texts",
                f"have {count} tokens, whose vectors of {late.dimension} numbers take "
                f"{format_size(4 * late.dimension * count)}, and a call's take up to {format_size(MOST_VECTOR_BYTES)}; "
                "send fewer texts",
            )
        return marked

    async def _encode(self, inputs: TextInputs, fields: Sequence[str], *, with_offsets: bool) -> list[EncodedText]:
        """Tokenizes pairs by the template of the manifest, if it has one; of too long ones the second text is cut."""
        scoring = self.bundle.manifest.scoring
        if isinstance(inputs, _Apart) and scoring is not None and scoring.late_interaction is not None:
            return await self._encode_apart(inputs, fields, scoring.late_interaction)
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
            answer = await self.score(some, deadline=deadline, query_field="query_text")
            scores[part] = [result.score for result in answer.results]
            num_tokens += sum(result.num_tokens for result in answer.results)
            timings += answer.timings
        return Relevance(scores=scores, num_tokens=num_tokens, timings=timings)


def _marked(
    text: EncodedText, marker: int | None, filler: int | None, length: int, *, sees_filler: bool
) -> EncodedText:
    """Returns a text with a marker behind its first token, filled up to a length if there is a filler."""
    ids = text.input_ids if marker is None else np.insert(text.input_ids, 1, marker)
    if filler is None:
        return replace(text, input_ids=ids)
    filled = np.concatenate([ids, np.full(length - len(ids), filler, np.int64)])
    return replace(text, input_ids=filled, num_seen=None if sees_filler else len(ids))


def _compared(sides: Sequence[tuple[EmbeddedTokens, EmbeddedTokens]]) -> list[ScoredText]:
    """Scores pairs of a query and a text: for each vector of the query the largest product, summed."""
    return [
        ScoredText(
            score=float((query.vectors @ text.vectors.T).max(axis=1).sum()),
            num_tokens=query.num_tokens + text.num_tokens,
            truncated=query.truncated or text.truncated,
        )
        for query, text in sides
    ]
