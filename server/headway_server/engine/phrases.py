"""What a call says that a translation begins with, must say and must not say, as tokens.

A phrase is written with different tokens at the beginning of a text, after a space, and after something else, such as
a bracket; and at the beginning of a sentence its first letter may be a capital. A phrase that must not appear is
forbidden in each of these forms. One that must appear is demanded in one: as it stands after a space, or, where its
script or its first character has no space before it, directly after what is before it.

A model may still spell a forbidden phrase in a way that no tokenizer would, such as letter by letter. So translations
are looked through, and where one has the phrase as words of its own, that spelling is forbidden too and the search
repeated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from headway_server.engine.alignment import target_spans
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer

MAX_REQUIRED: Final = 16
MAX_FORBIDDEN: Final = 64

Tokens: TypeAlias = tuple[int, ...]

_SPACELESS_SCRIPTS = ("CJK", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "FULLWIDTH", "THAI", "LAO", "KHMER", "MYANMAR")
"""Beginnings of the Unicode names of characters that are written without spaces between words."""
_ANCHORS = ("a", "(", "1", ".")
"""What a phrase is written after, to see which tokens it then has; the first that does not merge with it decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhraseRequest:
    """Phrases as a call gives them."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPhrases:
    """Phrases as the model writes them."""

    asked: PhraseRequest = PhraseRequest()
    """What they were made of."""
    required: tuple[Tokens, ...] = ()
    """Each of them once."""
    forbidden_forms: tuple[tuple[Tokens, ...], ...] = ()
    """The forms of each."""

    @property
    def forbidden(self) -> tuple[Tokens, ...]:
        """All forms, each of them once."""
        return tuple(dict.fromkeys(form for forms in self.forbidden_forms for form in forms))


class PhraseEncoder:
    """Encodes phrases and beginnings for one model."""

    def __init__(self, tokenizer: TextTokenizer, *, unknown_id: int | None, owner: str) -> None:
        """Encodes with the tokenizer of the model `owner`, in which `unknown_id` stands for what it cannot write."""
        self._tokenizer = tokenizer
        self._unknown_id = unknown_id
        self._owner = owner

    def encode_prefix(self, field: str, prefix: str, max_tokens: int) -> Tokens:
        """Makes tokens of what a translation begins with; white space at its end is left to the model.

        Tokens bring the space before a word with them, so that a space of its own at the end would make the next word
        one that the model has never seen.

        Args:
            field: What the request calls it.
            prefix: The beginning; an empty one has no tokens.
            max_tokens: Most tokens of the translation.

        Raises:
            InvalidInputError: It has unknown tokens, or leaves no room for a token of the model's.
        """
        token_ids = self._encode(prefix.rstrip())
        self._check_known(field, token_ids)
        if len(token_ids) >= max_tokens:
            raise InvalidInputError(
                field,
                f"has {len(token_ids)} tokens; must have at most {max_tokens - 1}, one less than the translation may "
                "have; shorten it, or allow more with max_new_token_count",
            )
        return token_ids

    def encode_phrases(self, field: str, phrases: PhraseRequest) -> EncodedPhrases:
        """Makes tokens of the phrases of one text, which the request calls `field`.

        Raises:
            InvalidInputError: There are too many, one is empty or unknown, or one that must appear must not.
        """
        _check_count(f"{field}.required", len(phrases.required), MAX_REQUIRED)
        _check_count(f"{field}.forbidden", len(phrases.forbidden), MAX_FORBIDDEN)
        required = [self._required(f"{field}.required[{i}]", text) for i, text in enumerate(phrases.required)]
        forbidden = [self._forbidden(f"{field}.forbidden[{i}]", text) for i, text in enumerate(phrases.forbidden)]
        self._check_possible(field, phrases, required, forbidden)
        return EncodedPhrases(asked=phrases, required=tuple(dict.fromkeys(required)), forbidden_forms=tuple(forbidden))

    def spellings(self, phrases: EncodedPhrases, text: str, token_ids: Sequence[int]) -> tuple[Tokens, ...]:
        """Finds with which tokens a translation says what it must not.

        Args:
            phrases: What it must not say.
            text: The translation.
            token_ids: Its tokens.

        Returns:
            The tokens of every forbidden phrase that is among its words; none for a good translation.
        """
        places = [match.span() for pattern in _patterns(phrases.asked.forbidden) for match in pattern.finditer(text)]
        if not places:
            return ()
        spans = target_spans(text, token_ids, self._tokenizer)
        found = [
            tuple(token for token, (start, end) in zip(token_ids, spans, strict=True) if start < stop and end > begin)
            for begin, stop in places
        ]
        return tuple(tokens for tokens in dict.fromkeys(found) if tokens)

    def __repr__(self) -> str:
        return f"PhraseEncoder({self._owner})"

    def _required(self, field: str, phrase: str) -> Tokens:
        text = _stripped(field, phrase)
        token_ids = self._after(text, with_space=_follows_space(text)) or self._encode(text)
        self._check_known(field, token_ids)
        return token_ids

    def _forbidden(self, field: str, phrase: str) -> tuple[Tokens, ...]:
        text = _stripped(field, phrase)
        self._check_known(field, self._encode(text))
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
        """Returns the tokens of a phrase within a text; none where they cannot be told from what is before them."""
        for anchor in _ANCHORS:
            before = self._encode(anchor)
            whole = self._encode(f"{anchor} {phrase}" if with_space else anchor + phrase)
            if len(whole) > len(before) and whole[: len(before)] == before:
                return whole[len(before) :]
        return ()

    def _check_known(self, field: str, token_ids: Tokens) -> None:
        if self._unknown_id is not None and self._unknown_id in token_ids:
            raise InvalidInputError(
                field, f"has characters or words that {self._owner} does not know, so it cannot be decoded; reword it"
            )

    def _check_possible(
        self, field: str, phrases: PhraseRequest, required: Sequence[Tokens], forbidden: Sequence[Sequence[Tokens]]
    ) -> None:
        for index, tokens in enumerate(required):
            for other, forms in enumerate(forbidden):
                same = phrases.required[index].strip() == phrases.forbidden[other].strip()
                if same or any(contains(tokens, form) for form in forms):
                    reason = "is the same" if same else "is a part of it"
                    raise InvalidInputError(
                        f"{field}.required[{index}]",
                        f"cannot appear, since {field}.forbidden[{other}] {reason}; leave out one of them",
                    )


def _letter_cases(phrase: str) -> tuple[str, ...]:
    """Returns a phrase as it is, and as it begins a sentence."""
    return tuple(dict.fromkeys((phrase, phrase[0].upper() + phrase[1:])))


@lru_cache(maxsize=1024)
def _patterns(phrases: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Returns what finds phrases as words of their own: not as parts of longer ones."""
    return tuple(
        re.compile(
            (r"(?<!\w)" if text[0].isalnum() and not _is_spaceless(text[0]) else "")
            + "(?:"
            + "|".join(map(re.escape, _letter_cases(text)))
            + ")"
            + (r"(?!\w)" if text[-1].isalnum() and not _is_spaceless(text[-1]) else "")
        )
        for text in (phrase.strip() for phrase in phrases)
    )


def contains(tokens: Sequence[int], part: Sequence[int]) -> bool:
    """Returns whether tokens have `part` among them, one after the other."""
    return any(tuple(tokens[i : i + len(part)]) == tuple(part) for i in range(len(tokens) - len(part) + 1))


def _stripped(field: str, phrase: str) -> str:
    text = phrase.strip()
    if not text:
        raise InvalidInputError(field, "is empty; give at least one character that is not white space")
    return text


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInputError(field, f"has {count} elements; at most {limit}")


def _follows_space(text: str) -> bool:
    """Returns whether a text is written with a space before it: not if it begins with a mark that closes something."""
    first = text[0]
    if _is_spaceless(first):
        return False
    return unicodedata.category(first) not in {"Pe", "Pf", "Po"} or first in "&@#%*¿¡\"'/\\"


def _is_spaceless(character: str) -> bool:
    """Returns whether a character is of a script that puts no spaces between words."""
    return unicodedata.name(character, "").startswith(_SPACELESS_SCRIPTS)
