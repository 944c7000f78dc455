"""Cache of the vectors of callers' labels and other sets of texts.

C labels, D width of an embedding.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.observers import CacheUsage, note_truncated
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.limits import check_texts, num_bytes
from headway_server.serving.lru_cache import LruCache

MAX_LABELS: Final = most_elements("RankTextsRequest.texts")
"""Maximum labels of a call."""
MAX_TEMPLATES: Final = most_elements("ClassifyImageRequest.templates")
"""Maximum templates of a call."""
MAX_LABEL_TEXTS: Final = 16_384
"""Maximum labels times templates of a call."""
MAX_CACHE_BYTES: Final = 32 << 20
"""Size of a model's cache: eight sets of 4,096 labels in a space of 256 dimensions."""
PLACEHOLDER: Final = "{}"
"""Placeholder of the label in a template."""

Vectors = NDArray[np.float32]


class SetVectors(NamedTuple):
    """Vectors of a set of texts."""

    vectors: Vectors
    """(texts, D)"""
    num_truncated: int
    """Texts that were shortened."""
    num_tokens: int
    """Tokens of all texts."""


Embed = Callable[[Sequence[str], Sequence[str]], Awaitable[SetVectors]]
"""Embeds texts, given with the name of each in the request."""


class LabelVectors:
    """LRU cache of the vectors of sets of labels and of texts.

    The vector of a label is the mean direction of its texts, one for each template. For the event loop alone.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._cache: LruCache[bytes, SetVectors] = LruCache("label_vectors", max_bytes=max_bytes)

    def usage(self) -> CacheUsage:
        """Returns the cache's usage; called from any thread."""
        return self._cache.usage()

    def __repr__(self) -> str:
        return f"LabelVectors({self._cache!r})"

    async def of(
        self, labels: Sequence[str], templates: Sequence[str], *, max_text_bytes: int, embed: Embed
    ) -> Vectors:
        """Returns the vectors of a call's labels, (C, D) of length one, in order.

        Args:
            labels: 1 to `MAX_LABELS`, none twice.
            templates: At most `MAX_TEMPLATES`, each with one `PLACEHOLDER`; none: the labels as they are.
            max_text_bytes: Maximum bytes of a label and of a template.
            embed: Embeds texts, at most `MAX_LABEL_TEXTS`.

        Raises:
            InvalidInputError: A label or template is out of its range.
            RequestError: As `embed`.
        """
        _check(labels, templates, max_text_bytes)
        templates = templates or (PLACEHOLDER,)

        async def make() -> SetVectors:
            texts = [template.replace(PLACEHOLDER, label) for label in labels for template in templates]
            fields = [f"candidate_labels[{index}]" for index in range(len(labels)) for _ in templates]
            found = await embed(texts, fields)
            return found._replace(vectors=_mean_directions(found.vectors, len(templates)))

        return (await self._of(("labels", str(len(labels)), *labels, *templates), make)).vectors

    async def of_texts(
        self, texts: Sequence[str], reading: Sequence[str], *, max_text_bytes: int, embed: Embed, field: str = "texts"
    ) -> SetVectors:
        """Returns the vectors of candidate texts, of length one; errors are those of `of`.

        Args:
            texts: 1 to `MAX_LABELS`.
            reading: Other inputs of the vectors, such as the name of a prompt.
            max_text_bytes: Maximum bytes of a text.
            embed: Embeds texts.
            field: Name of the texts in the request.
        """
        fields = check_texts(field, texts, MAX_LABELS, max_text_bytes)
        return await self._of(("texts", *reading, *texts), lambda: embed(texts, fields))

    async def _of(self, parts: Sequence[str], make: Callable[[], Awaitable[SetVectors]]) -> SetVectors:
        """Returns the cached vectors of some parts, or computes and caches them; each call counts shortened texts."""
        is_long = len(parts) > 1000
        loop = asyncio.get_running_loop()
        key = await loop.run_in_executor(text_pool(), _digest, parts) if is_long else _digest(parts)
        if (cached := self._cache.get(key)) is not None:
            note_truncated(cached.num_truncated)
            return cached
        made = await make()
        self._cache.put(key, made, made.vectors.nbytes)
        return made


def _check(labels: Sequence[str], templates: Sequence[str], max_text_bytes: int) -> None:
    """Checks labels and templates before any work is done for them.

    Raises:
        InvalidInputError: There are too few or too many, one is empty or too large, a label repeats, or a template does
            not have exactly one `{}`.
    """
    fields = check_texts("candidate_labels", labels, MAX_LABELS, max_text_bytes)
    first: dict[str, str] = {}
    for field, label in zip(fields, labels, strict=True):
        if (earlier := first.setdefault(label, field)) is not field:
            raise InvalidInputError(field, f"repeats {earlier}; give each label once")
    if not templates:
        return
    for field, template in zip(
        check_texts("templates", templates, MAX_TEMPLATES, max_text_bytes), templates, strict=True
    ):
        if (count := template.count(PLACEHOLDER)) != 1:
            raise InvalidInputError(field, f"has {count} times {PLACEHOLDER}; put it once where the label goes")
    if (count := len(labels) * len(templates)) > MAX_LABEL_TEXTS:
        raise InvalidInputError(
            "templates",
            f"makes {count} texts of {len(labels)} labels, the limit is {MAX_LABEL_TEXTS}; give fewer of either",
        )
    longest = max(map(num_bytes, labels)) + max(map(num_bytes, templates))
    if longest > max_text_bytes:
        raise InvalidInputError(
            "templates", f"makes a text of about {longest} bytes, the limit is {max_text_bytes}; shorten it"
        )


def _digest(parts: Sequence[str]) -> bytes:
    """Returns the cache key of texts: the SHA-256 of all, each preceded by its length."""
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).digest()


def _mean_directions(vectors: Vectors, num_templates: int) -> Vectors:
    """Averages vectors of length one over templates: (C * templates, D) -> mean directions (C, D)."""
    means = vectors.reshape(-1, num_templates, vectors.shape[-1]).mean(axis=1)
    lengths = np.linalg.norm(means, axis=-1, keepdims=True)
    unit: Vectors = (means / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
