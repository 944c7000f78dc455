"""Text to token ids and back, by the bundle's own tokenizer.

Texts of a call are encoded slice by slice. A call has one slice in a pool at a time and slices are short, so the calls
take turns; a text that is longer than a slice goes to a pool of its own (`pool.py`).

T is the number of tokens of a text.
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from headway_server.errors import BundleError, InvalidInputError, no_panics
from headway_server.preprocessing.pool import LONG_TEXT, text_pool

REPLACEMENT: Final = "\ufffd"
"""What stands in a text for bytes that are no character."""
_SLICE_LENGTH: Final = LONG_TEXT
"""Characters of the texts that are encoded at a time: what the library makes of a text is many times its size."""
_FEW_CHARACTERS: Final = 1000
"""Texts of so few are encoded on the event loop, in 0.2 ms, hardly ever 0.8. The lone caller of a headline then waits
10 % less (1.68 ms in place of 1.87, docs/batching.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """A text as a model reads it."""

    input_ids: NDArray[np.int64]
    """(T,)"""
    offsets: tuple[tuple[int, int], ...] = ()
    """First character and character after each token, in Unicode code points; empty unless asked for."""
    type_ids: NDArray[np.int64] | None = None
    """(T,), 1 in the second text of a pair and 0 elsewhere; None where no text of the call is paired."""
    truncated: bool = False
    """True if the text was shortened to the limit."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def after(self, token_ids: Sequence[int]) -> EncodedText:
        """Returns the same with tokens before it that stand for no character."""
        return replace(
            self,
            input_ids=np.concatenate([np.array(token_ids, np.int64), self.input_ids]),
            offsets=((0, 0),) * (len(token_ids) if self.offsets else 0) + self.offsets,
        )


def open_tokenizer(file: Path) -> Tokenizer:
    """Opens a `tokenizer.json` that neither shortens nor pads, whatever it was saved with.

    Raises:
        BundleError: The file cannot be read as a tokenizer.
    """
    try:
        with no_panics():
            tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"{file}: cannot be read as a tokenizer ({error}); export the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TextTokenizer:
    """The tokenizer of a bundle.

    Safe to use from several threads: nothing changes after loading but a cache of texts of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, truncation_side: Literal["left", "right"] = "right") -> None:
        self._truncation_side = truncation_side
        # What a tokenizer was saved with must not shorten or pad texts behind the server's back.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.num_special_tokens: int = tokenizer.num_special_tokens_to_add(is_pair=False)
        self.num_special_tokens_of_pair: int = tokenizer.num_special_tokens_to_add(is_pair=True)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._largest_id = max(vocabulary.values(), default=0)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(cls, file: Path, *, truncation_side: Literal["left", "right"] = "right") -> TextTokenizer:
        """Loads a `tokenizer.json`.

        Args:
            file: The file.
            truncation_side: Which end of a text is cut where nothing else is asked for.

        Raises:
            BundleError: The file cannot be read as a tokenizer.
        """
        return cls(open_tokenizer(file), truncation_side=truncation_side)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def library_tokenizer(self) -> Tokenizer:
        """The library's own tokenizer, for what reads its vocabulary; nobody changes it."""
        return self._tokenizer

    @property
    def largest_id(self) -> int:
        """The largest id it may give; ids may have gaps, so it may be more than their number."""
        return self._largest_id

    async def encode_each(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        with_offsets: bool = False,
        text_pairs: Sequence[str] | None = None,
    ) -> AsyncGenerator[EncodedText, None]:
        """Yields encoded texts in order, made slice by slice: nothing is encoded past the slice where a caller stops.

        More than a few short texts are encoded off the event loop.

        Args:
            texts: Any number of texts.
            add_special_tokens: True to run the post-processor: for classification and translation sources, not for
                prompts.
            with_offsets: True to give the characters of each token; without them it is faster.
            text_pairs: What each text is read with as one input; None: nothing.
        """
        for part, length in _slices(texts, text_pairs):
            pairs = None if text_pairs is None else text_pairs[part]
            for text in await self._encode_slice(texts[part], pairs, length, add_special_tokens, with_offsets):
                yield text

    async def encode_limited(
        self,
        texts: Sequence[str],
        *,
        fields: Sequence[str],
        max_tokens: int,
        truncate: bool,
        add_special_tokens: bool = True,
        truncation_side: Literal["left", "right"] | None = None,
        with_offsets: bool = False,
        text_pairs: Sequence[str] | None = None,
    ) -> list[EncodedText]:
        """Encodes texts as `encode_each` does and holds them to a model's limit; nothing follows the first refusal.

        Args:
            texts: The texts of a request.
            fields: What the request calls each of them, such as `texts[3]`, for messages.
            max_tokens: Most tokens of a text, special tokens included.
            truncate: True to shorten a longer text instead of refusing it; special tokens are kept.
            add_special_tokens: True to run the post-processor.
            truncation_side: Which end of a text is cut; None: the tokenizer's.
            with_offsets: True to give the characters of each token.
            text_pairs: What each text is read with as one input; None: nothing. Of a pair past the limit, the longer
                text is shortened first.

        Raises:
            InvalidInputError: A text is past the limit and `truncate` is not set, or is nothing but special tokens.
        """
        least = self._num_special(is_pair=text_pairs is not None) if add_special_tokens else 0
        encoded: list[EncodedText] = []
        async with aclosing(
            self.encode_each(
                texts, add_special_tokens=add_special_tokens, with_offsets=with_offsets, text_pairs=text_pairs
            )
        ) as each:
            async for text in each:
                index = len(encoded)
                if len(text) <= least:
                    raise InvalidInputError(fields[index], "holds no text; give it at least one word")
                if len(text) <= max_tokens:
                    encoded.append(text)
                    continue
                if not truncate:
                    raise _too_long(fields[index], len(text), max_tokens, is_pair=text_pairs is not None)
                shorten = partial(
                    self._shorten,
                    texts[index],
                    None if text_pairs is None else text_pairs[index],
                    max_tokens,
                    add_special_tokens=add_special_tokens,
                    direction=truncation_side or self._truncation_side,
                    with_offsets=with_offsets,
                )
                pool = text_pool(len(texts[index]) + (0 if text_pairs is None else len(text_pairs[index])))
                encoded.append(await asyncio.get_running_loop().run_in_executor(pool, shorten))
        return encoded

    def encode_now(self, text: str, *, with_offsets: bool = False) -> EncodedText:
        """Encodes a text without special tokens, and with its characters where asked. Runs on the caller's thread."""
        [encoded] = self._encode([text], None, False, with_offsets)
        return encoded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`; special tokens are left out. Runs on the caller's thread."""
        with no_panics():
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_with(self, shown: Collection[int], token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` with the names of the special tokens that are `shown`, as `decode` does."""
        ids = [index for index in token_ids if index in shown or index not in self._special_ids]
        with no_panics():
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def is_text(self, token_id: int) -> bool:
        """Returns False of a special token, which `decode` leaves out."""
        return token_id not in self._special_ids

    def token_text(self, token_id: int) -> str:
        """Returns a token by itself as it reads within a text: with the space before it, if it brings one.

        What is not a whole character reads as U+FFFD, a special token by its name. Runs on the caller's thread.

        Args:
            token_id: A token of the model; one that the tokenizer does not know has no text.
        """
        text = self._token_texts.get(token_id)
        if text is None:  # at the beginning of a text it may read otherwise, so it is read after itself
            with no_panics():
                alone = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
                doubled = str(self._tokenizer.decode([token_id, token_id], skip_special_tokens=False))
            text = doubled.removeprefix(alone) if doubled.startswith(alone) else alone
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of `token_text`, and of a part of a character its own.

        Returns None if they cannot be told: of a token that is no whole character, and no token of bytes either.
        """
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode(errors="replace")
        return _bytes_of(self._tokenizer.id_to_token(token_id) or "")

    def decoder(self, shown: Collection[int] = frozenset()) -> TokenDecoder:
        """Returns what makes text of tokens as `decode` does, with the names of the special tokens that are `shown`."""
        return TokenDecoder(self, frozenset(shown))

    async def _encode_slice(
        self,
        texts: Sequence[str],
        text_pairs: Sequence[str] | None,
        length: int,
        add_special_tokens: bool,
        with_offsets: bool,
    ) -> list[EncodedText]:
        if length <= _FEW_CHARACTERS:
            return self._encode(texts, text_pairs, add_special_tokens, with_offsets)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            text_pool(length), self._encode, texts, text_pairs, add_special_tokens, with_offsets
        )

    def _encode(
        self, texts: Sequence[str], text_pairs: Sequence[str] | None, add_special_tokens: bool, with_offsets: bool
    ) -> list[EncodedText]:
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        # For one text too: the library's `encode` keeps the GIL, and a long text would stop the event loop for 0.3 s.
        inputs = list(texts) if text_pairs is None else list(zip(texts, text_pairs, strict=True))
        with no_panics():
            encodings = encode(inputs, add_special_tokens=add_special_tokens)
        return [_encoded_text(encoding, with_offsets, is_pair=text_pairs is not None) for encoding in encodings]

    def _shorten(
        self,
        text: str,
        pair: str | None,
        max_tokens: int,
        *,
        add_special_tokens: bool,
        direction: Literal["left", "right"],
        with_offsets: bool,
    ) -> EncodedText:
        """Encodes a text anew, cutting before the special tokens are added so that they stay."""
        with no_panics():
            first, *rest = self._tokenizer.encode_batch(
                [text, *([] if pair is None else [pair])], add_special_tokens=False
            )
            second = rest[0] if rest else None
            room = max(max_tokens - (self._num_special(is_pair=second is not None) if add_special_tokens else 0), 0)
            lengths = (room, 0) if second is None else _shares(len(first), len(second), room)
            first = _truncated(first, lengths[0], direction=direction)
            if second is not None:
                second = _truncated(second, lengths[1], direction=direction)
            if add_special_tokens or second is not None:
                first = self._tokenizer.post_process(first, second, add_special_tokens)
        return _encoded_text(first, with_offsets, truncated=True, is_pair=second is not None)

    def _num_special(self, *, is_pair: bool) -> int:
        return self.num_special_tokens_of_pair if is_pair else self.num_special_tokens

    def __repr__(self) -> str:
        return f"TextTokenizer({self.vocabulary_size} tokens, {self.num_special_tokens} special tokens a text)"


