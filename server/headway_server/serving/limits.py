"""Limits of the inputs of a call, checked before any other work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError
from headway_server.settings import TEXTS_OF_A_CALL

_LONG = {"\ufdfa": 18, "\ufdfb": 8}
"""Three-byte characters that normalization (NFKC or NFKD) expands to this many characters. Any other one becomes at
most seven for three bytes of UTF-8, so a text has at most five times as many characters as bytes."""
_FEW_CHARACTERS = 1000
"""Texts up to this size may grow without limit."""


def check_count(field: str, count: int, maximum: int, advice: str = "send them in several calls") -> None:
    """Checks the number of elements of a repeated field; `advice` ends the message for more than `maximum`.

    Raises:
        InvalidInputError: There are none, or more than `maximum`.
    """
    if count < 1:
        raise InvalidInputError(field, f"is empty; give 1 to {maximum}")
    if count > maximum:
        raise InvalidInputError(field, f"has {count} elements, the limit is {maximum}; {advice}")


def check_text(field: str, text: str, max_bytes: int) -> str:
    """Checks a text and returns its field for messages.

    The check comes before tokenization, which takes a thousand times as long.

    Raises:
        InvalidInputError: It is empty, has more than `max_bytes` in UTF-8, or expands extremely under normalization,
            unlike ordinary text.
    """
    if not text:
        raise InvalidInputError(field, "is empty; give at least one character")
    if (size := num_bytes(text)) > max_bytes:
        raise InvalidInputError(field, f"has {size} bytes, the limit is {max_bytes}; split or shorten it")
    if len(text) > _FEW_CHARACTERS and (growth := sum(n * text.count(long) for long, n in _LONG.items())) > 2 * size:
        raise InvalidInputError(
            field,
            f"has {size} bytes, and {growth} characters when its ligatures U+FDFA and U+FDFB are written out, as a "
            "tokenizer may do; write them out and send that",
        )
    return field


def check_texts(field: str, texts: Sequence[str], maximum: int, max_bytes: int) -> list[str]:
    """Checks the texts of a call and returns their fields for messages, such as `texts[3]`.

    Raises:
        InvalidInputError: There are none, or more than `maximum`; one is empty or has more than `max_bytes` in UTF-8;
            or together they have more than 16 times `max_bytes`.
    """
    check_count(field, len(texts), maximum)
    names = [check_text(f"{field}[{index}]", text, max_bytes) for index, text in enumerate(texts)]
    check_size_of_call(field, texts, max_bytes)
    return names


def check_size_of_call(field: str, texts: Iterable[str], max_bytes: int) -> None:
    """Checks the size of all texts of a call, each of at most `max_bytes`.

    Raises:
        InvalidInputError: Together they have more than 16 times `max_bytes`.
    """
    limit = TEXTS_OF_A_CALL * max_bytes
    if (size := sum(map(num_bytes, texts))) > limit:
        raise InvalidInputError(
            field, f"has {size} bytes in all, the limit of a call is {limit}; send them in several calls"
        )


def check_token_ids(field: str, ids: NDArray[np.int64], largest: int) -> None:
    """Checks token ids (T,), with T at least 1: an id outside the vocabulary would fail the whole batch.

    Raises:
        InvalidInputError: One is not in 0 to `largest`.
    """
    outside = (ids < 0) | (ids > largest)
    if outside.any():
        index = int(outside.argmax())
        raise InvalidInputError(f"{field}[{index}]", f"is {ids[index]}; must be from 0 to {largest}")


def num_bytes(text: str) -> int:
    """Returns the size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def check_one_each(field: str, count: int, num_texts: int) -> None:
    """Checks that there is one element a text, or none.

    Raises:
        InvalidInputError: The number differs.
    """
    if count not in (0, num_texts):
        raise InvalidInputError(
            field, f"has {count} elements for {num_texts} texts; give one for every text, or none at all"
        )


def check_probability(field: str, value: float) -> None:
    """Checks a probability.

    Raises:
        InvalidInputError: It is not in 0 to 1.
    """
    if not 0 <= value <= 1:  # a NaN is not either
        raise InvalidInputError(field, f"is {value}; give a probability of 0 to 1")


def check_top_k(top_k: int, num_labels: int) -> int:
    """Returns the number of labels to return; 0: all.

    Raises:
        InvalidInputError: It is below 0 or more than the model has.
    """
    if not 0 <= top_k <= num_labels:
        raise InvalidInputError(
            "top_k", f"is {top_k}, the model has {num_labels} labels; give 1 to {num_labels}, or 0 for all"
        )
    return top_k or num_labels
