"""The vectors of labels that callers bring, kept so that a set that comes again costs nothing.

C labels, D width of an embedding.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError
from headway_server.serving.limits import check_texts, num_bytes

MAX_LABELS: Final = 4096
"""Most labels of a call."""
MAX_TEMPLATES: Final = 16
"""Most templates of a call."""
MAX_LABEL_TEXTS: Final = 16_384
"""Most labels times templates of a call."""
MAX_KEPT_BYTES: Final = 32 << 20
"""Of the vectors that a model keeps: eight sets of 4,096 labels in a space of 256 numbers."""
PLACE: Final = "{}"
"""Where a template takes a label."""

Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str], Sequence[str]], Awaitable[Vectors]]
"""Texts, and what the request calls each of them -> their vectors, (texts, D)."""


class LabelVectors:
    """Vectors of sets of labels, those used longest ago forgotten first.

    The vector of a label is the mean direction of its texts, one a template. Used on the event loop alone.
    """

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Vectors] = OrderedDict()
        self.num_bytes = 0
        """Of all vectors that are kept."""
        self.num_hits = 0
        self.num_misses = 0

    def __repr__(self) -> str:
        return f"LabelVectors({len(self._kept)} sets, {self.num_bytes} of {self._max_bytes} bytes)"

    async def of(
        self, labels: Sequence[str], templates: Sequence[str], *, max_text_bytes: int, embed: Embed
    ) -> Vectors:
        """Returns the vectors of a call's labels, (C, D) of length one, in their order.

        Args:
            labels: 1 to `MAX_LABELS`, none twice.
            templates: At most `MAX_TEMPLATES`, each with one `PLACE`; none: the labels as they are.
            max_text_bytes: Largest label and template.
            embed: Makes vectors of texts, which are at most `MAX_LABEL_TEXTS`.

        Raises:
            InvalidInputError: One of them is out of its range.
            RequestError: As `embed`.
        """
        _check(labels, templates, max_text_bytes)
        templates = templates or (PLACE,)
        key = await asyncio.to_thread(_digest, labels, templates) if len(labels) > 1000 else _digest(labels, templates)
        if (kept := self._kept.get(key)) is not None:
            self.num_hits += 1
            self._kept.move_to_end(key)
            return kept
        self.num_misses += 1
        texts = [template.replace(PLACE, label) for label in labels for template in templates]
        fields = [f"candidate_labels[{index}]" for index in range(len(labels)) for _ in templates]
        vectors = _mean_directions(await embed(texts, fields), len(templates))
        self._keep(key, vectors)
        return vectors

    def _keep(self, key: bytes, vectors: Vectors) -> None:
        if vectors.nbytes > self._max_bytes or key in self._kept:  # another call may have been as fast
            return
        self._kept[key] = vectors
        self.num_bytes += vectors.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.nbytes


def _check(labels: Sequence[str], templates: Sequence[str], max_text_bytes: int) -> None:
    """Checks labels and templates before any work is done for them.

    Raises:
        InvalidInputError: There are too few or too many, one is empty or too large, a label repeats, or a template has
            no place for a label or several.
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
        if (count := template.count(PLACE)) != 1:
            raise InvalidInputError(field, f"has {count} times {PLACE}; put it once where the label goes")
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


def _digest(labels: Sequence[str], templates: Sequence[str]) -> bytes:
    """A key for a set of labels: the SHA-256 of its texts, each behind its length."""
    parts = [str(len(labels)), *labels, *templates]
    return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).digest()


def _mean_directions(vectors: Vectors, num_templates: int) -> Vectors:
    """Vectors of length one, (C * templates, D) -> the mean direction of each label's, (C, D)."""
    means = vectors.reshape(-1, num_templates, vectors.shape[-1]).mean(axis=1)
    lengths = np.linalg.norm(means, axis=-1, keepdims=True)
    unit: Vectors = (means / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit
