"""The bytes that every token of a tokenizer adds to a text.

V is the number of the model's logits, which may be larger than the tokenizer's vocabulary.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_SPACE = "\u2581"
"""What sentencepiece writes for a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class UnsupportedTokenizerError(ValueError):
    """What a token adds to a text depends on more than the token."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What tokens add to a text that goes on."""

    tokens: tuple[bytes, ...]
    """(V,) bytes of each token; empty where a token is no part of a text."""
    drops_first_space: bool
    """Whether the very first token of a text loses its space, so that it must not begin with one there."""

    def text_mask(self) -> NDArray[np.int32]:
        """Returns the tokens that are part of a text, (ceil(V / 32),) int32, a bit each."""
        return pack_mask(np.array([bool(token) for token in self.tokens]))

    def spaced_mask(self) -> NDArray[np.int32]:
        """Returns the tokens that begin with a space, (ceil(V / 32),) int32, a bit each."""
        return pack_mask(np.array([token.startswith(b" ") for token in self.tokens]))


def pack_mask(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Packs booleans (V,) into bits: bit i % 32 of word i // 32 of (ceil(V / 32),) int32 for token i."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.dtype("<i4")).astype(np.int32)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Finds what every token adds to a text that goes on, and tries it on the tokenizer.

    Args:
        tokenizer: The tokenizer of the bundle.
        vocab_size: V; ids past the tokenizer's own are no part of a text, nor are special tokens.

    Raises:
        UnsupportedTokenizerError: What a token reads as depends on its neighbours.
    """
    settings = json.loads(tokenizer.to_str())
    special = {token["id"] for token in settings["added_tokens"] if token["special"]}
    decoder = _Decoder(settings["decoder"])
    tokens = [b""] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id not in special and token_id < vocab_size:
            tokens[token_id] = decoder.decode(text)
    return TokenBytes(tuple(tokens), decoder.drops_first_space)


class _Decoder:
    """A tokenizer's decoder, token by token."""

    def __init__(self, settings: dict[str, object] | None) -> None:
        self._is_byte_level = settings is not None and settings["type"] == "ByteLevel"
        self.drops_first_space = False

    def decode(self, token: str) -> bytes:
        return b"".join(_BYTES[char] for char in token) if all(char in _BYTES for char in token) else token.encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns the character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()