class TokenDecoder:
    """Makes text of tokens, and tells a U+FFFD that they spell from bytes that are no character. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self._tokenizer.decode_with(self._shown, token_ids) if self._shown else self._tokenizer.decode(token_ids)

    def ends_with_replacement(self, token_ids: Sequence[int]) -> bool:
        """Returns True if the last bytes that tokens spell are those of U+FFFD itself, which nothing can change."""
        end, spelled = b"", REPLACEMENT.encode()
        for token_id in reversed(token_ids):
            if self._tokenizer.is_text(token_id) or token_id in self._shown:
                end = (self._tokenizer.token_bytes(token_id) or b"") + end
            if len(end) >= len(spelled):
                break
        return end.endswith(spelled)

    def __repr__(self) -> str:
        return f"TokenDecoder({self._tokenizer!r})"


def _byte_level_alphabet() -> dict[str, bytes]:
    """Returns the character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_LEVEL: Final = _byte_level_alphabet()
"""The byte of each character of a byte-level token."""
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of tokens that stand for a byte in vocabularies that fall back to them."""


def _bytes_of(token: str) -> bytes | None:
    """Returns what a token stands for whose text is no whole character."""
    if (byte := BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    if token and BYTE_LEVEL.keys() >= set(token):
        return b"".join(map(BYTE_LEVEL.__getitem__, token))
    return token.encode() if REPLACEMENT in token else None


def _encoded_text(
    encoding: Encoding, with_offsets: bool, *, truncated: bool = False, is_pair: bool = False
) -> EncodedText:
    return EncodedText(
        input_ids=np.asarray(encoding.ids, np.int64),
        offsets=tuple(encoding.offsets) if with_offsets else (),
        type_ids=np.asarray(encoding.type_ids, np.int64) if is_pair else None,
        truncated=truncated,
    )


def written_length(text: str) -> int:
    """Returns how many characters a text has in compatibility decomposition (NFKD).

    That is what the normalizer of a tokenizer makes of it at most, but for the spaces that some put around characters.
    Takes 0.3 µs for a headline, 0.1 ms for 256 KiB of Chinese, and 10 ns for each character that it gives.
    """
    return len(text) if text.isascii() else len(unicodedata.normalize("NFKD", text))


def _slices(texts: Sequence[str], text_pairs: Sequence[str] | None = None) -> Iterator[tuple[slice, int]]:
    """Cuts texts into slices of at most `_SLICE_LENGTH` characters; a longer text is a slice of its own.

    Characters are counted as they are when the tokenizer has normalized them; each slice comes with their number.
    """
    start, length = 0, 0
    for index, text in enumerate(texts):
        own = written_length(text) + (0 if text_pairs is None else written_length(text_pairs[index]))
        if index > start and length + own > _SLICE_LENGTH:
            yield slice(start, index), length
            start, length = index, 0
        length += own
    if start < len(texts):
        yield slice(start, len(texts)), length


def _truncated(encoding: Encoding, num_tokens: int, *, direction: Literal["left", "right"]) -> Encoding:
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


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens two texts of a pair keep: the longer one loses first, until they are as long.

    The tokenizers library, which cuts pairs in training, does the same: of an odd room the longer text gets the token
    that is left over, or the second one if they are equal.
    """
    short, long = min(first, second), max(first, second)
    if short + long > room:
        long = max(short, room - short) if short <= room else short
        if short + long > room:
            short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


def _too_long(field: str, length: int, max_tokens: int, *, is_pair: bool) -> InvalidInputError:
    together = " with the text it is paired with" if is_pair else ""
    return InvalidInputError(
        field,
        f"has {length} tokens{together}, the model reads at most {max_tokens}; "
        "shorten it, split it, or set truncate to have it cut",
    )
