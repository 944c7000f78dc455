"""Encoding and decoding of texts by the bundle's tokenizer.

Texts of a call are encoded in slices. A call has one short slice in the pool at a time, so calls take turns. A text
longer than a slice goes to a separate pool (`pool.py`).

T is the number of tokens of a text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from headway_server.errors import BundleError, ContextLengthError, InvalidInputError, no_panics
from headway_server.observers import note_truncated
from headway_server.preprocessing.pool import LONG_TEXT, off_loop

Text: TypeAlias = str | Sequence[str]
Item = TypeVar("Item")
"""A text, or the words of one that a caller has split: no token spans two of them."""
REPLACEMENT: Final = "\ufffd"
"""Replacement character of invalid bytes."""
_SLICE_LENGTH: Final = LONG_TEXT
"""Characters of a slice: the library's result is many times the size of a text."""
_FEW_CHARACTERS: Final = 1000
"""Maximum characters tokenized on the event loop, in 0.2 ms, rarely 0.8. A single caller of a headline then waits
10 % less (1.68 ms instead of 1.87, docs/batching.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """An encoded text."""

    input_ids: NDArray[np.int64]
    """(T,)"""
    offsets: tuple[tuple[int, int], ...] = ()
    """Start and end of each token, in Unicode code points; empty unless requested."""
    word_ids: tuple[int | None, ...] = ()
    """The tokenizer's word of each token, None without one; empty without offsets."""
    type_ids: NDArray[np.int64] | None = None
    """(T,), 1 in the second text of a pair and 0 elsewhere; None in a call without pairs."""
    truncated: bool = False
    """True if the text was shortened to the limit."""
    num_seen: int | None = None
    """Tokens, from the first, that all of them attend to; None: all."""
    num_unpooled: int = 0
    """Tokens, from the first, that a pooling leaves out."""
    boxes: NDArray[np.int64] | NDArray[np.float32] | None = None
    """Box of each token, (T, 4), for models that read boxes."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def after(self, token_ids: Sequence[int]) -> EncodedText:
        """Returns the text with tokens prepended, without characters of their own."""
        return replace(
            self,
            input_ids=np.concatenate([np.array(token_ids, np.int64), self.input_ids]),
            offsets=((0, 0),) * (len(token_ids) if self.offsets else 0) + self.offsets,
            word_ids=(None,) * (len(token_ids) if self.word_ids else 0) + self.word_ids,
        )


def open_tokenizer(file: Path) -> Tokenizer:
    """Opens a `tokenizer.json`, with truncation and padding turned off.

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
    """The tokenizer of a bundle. Thread-safe: after loading, only a cache of tokens' texts changes."""

    def __init__(
        self, tokenizer: Tokenizer, *, truncation_side: Literal["left", "right"] = "right", truncates: bool = False
    ) -> None:
        self._truncation_side = truncation_side
        self.truncates = truncates
        """True if texts that are too long are shortened unless asked otherwise."""
        # Saved settings of truncation and padding must not apply here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.num_special_tokens: int = tokenizer.num_special_tokens_to_add(is_pair=False)
        self.num_special_tokens_of_pair: int = tokenizer.num_special_tokens_to_add(is_pair=True)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._largest_id = max(vocabulary.values(), default=0)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Tokens that are no text."""
        self._token_texts: dict[int, str] = {}

    @classmethod
    def load(
        cls, file: Path, *, truncation_side: Literal["left", "right"] = "right", truncates: bool = False
    ) -> TextTokenizer:
        """Loads a `tokenizer.json`.

        Args:
            file: The file.
            truncation_side: Default side of truncation.
            truncates: True to shorten texts that are too long.

        Raises:
            BundleError: The file cannot be read as a tokenizer.
        """
        return cls(open_tokenizer(file), truncation_side=truncation_side, truncates=truncates)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def library_tokenizer(self) -> Tokenizer:
        """The library's tokenizer, for reading its vocabulary; not to be changed."""
        return self._tokenizer

    @property
    def largest_id(self) -> int:
        """The largest token id; with gaps between ids it may exceed their number."""
        return self._largest_id

    async def encode_each(
        self,
        texts: Sequence[Text],
        *,
        add_special_tokens: bool,
        with_offsets: bool = False,
        text_pairs: Sequence[str] | None = None,
    ) -> AsyncGenerator[EncodedText, None]:
        """Yields encoded texts in order, slice by slice: nothing is encoded beyond the slice at which the caller stops.

        More than a few short texts are encoded off the event loop.

        Args:
            texts: Any number of texts, or words of as many; not of both.
            add_special_tokens: True to run the post-processor, for texts and sources but not for prompts.
            with_offsets: True for the positions of tokens, which take time.
            text_pairs: Second text of each pair; None: single texts.
        """
        each = self._encode_slices(texts, text_pairs, add_special_tokens=add_special_tokens, with_offsets=with_offsets)
        async with aclosing(each):
            async for text in each:
                yield text

    async def encode_limited(
        self,
        texts: Sequence[Text],
        *,
        fields: Sequence[str],
        max_tokens: int,
        truncate: bool,
        add_special_tokens: bool = True,
        truncation_side: Literal["left", "right"] | None = None,
        with_offsets: bool = False,
        text_pairs: Sequence[str] | None = None,
    ) -> list[EncodedText]:
        """Encodes texts as `encode_each` does, within a model's limit; stops at the first refusal.

        Args:
            texts: The texts of a request, or words of each.
            fields: Field of each in the request, such as `texts[3]`, for messages.
            max_tokens: Limit of tokens of a text, including special tokens.
            truncate: True to truncate a longer text instead of refusing it; special tokens stay.
            add_special_tokens: True to run the post-processor.
            truncation_side: Side of truncation; None: the tokenizer's.
            with_offsets: True for the positions of tokens.
            text_pairs: Second text of each input; None: no pairs. Truncation of a pair shortens the longer text first.

        Raises:
            InvalidInputError: A text exceeds the limit without `truncate`, or has only special tokens.
        """
        least = self._num_special(is_pair=text_pairs is not None) if add_special_tokens else 0
        encoded: list[EncodedText] = []
        cut = _Cut(max_tokens, truncation_side or self._truncation_side) if truncate else None
        each = self._encode_slices(
            texts, text_pairs, add_special_tokens=add_special_tokens, with_offsets=with_offsets, cut=cut
        )
        async with aclosing(each):
            async for text in each:
                index = len(encoded)
                if text.truncated:
                    note_truncated()
                elif len(text) <= least:
                    raise InvalidInputError(fields[index], "has no text; give it at least one word")
                elif len(text) > max_tokens:
                    raise _too_long(fields[index], len(text), max_tokens, is_pair=text_pairs is not None)
                encoded.append(text)
        return encoded

    def encode_now(self, text: str, *, with_offsets: bool = False) -> EncodedText:
        """Encodes a text on the caller's thread, without special tokens, optionally with positions."""
        [encoded] = self._encode([text], None, False, with_offsets)
        return encoded

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes `token_ids` without special tokens, on the caller's thread."""
        with no_panics():
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_with(self, shown: Collection[int], token_ids: Sequence[int]) -> str:
        """Decodes `token_ids` as `decode` does, but with the names of special tokens in `shown`."""
        ids = [index for index in token_ids if index in shown or index not in self.special_ids]
        with no_panics():
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """Decodes `token_ids` with the names of all special tokens, on the caller's thread."""
        return self.decode_with(self.special_ids, token_ids)

    def piece(self, token_id: int) -> str:
        """Returns a token as the vocabulary spells it; empty text if the tokenizer does not know it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def is_text(self, token_id: int) -> bool:
        """Returns False for a special token, which `decode` leaves out."""
        return token_id not in self.special_ids

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token within a text, with its leading space if it has one.

        An incomplete character is U+FFFD, a special token is its name. Runs on the caller's thread.

        Args:
            token_id: A token of the model; empty text if unknown to the tokenizer.
        """
        text = self._token_texts.get(token_id)
        if text is None:  # at the beginning of a text it may differ, so it is decoded after itself
            with no_panics():
                alone = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
                doubled = str(self._tokenizer.decode([token_id, token_id], skip_special_tokens=False))
            text = doubled.removeprefix(alone) if doubled.startswith(alone) else alone
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of `token_text`, or the bytes of a partial character.

        Returns None if they are unknown: for a partial character that is not a byte token.
        """
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode(errors="replace")
        return _bytes_of(self._tokenizer.id_to_token(token_id) or "")

    def decoder(self, shown: Collection[int] = frozenset()) -> TokenDecoder:
        """Returns a decoder like `decode`, with the names of special tokens in `shown`."""
        return TokenDecoder(self, frozenset(shown))

    async def _encode_slices(
        self,
        texts: Sequence[Text],
        text_pairs: Sequence[str] | None,
        *,
        add_special_tokens: bool,
        with_offsets: bool,
        cut: _Cut | None = None,
    ) -> AsyncGenerator[EncodedText, None]:
        for part, length in _slices(texts, text_pairs):
            encode = partial(
                self._encode,
                texts[part],
                None if text_pairs is None else text_pairs[part],
                add_special_tokens,
                with_offsets,
                cut,
            )
            for text in await off_loop(length, encode, most_on_loop=_FEW_CHARACTERS):
                yield text

    def _encode(
        self,
        texts: Sequence[Text],
        text_pairs: Sequence[str] | None,
        add_special_tokens: bool,
        with_offsets: bool,
        cut: _Cut | None = None,
    ) -> list[EncodedText]:
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        # For a single text too: the library's `encode` holds the GIL, and a long text would block the event loop for
        # 0.3 s.
        inputs = list(texts) if text_pairs is None else list(zip(texts, text_pairs, strict=True))
        with no_panics():
            encodings = encode(inputs, is_pretokenized=_is_split(texts[0]), add_special_tokens=add_special_tokens)
        is_pair = text_pairs is not None
        return [_encoded_text(encoding, with_offsets=with_offsets, is_pair=is_pair, cut=cut) for encoding in encodings]

    def _num_special(self, *, is_pair: bool) -> int:
        return self.num_special_tokens_of_pair if is_pair else self.num_special_tokens

    def __repr__(self) -> str:
        return f"TextTokenizer({self.vocabulary_size} tokens, {self.num_special_tokens} special tokens a text)"


class TokenDecoder:
    """Decodes tokens, and distinguishes an encoded U+FFFD from invalid bytes. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, shown: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown

    def __call__(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self._tokenizer.decode_with(self._shown, token_ids) if self._shown else self._tokenizer.decode(token_ids)

    def ends_with_replacement(self, token_ids: Sequence[int]) -> bool:
        """Returns True if the last bytes of tokens are an encoded U+FFFD, which no further token changes."""
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
    """Returns the character of each byte in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_LEVEL: Final = _byte_level_alphabet()
"""Byte by character of a byte-level token."""
BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
"""Names of byte tokens in vocabularies with byte fallback."""


def _bytes_of(token: str) -> bytes | None:
    """Returns the bytes of a token whose text is not a whole character."""
    if (byte := BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    if token and BYTE_LEVEL.keys() >= set(token):
        return b"".join(map(BYTE_LEVEL.__getitem__, token))
    return token.encode() if REPLACEMENT in token else None


class _Cut(NamedTuple):
    """How texts are cut that are too long."""

    max_tokens: int
    """Of a text with its special tokens, which stay."""
    side: Literal["left", "right"]

    def kept(self, encoding: Encoding) -> NDArray[np.int64]:
        """Returns the places of the tokens that stay, in order; of a pair the longer text loses tokens first."""
        sources = np.array([-1 if source is None else source for source in encoding.sequence_ids])
        own = [np.flatnonzero(sources == source) for source in (0, 1)]
        first, second = map(len, own)
        lengths = _shares(first, second, max(self.max_tokens - int((sources < 0).sum()), 0))
        kept = sources < 0
        for places, length in zip(own, lengths, strict=True):
            kept[places[:length] if self.side == "right" else places[len(places) - length :]] = True
        return np.flatnonzero(kept)


def _encoded_text(encoding: Encoding, *, with_offsets: bool, is_pair: bool, cut: _Cut | None = None) -> EncodedText:
    kept = cut.kept(encoding) if cut is not None and len(encoding) > cut.max_tokens else None

    def of_kept(values: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(values) if kept is None else tuple(values[place] for place in kept.tolist())

    ids, types = (np.asarray(values, np.int64) for values in (encoding.ids, encoding.type_ids if is_pair else ()))
    return EncodedText(
        input_ids=ids if kept is None else ids[kept],
        offsets=of_kept(encoding.offsets) if with_offsets else (),
        word_ids=of_kept(encoding.word_ids) if with_offsets else (),
        type_ids=(types if kept is None else types[kept]) if is_pair else None,
        truncated=kept is not None,
    )


def _is_split(text: Text) -> bool:
    return not isinstance(text, str)


def written_length(text: Text) -> int:
    """Returns the number of characters of a text in compatibility decomposition (NFKD); of words, with one for each.

    A tokenizer's normalizer produces at most as many, apart from spaces that some add around characters. Takes 0.3 µs
    for a headline, 0.1 ms for 256 KiB of Chinese, and 10 ns for each character of the result.
    """
    if not isinstance(text, str):
        return len(text) + sum(map(written_length, text))
    return len(text) if text.isascii() else len(unicodedata.normalize("NFKD", text))


def _slices(texts: Sequence[Text], text_pairs: Sequence[str] | None = None) -> Iterator[tuple[slice, int]]:
    """Cuts texts into slices of at most `_SLICE_LENGTH` characters; a longer text is a slice of its own.

    Characters are counted after normalization; each slice comes with its count.
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


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the tokens left of each text of a pair: the longer one is truncated first, down to equal lengths.

    The tokenizers library does the same in training. Of an odd limit, the longer text gets the extra token, or the
    second text if they are equal.
    """
    short, long = min(first, second), max(first, second)
    if short + long > room:
        long = max(short, room - short) if short <= room else short
        if short + long > room:
            short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


def _too_long(field: str, length: int, max_tokens: int, *, is_pair: bool) -> ContextLengthError:
    together = " with the text it is paired with" if is_pair else ""
    return ContextLengthError(
        field,
        f"has {length} tokens{together}, the model reads at most {max_tokens}; "
        "shorten it, split it, or set truncate to have it cut",
    )
