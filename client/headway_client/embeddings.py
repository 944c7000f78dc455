"""Many inputs as one array of vectors, in as many calls as the server's limits ask for.

N inputs, D the width of an embedding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway_client.options import EmbedOptions
from headway_client.requests import Images, Texts, as_texts
from headway_client.results import Answer, ImageEmbedding, TextEmbedding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TEXTS = 256
"""Texts of a call."""
MAX_TEXT_BYTES = 4 * 2**20
"""UTF-8 of a call's texts and what they are paired with: what a server takes unless it is told otherwise."""
MAX_IMAGES = 64
"""Images of a call."""
MAX_IMAGE_BYTES = 32 * 2**20
"""Of a call's images: half of the message that a server takes unless it is told otherwise."""


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
    sizes = [len(text.encode()) for text in every]
    if second is not None:
        sizes = [size + len(pair.encode()) for size, pair in zip(sizes, second, strict=True)]
    for part in _parts(sizes, MAX_TEXTS, MAX_TEXT_BYTES):
        own: EmbedOptions = {**options} if second is None else {**options, "text_pairs": second[part]}
        yield every[part], own


def image_parts(images: Images) -> Iterator[Images]:
    """Cuts images into calls.

    Raises:
        OSError: An image file is not there.
    """
    if not isinstance(images, Sequence) or isinstance(images, bytes | str):
        yield images
        return
    for part in _parts([_size_of_image(image) for image in images], MAX_IMAGES, MAX_IMAGE_BYTES):
        yield images[part]


def _size_of_image(image: object) -> int:
    """Returns the bytes of an image; 0 of what is none, which is told when its call is made."""
    if isinstance(image, str | os.PathLike):
        return Path(image).stat().st_size
    return len(image) if isinstance(image, bytes) else 0


def _parts(sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[slice]:
    """Cuts inputs into calls of at most `most` inputs of `most_bytes` together; a larger input goes alone.

    Of no inputs there is one call, so that the server says what is wrong.
    """
    start, num_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == most or num_bytes + size > most_bytes):
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    yield slice(start, len(sizes))


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
