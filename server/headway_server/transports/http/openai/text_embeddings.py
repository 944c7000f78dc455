"""Embeddings and labels of texts in the forms of Text Embeddings Inference; `ranking.py` has its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from headway_server.batching.settings import MAX_TEXTS
from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.abilities import Ability
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.serving.limits import check_count
from headway_server.tasks.table import CLASSIFY_TEXTS, EMBED_TEXTS, EMBED_TEXTS_SPARSELY, EMBED_TOKENS
from headway_server.tasks.text.model import EmbeddedText, TextInputs, TextModel
from headway_server.transports.http.body import Many
from headway_server.transports.http.edge import Reply, Request, to_json
from headway_server.transports.http.openai.requests import MAX_INPUTS, ModelBody

EMBED_PATH = "/embed"
EMBED_SPARSE_PATH = "/embed_sparse"
EMBED_ALL_PATH = "/embed_all"
PREDICT_PATH = "/predict"


class TextsBody(ModelBody):
    """A request; `model` is this server's own."""

    model: str = ""
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] = "right"
    parameters: Annotated[dict[str, Any], Field(max_length=0)] = Field(default_factory=dict)
    """Always empty; the client of Hugging Face's hub sends it."""


class EmbedSparseBody(TextsBody):
    """A request of `/embed_sparse` or `/embed_all`."""

    inputs: str | Many[str]
    prompt_name: str = ""


class EmbedBody(EmbedSparseBody):
    """A request of `/embed`."""

    normalize: bool = True


class PredictBody(TextsBody):
    """A request of `/predict`: a text, a pair of texts, or a batch of lists with one text or two."""

    inputs: str | Many[str] | Many[Many[str]]
    raw_scores: Literal[False] = False
    """Scores are probabilities; logits are not returned."""

    def rows(self) -> list[list[str]]:
        """Returns the texts of each input: one, or a pair.

        Raises:
            InvalidInputError: There are none, or an input has another number of texts than the first.
        """
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        pair = [one for one in self.inputs if isinstance(one, str)]
        rows = [one for one in self.inputs if isinstance(one, list)] or ([pair] if pair else [])
        check_count("inputs", len(rows), MAX_INPUTS)
        for index, row in enumerate(rows):
            if len(row) not in (1, 2) or len(row) != len(rows[0]):
                raise InvalidInputError(
                    f"inputs[{index}]", f"has {len(row)} texts; give one, or a pair, and as many in each of a call"
                )
        return rows


class TextEmbeddingsEndpoint:
    """Answers from a host's models that embed or classify texts."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def embed(self, request: Request) -> Reply:
        """Embeds texts."""
        body = await request.parse(EmbedBody.read)
        answer = await self._embed(body, EMBED_TEXTS, normalize=body.normalize)
        write = asyncio.get_running_loop().run_in_executor
        return Reply(body=await write(text_pool(), lambda: to_json([one.values.tolist() for one in answer.results])))

    async def embed_sparse(self, request: Request) -> Reply:
        """Embeds texts as sparse vectors."""
        body = await request.parse(EmbedSparseBody.read)
        answer = await self._embed(body, EMBED_TEXTS_SPARSELY, normalize=None)
        write = asyncio.get_running_loop().run_in_executor
        return Reply(body=await write(text_pool(), lambda: to_json([_sparse(one) for one in answer.results])))

    async def embed_all(self, request: Request) -> Reply:
        """Embeds the tokens of texts."""
        body = await request.parse(EmbedSparseBody.read)
        model = self._host.find_able(EMBED_TOKENS, *body.name_and_version)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        check_count("inputs", len(texts), MAX_TEXTS)
        answer = await model.embed_tokens(_inputs(texts, body), prompt_name=body.prompt_name, deadline=None)
        write = asyncio.get_running_loop().run_in_executor
        return Reply(body=await write(text_pool(), lambda: to_json([one.vectors.tolist() for one in answer.results])))

    async def _embed(
        self, body: EmbedSparseBody, ability: Ability[TextModel], *, normalize: bool | None
    ) -> Answer[EmbeddedText]:
        model = self._host.find_able(ability, *body.name_and_version)
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        check_count("inputs", len(texts), MAX_INPUTS)
        return await model.embed_many(
            _inputs(texts, body), normalize=normalize, prompt_name=body.prompt_name, deadline=None
        )

    async def predict(self, request: Request) -> Reply:
        """Classifies texts."""
        body = await request.parse(PredictBody.read)
        model = self._host.find_able(CLASSIFY_TEXTS, *body.name_and_version)
        rows = body.rows()
        pairs = [row[1] for row in rows] if len(rows[0]) == 2 else None
        answer = await model.classify(_inputs([row[0] for row in rows], body, pairs), top_k=0, deadline=None)
        found = [[{"score": label.probability, "label": label.label} for label in one.labels] for one in answer.results]
        is_batch = not isinstance(body.inputs[0], str)
        return Reply(body=to_json(found if is_batch else found[0]))

    def __repr__(self) -> str:
        return f"TextEmbeddingsEndpoint({self._host!r})"


def _sparse(embedded: EmbeddedText) -> list[dict[str, Any]]:
    pairs = zip(*(column.tolist() for column in embedded.sparse()), strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def _inputs(texts: Sequence[str], body: TextsBody, pairs: Sequence[str] | None = None) -> TextInputs:
    fields = [f"inputs[{index}]" for index in range(len(texts))]
    return TextInputs(texts=texts, text_pairs=pairs, fields=fields, truncate=body.truncate)
