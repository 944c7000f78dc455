"""Images and texts in the order of their relevance to a query.

D is the width of the vectors.
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
"""Prepared images of a call; of those that come with it there are `MAX_IMAGES` at most."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate in its place."""

    index: int
    score: float
    """Its relevance; of embedders, the cosine of its vector and the query's."""


def rank(scores: NDArray[np.float32], top_k: int) -> list[Ranked]:
    """Returns the candidates with these scores (candidates,), the best first, of equal ones the earlier.

    Args:
        scores: Relevance of each.
        top_k: How many to return; 0: all.

    Raises:
        InvalidInputError: `top_k` is below 0 or more than there are.
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
        await asyncio.sleep(0)  # of kept vectors alone nothing waits, and others want their turn
        timings += answer.timings
    return np.stack(vectors), timings
