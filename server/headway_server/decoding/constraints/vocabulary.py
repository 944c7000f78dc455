"""The bytes that every token of a tokenizer adds to a text.

V is the number of the model's logits, which may be larger than the tokenizer's vocabulary.

A constraint is about the text that is handed out, decoded after its prompt. So a token counts with its text in the
middle of a text, leading space included. Tokenizers whose tokens have other texts depending on the next token are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from headway_server.decoding.rules import Mask, pack
from headway_server.preprocessing.text import BYTE_LEVEL, BYTE_TOKEN

_NOT_IN_TEXT = 0xFF
"""A byte that no UTF-8 text has; the library uses it for something else."""
_UTF8_BYTES = frozenset(bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5)))
_MAX_TRIED = 4096
"""Maximum tokens decoded to check their expected text."""


class UnsupportedTokenizerError(ValueError):
    """The text of a token depends on more than the token, or is unknown."""


@dataclass(frozen=True)
class Vocabulary:
    """Texts of tokens within a text."""

    tokens: tuple[bytes, ...]
    """(V,) bytes of each token; empty for a token that is not part of a text."""
    drops_first_space: bool
    """True if the first token of a text loses its spaces."""

    @cached_property
    def spells_everything(self) -> bool:
        """True if every text can be written, so that none ends for lack of a token."""
        return set(self.tokens) >= _UTF8_BYTES

    @cached_property
    def characters(self) -> frozenset[str]:
        """The characters that are tokens by themselves."""
        texts = (token.decode(errors="ignore") for token in set(self.tokens))
        return frozenset(text for text in texts if len(text) == 1)

    def mask(self, is_marked: Callable[[bytes], bool]) -> Mask:
        """Returns the mask of marked tokens."""
        return pack(np.array([is_marked(token) for token in self.tokens], np.bool_))


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_id: int | None) -> Vocabulary:
    """Finds the text that every token adds, and checks it against the tokenizer.

    Args:
        tokenizer: The tokenizer of the bundle.
        vocab_size: V; ids past the tokenizer's own are not part of a text, nor are special tokens.
        eos_id: Token that ends a text, which the tokenizer need not know as a special one.

    Raises:
        UnsupportedTokenizerError: The text of a token depends on its neighbours.
    """
    settings = json.loads(tokenizer.to_str())
    not_text = {token["id"] for token in settings["added_tokens"] if token["special"]}
    not_text |= {
        eos_id,
        settings["model"].get("unk_id"),
        tokenizer.token_to_id(settings["model"].get("unk_token") or ""),
    }
    decoder = _Decoder(settings["decoder"])
    tokens = [b""] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in not_text:
            added = decoder.decode(text)
            tokens[token_id] = b"" if _NOT_IN_TEXT in added else added
    _try(tokenizer, tokens)
    return Vocabulary(tuple(tokens), decoder.drops_first_space)


def _try(tokenizer: Tokenizer, tokens: list[bytes]) -> None:
    """Decodes tokens after a word and compares them with the expected texts.

    Raises:
        UnsupportedTokenizerError: One has another text.
    """
    word = next((token_id for token_id, token in enumerate(tokens) if token.isalpha()), None)
    if word is None:
        raise UnsupportedTokenizerError("no token of its vocabulary is a word or a letter")
    whole = [token_id for token_id, token in enumerate(tokens) if token and _is_utf8(token)]
    tried = whole[:: -(-len(whole) // _MAX_TRIED)]
    before = tokenizer.decode([word])
    for token_id, text in zip(tried, tokenizer.decode_batch([[word, token_id] for token_id in tried]), strict=True):
        if text != before + tokens[token_id].decode():
            raise UnsupportedTokenizerError(
                f"token {token_id} has another text within a text than its decoder returns alone"
            )


def _is_utf8(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Decoder:
    """A tokenizer's decoder, token by token, from its settings in `tokenizer.json`."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.drops_first_space = False
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replaced: list[tuple[str, str]] = []
        if settings is None:
            raise UnsupportedTokenizerError("its tokenizer has no decoder, so its tokens are joined by spaces")
        steps = settings["decoders"] if settings["type"] == "Sequence" else [settings]
        for index, step in enumerate(steps):
            self._add(step, is_fused=any(earlier["type"] == "Fuse" for earlier in steps[:index]))

    def _add(self, step: dict[str, Any], *, is_fused: bool) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Metaspace", "replacement": str(mark)}:
                self._replaced.append((mark, " "))
                self.drops_first_space |= step.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(content)} if len(mark) == 1:
                self._replaced.append((mark, content))
            case {"type": "Strip", "content": " ", "stop": 0} if is_fused:
                self.drops_first_space |= step["start"] > 0
            case _:
                raise UnsupportedTokenizerError(
                    f"its tokenizer's decoder has a step {step['type']}, so that the text of a token depends on its "
                    "neighbours; byte-level, metaspace and byte-fallback tokenizers can be constrained"
                )

    def decode(self, token: str) -> bytes:
        """Returns the text that a token adds."""
        if self._is_byte_level:
            return b"".join(map(BYTE_LEVEL.__getitem__, token)) if BYTE_LEVEL.keys() >= set(token) else token.encode()
        for mark, content in self._replaced:
            token = token.replace(mark, content)
        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.encode(errors="replace")
