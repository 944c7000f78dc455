"""Ranking of images and texts by relevance to a query.

D width of the vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.settings import MAX_IMAGES
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.serving.answers import NO_TIMINGS, CallTimings
from headway_server.serving.images import SentImage
from headway_server.tasks.images.classifier import ImageClassifier

MAX_RANKED_IMAGES: Final = most_elements("RankImagesRequest.image_ids")
"""Maximum prepared images of a call; images sent with it are limited to `MAX_IMAGES`."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranked candidate."""

    index: int
    score: float
    """Relevance; for embedders the cosine of candidate and query."""


def rank(scores: NDArray[np.float32], top_k: int) -> list[Ranked]:
    """Returns candidates by falling score (candidates,); ties keep their order.

    Args:
        scores: Relevance of each.
        top_k: Number of candidates to return; 0: all.

    Raises:
        InvalidInputError: `top_k` is negative or exceeds the number of candidates.
    """
    if not 0 <= top_k <= len(scores):
        raise InvalidInputError(
            "top_k", f"is {top_k} of {len(scores)} candidates; give 1 to {len(scores)}, or 0 for all"
        )
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    return [Ranked(int(index), float(scores[index])) for index in order]


async def embed_images(
    model: ImageClassifier, images: Sequence[bytes] | Sequence[SentImage], *, deadline: float | None
) -> tuple[NDArray[np.float32], CallTimings]:
    """Returns the vectors of images, (images, D) of length one; errors are those of `ImageClassifier.embed`."""
    vectors, timings = [], NO_TIMINGS
    for start in range(0, len(images), MAX_IMAGES):
        answer = await model.embed(images[start : start + MAX_IMAGES], normalize=True, deadline=deadline)
        vectors += [result.values for result in answer.results]
        await asyncio.sleep(0)  # with cached vectors nothing else yields to the event loop
        timings += answer.timings
    return np.stack(vectors), timings
