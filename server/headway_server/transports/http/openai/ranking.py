"""Reranking and scores of pairs, in the forms of Cohere, Jina, vLLM and Text Embeddings Inference."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from pydantic import Field

from headway_server.batching.settings import MAX_TEXTS
from headway_server.errors import InvalidInputError
from headway_server.observers import current_call
from headway_server.serving.host import ModelHost
from headway_server.serving.limits import check_count
from headway_server.tasks.ranking import rank
from headway_server.tasks.table import RANK_TEXTS
from headway_server.tasks.text.labels import MAX_LABELS
from headway_server.transports.http.body import Many, Part
from headway_server.transports.http.edge import Reply, Request, to_json
from headway_server.transports.http.openai.requests import ModelBody

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")


class Document(Part):
    """A document."""

    text: str


class RerankBody(ModelBody):
    """A request of `/v1/rerank`.

    `texts`, `return_text` and `raw_scores` are Text Embeddings Inference's, `top_k` and `truncation` are Voyage's.
    """

    model: str = ""
    query: str
    documents: Many[str | Document] | None = None
    texts: Many[str] | None = None
    top_n: Annotated[int | None, Field(ge=0)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    return_documents: bool | None = None
    """Default: True, and False in Voyage's form."""
    return_text: bool = False
    raw_scores: Literal[False] = False
    """Scores are those that the model is trained for; logits are not returned."""
    truncate: bool = False
    truncation: bool | None = None
    """Default: True, in Voyage's form."""

    @property
    def is_voyages(self) -> bool:
        """True if the request has a field of Voyage's, whose answer has other names."""
        return self.top_k is not None or self.truncation is not None

    @property
    def num_results(self) -> int:
        """Maximum results; 0: all.

        Raises:
            InvalidInputError: It is given twice.
        """
        if self.top_n is not None and self.top_k is not None:
            raise InvalidInputError("top_n", "is set together with top_k; set one")
        return self.top_n or self.top_k or 0

    def candidates(self) -> list[str]:
        """Returns the texts to rank.

        Raises:
            InvalidInputError: There are none, or both kinds.
        """
        if (self.documents is None) == (self.texts is None):
            raise InvalidInputError("documents", "must be given, or texts, and not both")
        given = self.texts if self.documents is None else self.documents
        return [one if isinstance(one, str) else one.text for one in given or ()]


class ScoreBody(ModelBody):
    """A request of `/v1/score`: one first text for all second texts, or as many as there are."""

    model: str = ""
    text_1: str | Many[str]
    text_2: str | Many[str]
    truncate: bool = False

    def queries(self) -> dict[str, list[int]]:
        """Returns the indices of the second texts by their first text.

        Raises:
            InvalidInputError: There are none or too many, or neither one first text nor one for each second text.
        """
        first, second = _texts(self.text_1), _texts(self.text_2)
        check_count("text_1", len(first), MAX_TEXTS)
        check_count("text_2", len(second), MAX_LABELS)
        if len(first) not in (1, len(second)):
            raise InvalidInputError(
                "text_1", f"has {len(first)} elements, and text_2 {len(second)}; give one, or as many"
            )
        queries: dict[str, list[int]] = {}
        for index in range(len(second)):
            queries.setdefault(first[index if len(first) > 1 else 0], []).append(index)
        return queries


def _texts(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


class RankingEndpoint:
    """Answers from a host's models that relate texts."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def rerank(self, request: Request) -> Reply:
        """Ranks documents by their relevance to a query, the most relevant first."""
        body = await request.parse(RerankBody.read)
        model = self._host.find_able(RANK_TEXTS, *body.name_and_version)
        texts, num_results = body.candidates(), body.num_results
        found = await model.relevance(
            body.query,
            texts,
            query_prompt_name="",
            prompt_name="",
            truncate=body.truncate or (body.is_voyages and body.truncation is not False),
            deadline=None,
        )
        ranked = rank(found.scores, min(num_results, len(texts)))
        if body.texts is not None:
            shown = [{"text": texts[one.index]} if body.return_text else {} for one in ranked]
            rows = [{"index": one.index, "score": one.score} | text for one, text in zip(ranked, shown, strict=True)]
            return Reply(body=to_json(rows))

        shows = not body.is_voyages if body.return_documents is None else body.return_documents
        results: list[dict[str, Any]] = [{"index": one.index, "relevance_score": one.score} for one in ranked]
        for result in results if shows else ():
            text = texts[result["index"]]
            result["document"] = text if body.is_voyages else {"text": text}
        named = {"object": "list", "data": results} if body.is_voyages else {"results": results}
        head = _head("rerank", model.bundle.manifest.name)
        return Reply(body=to_json(head | named | _usage(found.num_tokens)))

    async def score(self, request: Request) -> Reply:
        """Scores pairs of texts."""
        body = await request.parse(ScoreBody.read)
        model = self._host.find_able(RANK_TEXTS, *body.name_and_version)
        second, queries = _texts(body.text_2), body.queries()
        found = await asyncio.gather(
            *(
                model.relevance(
                    query,
                    [second[index] for index in indices],
                    query_prompt_name="",
                    prompt_name="",
                    truncate=body.truncate,
                    deadline=None,
                )
                for query, indices in queries.items()
            )
        )
        scores = [0.0] * len(second)
        for indices, one in zip(queries.values(), found, strict=True):
            for index, value in zip(indices, one.scores.tolist(), strict=True):
                scores[index] = value
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        head = _head("score", model.bundle.manifest.name)
        listed = {"object": "list", "created": int(time.time()), "data": data}
        return Reply(body=to_json(head | listed | _usage(sum(one.num_tokens for one in found))))

    def __repr__(self) -> str:
        return f"RankingEndpoint({self._host!r})"


def _head(prefix: str, model: str) -> dict[str, Any]:
    call = current_call()
    return {"id": f"{prefix}-{call.request_id if call is not None else ''}", "model": model}


def _usage(num_tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
