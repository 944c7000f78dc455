"""Tokens of a running text in a file that is mapped into memory, so that a text may be larger than memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_training.data.examples import PlainText
from headway_training.durable import replacing

PART_CHARACTERS = 1 << 15
"""Characters that a tokenizer is given at once: it holds 256 such parts when it is trained, and a few to encode."""
_PARTS_AT_ONCE = 8


def map_tokens(text: PlainText, tokenizer: Tokenizer, file: Path) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Encodes a text into a file, if the file is not there yet, and maps it.

    Args:
        text: The text.
        tokenizer: Encodes it, without special tokens.
        file: Its tokens, little-endian: uint16 if the vocabulary has at most 65,536 tokens, else uint32.

    Returns:
        The tokens, (N,), read-only; the system pages them in and out.
    """
    dtype = np.dtype("<u2" if tokenizer.get_vocab_size() <= 1 << 16 else "<u4")
    if not file.is_file():
        with replacing(file) as staging, staging.open("wb") as out:
            coming = text.parts(PART_CHARACTERS)
            while parts := list(itertools.islice(coming, _PARTS_AT_ONCE)):
                for encoding in tokenizer.encode_batch_fast(parts, add_special_tokens=False):
                    out.write(np.asarray(encoding.ids, dtype).tobytes())
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")
