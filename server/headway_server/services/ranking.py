"""RankingService."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.v1 import ranking_service_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.images import image_of, images_of
from headway_server.services.messages import build, find_model, signed, text_inputs
from headway_server.serving.answers import CallTimings
from headway_server.serving.host import ModelHost
from headway_server.tasks.images.classifier import ImageClassifier
from headway_server.tasks.outputs import cosines
from headway_server.tasks.ranking import MAX_RANKED_IMAGES, Ranked, embed_images, rank
from headway_server.tasks.table import EMBED_IMAGES, RANK_IMAGES_BY_TEXT, RANK_TEXTS, RANK_TEXTS_BY_IMAGE, SCORE_TEXTS
from headway_server.tasks.text.model import TextModel

_TEXT: Final = "query_text"
Message = TypeVar("Message", pb.RankedImage, pb.RankedText)


class RankingService:
    """Servicer of ranking and scoring."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def RankImages(self, request: pb.RankImagesRequest, deadline: float | None) -> pb.RankImagesResponse:
        """Ranks images."""
        arrived = time.monotonic()
        texts: TextModel | None = None
        if _kind_of_query(request) == _TEXT:
            images, texts = self._host.find_able_pair(RANK_IMAGES_BY_TEXT, request.model, request.model_version)
        else:
            images = find_model(self._host, EMBED_IMAGES, request)
        candidates = await images_of(self._host, request.images, request.image_ids, MAX_RANKED_IMAGES)
        if texts is None:
            query, query_timings = await self._image_query(request, images, deadline)
        else:
            found, query_timings = await texts.embed_query(request.query_text, deadline=deadline)
            query = found.values
        vectors, timings = await embed_images(images, candidates, deadline=deadline)
        ranked = rank(cosines(query, vectors), request.top_k)
        return await build(
            len(ranked),
            lambda: pb.RankImagesResponse(
                results=_messages(pb.RankedImage, ranked),
                **signed(images, query_timings + timings, arrived),
            ),
        )

    async def RankTexts(self, request: pb.RankTextsRequest, deadline: float | None) -> pb.RankTextsResponse:
        """Ranks texts."""
        arrived = time.monotonic()
        texts = list(request.texts)
        if _kind_of_query(request) == _TEXT:
            model = find_model(self._host, RANK_TEXTS, request)
            scores, _, timings = await model.relevance(
                request.query_text,
                texts,
                query_prompt_name=request.query_prompt_name,
                prompt_name=request.prompt_name,
                truncate=request.truncate,
                deadline=deadline,
            )
        else:
            if request.query_prompt_name:
                raise InvalidInputError("query_prompt_name", "is set for an image query; leave it out")
            model, images = self._host.find_able_pair(RANK_TEXTS_BY_IMAGE, request.model, request.model_version)
            query, timings = await self._image_query(request, images, deadline)
            vectors = await model.embed_set(
                texts, prompt_name=request.prompt_name, truncate=request.truncate, deadline=deadline
            )
            scores = cosines(query, vectors.vectors)
        ranked = rank(scores, request.top_k)
        return await build(
            len(ranked),
            lambda: pb.RankTextsResponse(
                results=_messages(pb.RankedText, ranked),
                **signed(model, timings, arrived),
            ),
        )

    async def ScoreText(self, request: pb.ScoreTextRequest, deadline: float | None) -> pb.ScoreTextResponse:
        """Scores every text or pair."""
        arrived = time.monotonic()
        model = find_model(self._host, SCORE_TEXTS, request)
        answer = await model.score(text_inputs(request), deadline=deadline)
        return pb.ScoreTextResponse(
            results=[
                pb.TextScore(score=result.score, token_count=result.num_tokens, truncated=result.truncated)
                for result in answer.results
            ],
            **signed(model, answer.timings, arrived),
        )

    async def _image_query(
        self, request: pb.RankImagesRequest | pb.RankTextsRequest, model: ImageClassifier, deadline: float | None
    ) -> tuple[NDArray[np.float32], CallTimings]:
        """Returns the vector of an image query, (D,) of length one."""
        image = await image_of(self._host, request.query_image, request.query_image_id, "query_")
        vectors, timings = await embed_images(model, [image], deadline=deadline)
        return vectors[0], timings


def _kind_of_query(request: pb.RankImagesRequest | pb.RankTextsRequest) -> str:
    """Returns the field of the query.

    Raises:
        InvalidInputError: No query is set.
    """
    kind: str | None = request.WhichOneof("query")
    if kind is None:
        raise InvalidInputError(_TEXT, "is not set; give it, or query_image or query_image_id")
    return kind


def _messages(kind: Callable[..., Message], ranked: Iterable[Ranked]) -> list[Message]:
    return [kind(index=one.index, score=one.score) for one in ranked]
