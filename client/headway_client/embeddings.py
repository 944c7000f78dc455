"""Many inputs as one array of vectors, in as many calls as the server's limits ask for.

N inputs, D the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headway_client.options import EmbedOptions
from headway_client.requests import Images, Texts, as_texts
from headway_client.results import Answer, ImageEmbedding, TextEmbedding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TEXTS = 256
"""Texts of a call."""
MAX_IMAGES = 64
"""Images of a call."""


def embedding_parts(texts: Texts, options: EmbedOptions) -> Iterator[tuple[list[str], EmbedOptions]]:
    """Cuts texts, and what they are paired with, into calls; yields each with its options.

    Raises:
        TypeError: A text is no str.
        ValueError: There are not as many second texts as texts.
    """
    every = as_texts("texts", texts)
    pairs = options.get("text_pairs")
    second = None if pairs is None else as_texts("text_pairs", pairs)
    if second is not None and len(second) != len(every):
        raise ValueError(f"text_pairs has {len(second)} elements and texts has {len(every)}; give one for every text")
    for start in range(0, max(1, len(every)), MAX_TEXTS):
        part = slice(start, start + MAX_TEXTS)
        own: EmbedOptions = {**options} if second is None else {**options, "text_pairs": second[part]}
        yield every[part], own


def image_parts(images: Images) -> Iterator[Images]:
    """Cuts images into calls."""
    if not isinstance(images, Sequence) or isinstance(images, bytes | str):
        yield images
        return
    for start in range(0, max(1, len(images)), MAX_IMAGES):
        yield images[start : start + MAX_IMAGES]


def stack_embeddings(
    answers: Sequence[Answer[TextEmbedding]] | Sequence[Answer[ImageEmbedding]],
) -> NDArray[np.float32]:
    """Makes one array, float32 (N, D), of the answers of several calls.

    Raises:
        ImportError: NumPy is not installed.
    """
    try:
        import numpy as np  # noqa: PLC0415 (an extra: those who want no arrays need it not)
    except ImportError:
        raise ImportError(
            "NumPy is not installed; run: pip install 'headway-client[numpy]', or take `embed`, which needs none"
        ) from None
    return np.array([result.values for answer in answers for result in answer], np.float32)
