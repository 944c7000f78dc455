"""Labels of the caller for a model of images: texts that a graph of the model embeds.

C labels, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Tensors
from headway_server.bundles import Manifest
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText
from headway_server.tasks.outputs import EMBEDDING
from headway_server.tasks.text.labels import SetVectors
from headway_server.tasks.text.model import TextInputs, TextModel

_LABELS: Final = "labels"


class LabelEncoder(TextModel):
    """Graph that embeds labels."""

    _role = "text_encoder"

    @classmethod
    def _expected(cls, manifest: Manifest, length: int) -> Mapping[str, tuple[int, ...]]:  # noqa: ARG003
        """Returns the shape of an embedding."""
        return {EMBEDDING: (width_of(manifest),)}

    async def encode(self, labels: Sequence[str], *, deadline: float | None) -> NDArray[np.float32]:
        """Returns the embeddings of labels, (C, D); those of repeated sets are cached.

        Args:
            labels: At least one text.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: A label is empty, too long or repeated, the queue is full, the deadline passed, the server is
                draining.
        """

        async def embed(texts: Sequence[str], fields: Sequence[str]) -> SetVectors:
            def read(row: Tensors, _: int, encoded: EncodedText) -> tuple[NDArray[np.float32], int]:
                return row[EMBEDDING].copy(), len(encoded)

            answer = await self._answer(TextInputs(texts=texts, fields=fields), (EMBEDDING,), read, deadline=deadline)
            vectors, counts = zip(*answer.results, strict=True)
            return SetVectors(np.stack(vectors), num_truncated=0, num_tokens=sum(counts))

        limit = self._max_text_bytes
        return (await self.label_vectors.of_texts(labels, (), max_text_bytes=limit, embed=embed, field=_LABELS)).vectors


def check_given(labels: Sequence[str], most: int, *, owner: str) -> None:
    """Checks that there are labels, and each once.

    Raises:
        InvalidInputError: There are not.
    """
    if not labels:
        raise InvalidInputError(
            _LABELS,
            f"is empty, and {owner} has no labels of its own; give 1 to {most} texts of what to look for, such as "
            "'a red car'",
        )
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise InvalidInputError(
                f"{_LABELS}[{index}]", f"repeats {_LABELS}[{labels.index(label)}]; give each label once"
            )


def width_of(manifest: Manifest) -> int:
    """Returns the width of a label's embedding, D."""
    [width] = next(iter(manifest.variants.values())).graphs["text_encoder"].outputs[0].shape[1:]
    assert isinstance(width, int), "the manifest's validator demands it"
    return width
