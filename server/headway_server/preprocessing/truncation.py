"""Shortens texts that are past a model's limit, in time and memory that grow with the text and not with its square."""

from __future__ import annotations

import json
from typing import Literal

from tokenizers import Encoding


def truncated(encoding: Encoding, num_tokens: int, *, direction: Literal["left", "right"]) -> Encoding:
    """Returns the first `num_tokens` tokens of an encoding, or with `left` the last ones; `encoding` is spent.

    `Encoding.truncate` keeps what it cuts off as further encodings, each as long as the first, and where a pair is
    joined the library joins every one of the first text's with every one of the second's: gigabytes for two texts of a
    few kilobytes. It has no way to let go of them, so what is kept is copied.
    """
    if len(encoding) <= num_tokens:
        return encoding
    encoding.truncate(num_tokens, direction=direction)
    state = {
        "ids": encoding.ids,
        "type_ids": encoding.type_ids,
        "tokens": encoding.tokens,
        "words": encoding.word_ids,
        "offsets": encoding.offsets,
        "special_tokens_mask": encoding.special_tokens_mask,
        "attention_mask": encoding.attention_mask,
        "overflowing": [],
        "sequence_ranges": {},
    }
    kept = Encoding()
    kept.__setstate__(json.dumps(state).encode())  # what pickling does; there is no other constructor
    return kept


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens two texts of a pair keep: the longer one loses first, until they are as long.

    So does the tokenizers library, by which training cuts its pairs; where the room is odd, the longer text has the
    token that is over, and the second one if they are equal.
    """
    short, long = min(first, second), max(first, second)
    if short + long > room:
        long = max(short, room - short) if short <= room else short
        if short + long > room:
            short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)
