"""EmbeddingService."""

from __future__ import annotations

import time

from headway.v1 import embedding_service_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.images import images_of
from headway_server.services.messages import build, find_model, signed, text_inputs
from headway_server.serving.host import ModelHost
from headway_server.tasks.images.classifier import EmbeddedImage
from headway_server.tasks.table import EMBED_IMAGES, EMBED_TEXTS, EMBED_TEXTS_SPARSELY, EMBED_TOKENS
from headway_server.tasks.text.model import EmbeddedText
from headway_server.tasks.text.scorer import EmbeddedTokens


class EmbeddingService:
    """Servicer of embedding models of texts and images."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def EmbedText(self, request: pb.EmbedTextRequest, deadline: float | None) -> pb.EmbedTextResponse:
        """Embeds every text."""
        if request.multi_vector:
            return await self._embed_tokens(request, deadline)
        arrived = time.monotonic()
        model = find_model(self._host, EMBED_TEXTS_SPARSELY if request.sparse else EMBED_TEXTS, request)
        answer = await model.embed(
            text_inputs(request),
            normalize=request.normalize if request.HasField("normalize") else None,
            prompt_name=request.prompt_name,
            deadline=deadline,
        )
        if request.sparse:
            return await build(
                sum(len(result.values) for result in answer.results),
                lambda: pb.EmbedTextResponse(
                    results=[_sparse_embedding(result) for result in answer.results],
                    **signed(model, answer.timings, arrived),
                ),
            )
        return pb.EmbedTextResponse(
            results=[_text_embedding(result) for result in answer.results],
            **signed(model, answer.timings, arrived),
        )

    async def _embed_tokens(self, request: pb.EmbedTextRequest, deadline: float | None) -> pb.EmbedTextResponse:
        """Embeds the tokens of every text."""
        arrived = time.monotonic()
        if request.sparse:
            raise InvalidInputError("sparse", "is set together with multi_vector; give one of the two")
        if request.HasField("normalize") and not request.normalize:
            raise InvalidInputError("normalize", "is false, and vectors of tokens have length 1; leave it out")
        model = find_model(self._host, EMBED_TOKENS, request)
        answer = await model.embed_tokens(text_inputs(request), prompt_name=request.prompt_name, deadline=deadline)
        return await build(
            sum(result.vectors.size for result in answer.results),
            lambda: pb.EmbedTextResponse(
                results=map(_token_embeddings, answer.results), **signed(model, answer.timings, arrived)
            ),
        )

    async def EmbedImage(self, request: pb.EmbedImageRequest, deadline: float | None) -> pb.EmbedImageResponse:
        """Embeds every image."""
        arrived = time.monotonic()
        model = find_model(self._host, EMBED_IMAGES, request)
        answer = await model.embed(
            await images_of(self._host, request.images, request.image_ids),
            normalize=request.normalize if request.HasField("normalize") else True,
            deadline=deadline,
        )
        return pb.EmbedImageResponse(
            results=[_image_embedding(result) for result in answer.results],
            **signed(model, answer.timings, arrived),
        )


def _text_embedding(result: EmbeddedText) -> pb.TextEmbedding:
    return pb.TextEmbedding(values=result.values.tolist(), token_count=result.num_tokens, truncated=result.truncated)


def _sparse_embedding(result: EmbeddedText) -> pb.TextEmbedding:
    indices, values = result.sparse()
    return pb.TextEmbedding(
        indices=indices.tolist(), values=values.tolist(), token_count=result.num_tokens, truncated=result.truncated
    )


def _token_embeddings(result: EmbeddedTokens) -> pb.TextEmbedding:
    rows = zip(result.vectors, result.token_ids.tolist(), result.texts, strict=True)
    return pb.TextEmbedding(
        token_vectors=(pb.TokenVector(values=row.tolist(), token_id=token, text=text) for row, token, text in rows),
        token_count=result.num_tokens,
        truncated=result.truncated,
    )


def _image_embedding(result: EmbeddedImage) -> pb.ImageEmbedding:
    return pb.ImageEmbedding(values=result.values.tolist(), width=result.width, height=result.height)
