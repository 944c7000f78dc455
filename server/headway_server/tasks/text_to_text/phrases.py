"""Prefixes of outputs, and phrases that must or must not appear in them, as tokens.

A phrase has different tokens at the beginning of a text, after a space, and after other characters, such as a bracket.
At the beginning of a sentence its first letter may be a capital. A forbidden phrase is forbidden in each of these
forms. A required phrase is required in one: after a space, or without a space if its script or its first character
takes none.

A model may write a forbidden phrase with tokens that the tokenizer would not choose, such as letter by letter. Outputs
are therefore checked for the phrase as whole words. If it is found, its tokens are forbidden too and the search is
repeated.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_bytes, most_elements
from headway_server.preprocessing import TextTokenizer
from headway_server.serving.limits import num_bytes
from headway_server.tasks.text_to_text.alignment import target_spans

MAX_REQUIRED: Final = most_elements("PhraseConstraints.required")
MAX_FORBIDDEN: Final = most_elements("PhraseConstraints.forbidden")
MAX_PHRASE_BYTES: Final = most_bytes("PhraseConstraints.required")
"""Maximum bytes of a phrase in UTF-8. It is tokenized in many forms, and finding them takes memory for every token."""

_NUM_FORMS: Final = 6
"""Maximum forms of a forbidden phrase: with and without a capital, in each of three contexts."""
_MORE_TOKENS: Final = 3
"""Maximum bytes that a space or a capital adds to a form."""
TOKEN_BYTES: Final = 36
"""Bytes of an int object and the reference to it."""
_BYTES_OF_FORM: Final = TOKEN_BYTES + 400
"""Bytes of each token of a form, with its node of the trie (`decoding/beam_search/rules.py`)."""

Tokens: TypeAlias = tuple[int, ...]

_SPACELESS_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH", "THAI", "LAO", "KHMER", "MYANMAR")
"""Beginnings of the Unicode names of characters that are written without spaces between words."""
_ANCHORS = ("a", "(", "1", ".")
"""Texts before a phrase with which it is tokenized; the first that does not merge with it decides its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhraseRequest:
    """Phrases of a request."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of their tokens in all forms."""
        forms = [(1, text) for text in self.required[:MAX_REQUIRED]]
        forms += [(_NUM_FORMS, text) for text in self.forbidden[:MAX_FORBIDDEN]]
        num_tokens = sum(count * (min(num_bytes(text), MAX_PHRASE_BYTES) + _MORE_TOKENS) for count, text in forms)
        return num_tokens * _BYTES_OF_FORM


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPhrases:
    """Phrases as token ids."""

    asked: PhraseRequest = PhraseRequest()
    """Phrases of the request."""
    required: tuple[Tokens, ...] = ()
    """Each once."""
    forbidden_forms: tuple[tuple[Tokens, ...], ...] = ()
    """Forms of each forbidden phrase."""

    @property
    def num_bytes(self) -> int:
        """Bytes of their tokens."""
        return _BYTES_OF_FORM * sum(map(len, (*self.required, *self.forbidden)))

    @property
    def forbidden(self) -> tuple[Tokens, ...]:
        """All forms, each once."""
        return tuple(dict.fromkeys(form for forms in self.forbidden_forms for form in forms))


class PhraseEncoder:
    """Encodes phrases and prefixes for one model."""

    def __init__(self, tokenizer: TextTokenizer, *, unknown_id: int | None, owner: str) -> None:
        """Takes the tokenizer of the model `owner`; `unknown_id` is its token for unknown text."""
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id
        self._owner = owner
        added = tokenizer.library_tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token_id: token.content for token_id, token in added.items() if token.special}

    def encode_prefix(self, field: str, prefix: str, max_tokens: int) -> Tokens:
        """Tokenizes a prefix without white space at its end.

        A word's token includes the space before it. After a separate space, the next word would have tokens that the
        model has never seen there.

        Args:
            field: Its name in the request.
            prefix: The prefix; an empty one has no tokens.
            max_tokens: Maximum tokens of the output.

        Raises:
            InvalidInputError: It has unknown or special tokens, or leaves no room for one more token.
        """
        token_ids = self._encode(prefix.rstrip())
        self._check_written(field, token_ids)
        if len(token_ids) >= max_tokens:
            raise InvalidInputError(
                field,
                f"has {len(token_ids)} tokens; must have at most {max_tokens - 1}, one less than the output may "
                "have; shorten it, or allow more with max_new_tokens",
            )
        return token_ids

    def encode_phrases(self, field: str, phrases: PhraseRequest) -> EncodedPhrases:
        """Tokenizes the phrases of one text; `field` is their name in the request.

        Raises:
            InvalidInputError: There are too many phrases; one is empty, too long, unknown or has special tokens; or one
                is both required and forbidden.
        """
        _check_count(f"{field}.required", len(phrases.required), MAX_REQUIRED)
        _check_count(f"{field}.forbidden", len(phrases.forbidden), MAX_FORBIDDEN)
        required = [self._required(f"{field}.required[{i}]", text) for i, text in enumerate(phrases.required)]
        forbidden = [self._forbidden(f"{field}.forbidden[{i}]", text) for i, text in enumerate(phrases.forbidden)]
        self._check_possible(field, phrases, required, forbidden)
        return EncodedPhrases(asked=phrases, required=tuple(dict.fromkeys(required)), forbidden_forms=tuple(forbidden))

    def spellings(self, phrases: EncodedPhrases, text: str, token_ids: Sequence[int]) -> tuple[Tokens, ...]:
        """Finds the tokens of forbidden phrases in an output.

        Args:
            phrases: Phrases of the call.
            text: The output.
            token_ids: Its tokens.

        Returns:
            The tokens of every forbidden phrase that occurs as whole words; none for a valid output.
        """
        words = [span for phrase in phrases.asked.forbidden for span in find_words(text, phrase.strip())]
        if not words:
            return ()
        spans = target_spans(text, token_ids, self._tokenizer)
        found = [
            tuple(token for token, (start, end) in zip(token_ids, spans, strict=True) if start < stop and end > begin)
            for begin, stop in words
        ]
        return tuple(tokens for tokens in dict.fromkeys(found) if tokens)

    def __repr__(self) -> str:
        return f"PhraseEncoder({self._owner})"

    def _required(self, field: str, phrase: str) -> Tokens:
        text = _stripped(field, phrase)
        token_ids = self._after(text, with_space=_follows_space(text)) or self._encode(text)
        self._check_written(field, token_ids)
        return token_ids

    def _forbidden(self, field: str, phrase: str) -> tuple[Tokens, ...]:
        text = _stripped(field, phrase)
        self._check_written(field, self._encode(text))
        forms: dict[Tokens, None] = {}
        for spelling in _letter_cases(text):
            for tokens in (
                self._encode(spelling),
                self._after(spelling, with_space=True),
                self._after(spelling, with_space=False),
            ):
                if tokens and self._unknown_id not in tokens:
                    forms[tokens] = None
        return tuple(forms)

    def _encode(self, text: str) -> Tokens:
        return tuple(self._tokenizer.encode_now(text).input_ids.tolist())

    def _after(self, phrase: str, *, with_space: bool) -> Tokens:
        """Returns the tokens of a phrase within a text; none if they merge with the preceding text."""
        for anchor in _ANCHORS:
            before = self._encode(anchor)
            whole = self._encode(f"{anchor} {phrase}" if with_space else anchor + phrase)
            if len(whole) > len(before) and whole[: len(before)] == before:
                return whole[len(before) :]
        return ()

    def _check_written(self, field: str, token_ids: Tokens) -> None:
        """Checks that a text has no special tokens and no unknown ones."""
        if self._unknown_id is not None and self._unknown_id in token_ids:
            raise InvalidInputError(
                field, f"has characters or words that {self._owner} does not know, so it cannot be decoded; reword it"
            )
        special = next((token_id for token_id in token_ids if token_id in self._special_tokens), None)
        if special is not None:
            raise InvalidInputError(
                field,
                f"has {self._special_tokens[special]!r}, a special token of {self._owner}, which is never written as "
                "text; leave it out",
            )

    def _check_possible(
        self, field: str, phrases: PhraseRequest, required: Sequence[Tokens], forbidden: Sequence[Sequence[Tokens]]
    ) -> None:
        for index, tokens in enumerate(required):
            for other, forms in enumerate(forbidden):
                text, part = phrases.required[index].strip(), phrases.forbidden[other].strip()
                same = text == part
                if any(find_words(text, part)) or any(contains(tokens, form) for form in forms):
                    reason = "is the same" if same else "is a part of it"
                    raise InvalidInputError(
                        f"{field}.required[{index}]",
                        f"cannot appear, since {field}.forbidden[{other}] {reason}; leave out one of them",
                    )


def _letter_cases(phrase: str) -> tuple[str, ...]:
    """Returns a phrase, and the phrase with a capital at its beginning."""
    return tuple(dict.fromkeys((phrase, phrase[0].upper() + phrase[1:])))


def find_words(text: str, phrase: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of a phrase in a text as whole words, with or without a capital."""
    for spelling in _letter_cases(phrase):
        start = text.find(spelling)
        while start >= 0:
            end = start + len(spelling)
            if not (
                _is_one_word(text[start - 1 : start], spelling[0]) or _is_one_word(text[end : end + 1], spelling[-1])
            ):
                yield start, end
            start = text.find(spelling, start + 1)


def _is_one_word(neighbour: str, character: str) -> bool:
    """Returns True if a phrase's first or last character and its neighbour, if any, are part of one word."""
    if not character.isalnum() or _is_spaceless(character):
        return False
    return neighbour.isalnum() or neighbour == "_"


def contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    """Returns True if `part` occurs in the tokens."""
    return any(tuple(tokens[i : i + len(part)]) == tuple(part) for i in range(len(tokens) - len(part) + 1))


def _stripped(field: str, phrase: str) -> str:
    text = phrase.strip()
    if not text:
        raise InvalidInputError(field, "is empty; give at least one character that is not white space")
    if (size := len(text.encode())) > MAX_PHRASE_BYTES:
        raise InvalidInputError(field, f"has {size} bytes, the limit is {MAX_PHRASE_BYTES}; shorten it")
    return text


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInputError(field, f"has {count} elements; at most {limit}")


def _follows_space(text: str) -> bool:
    """Returns True if a text takes a space before it; closing punctuation does not."""
    first = text[0]
    if _is_spaceless(first):
        return False
    return unicodedata.category(first) not in {"Pe", "Pf", "Po"} or first in "&@#%*¿¡\"'/\\"


def _is_spaceless(character: str) -> bool:
    """Returns True if a character is of a script without spaces between words."""
    return unicodedata.name(character, "").startswith(_SPACELESS_SCRIPTS)
