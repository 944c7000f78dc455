"""The tags of a token classifier: the meaning of the columns of its logits.

`labels` in the manifest of a token classifier are tags, in the order of the columns: `O` is outside of every span, and
the other tags are those of a scheme (Ramshaw and Marcus 1995, Tjong Kim Sang and Veenstra 1999, Ratinov and Roth 2009).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

TagScheme: TypeAlias = Literal["iob2", "iob1", "io", "bioes", "words"]
"""`iob2`: `B-x` begins a span of label x, `I-x` continues it. `iob1`: `I-x` begins one too, `B-x` only where another of
the same label ends. `io`: `I-x` or `x` is in a span of x, and neighbours are one span. `bioes`: `E-x` ends a span, and
`S-x` is one (BILOU has `L-x` and `U-x`, BMES `M-x` inside). `words`: x labels a word, and each word is a span."""
Aggregation: TypeAlias = Literal["sequence", "simple", "first", "average", "max"]
"""`sequence`: the likeliest tags that the scheme allows, by subword. The others are strategies of `transformers`: the
likeliest tag of each subword, or of each word by its first subword, its mean or its surest subword."""

OF_WORDS: Final[frozenset[Aggregation]] = frozenset({"first", "average", "max"})
"""Aggregations by word."""

Kind: TypeAlias = Literal["B", "I", "E", "S", "O"]
_OUTSIDE = "O"
_KINDS: Final[dict[TagScheme, dict[str, Kind]]] = {
    "iob2": {"B": "B", "I": "I"},
    "iob1": {"B": "B", "I": "I"},
    "io": {"I": "I"},
    "bioes": {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "W": "S"},
    "words": {},
}
"""Kinds of tags by their letter, in each scheme."""


@dataclass(frozen=True, slots=True)
class TagSet:
    """The tags of a model. C tags."""

    labels: tuple[str, ...]
    """Labels of spans, in the order of their first tag; in `iob2`, of their `B-` tag."""
    kinds: tuple[Kind, ...]
    """(C,) begins, is inside of, ends or is a whole span, or is outside."""
    numbers: tuple[int, ...]
    """(C,) index of the label; -1 of `O`."""
    scheme: TagScheme = "iob2"

    @classmethod
    def parse(cls, tags: Sequence[str], scheme: TagScheme = "iob2") -> TagSet:
        """Parses tags.

        Raises:
            ValueError: A tag is not of the scheme or is repeated, no tag is in a span, or an `I-` tag of `iob2` has no
                `B-` tag.
        """
        if len(set(tags)) < len(tags):
            repeated = next(tag for column, tag in enumerate(tags) if tag in tags[:column])
            raise ValueError(f"the tag {repeated!r} stands there twice")
        read = [_read(tag, scheme) for tag in tags]
        first = [label for kind, label in read if kind == "B" or (scheme != "iob2" and kind != "O")]
        labels = tuple(dict.fromkeys(first))
        if without := [label for kind, label in read if kind != "O" and label not in labels]:
            raise ValueError(f"I-{without[0]} has no B-{without[0]}")
        if not labels:
            raise ValueError("no tag begins a span")
        numbers = {label: number for number, label in enumerate(labels)}
        return cls(
            labels=labels,
            kinds=tuple(kind for kind, _ in read),
            numbers=tuple(-1 if kind == "O" else numbers[label] for kind, label in read),
            scheme=scheme,
        )


def find_scheme(tags: Sequence[str]) -> TagScheme:
    """Returns the scheme that names of tags speak for.

    `B-` and `I-` tags are `iob2`, or `iob1` if a label has no `B-`; labels alone are `io` beside an `O`, and else
    `words`.
    """
    prefixed = [re.fullmatch(r"([A-Z])-(.+)", tag) for tag in tags if tag != _OUTSIDE]
    letters = {found[1] for found in prefixed if found is not None}
    if None in prefixed or not letters or not letters <= _KINDS["bioes"].keys():
        return "io" if _OUTSIDE in tags else "words"
    if letters == {"I"}:
        return "io"
    if not letters <= {"B", "I"}:
        return "bioes"
    begun = {found[2] for found in prefixed if found is not None and found[1] == "B"}
    return "iob2" if begun == {found[2] for found in prefixed if found is not None} else "iob1"


def _read(tag: str, scheme: TagScheme) -> tuple[Kind, str]:
    """Returns the kind and the label of a tag.

    Raises:
        ValueError: It is not of the scheme.
    """
    if tag == _OUTSIDE:
        return "O", ""
    if scheme == "words":
        return "S", tag
    letters = _KINDS[scheme]
    if tag[1:2] == "-" and len(tag) > 2 and tag[0] in letters:
        return letters[tag[0]], tag[2:]
    if scheme == "io" and tag and tag != "I-":
        return "I", tag
    written = " and ".join(f"{letter}-x" for letter in letters)
    raise ValueError(f"{tag!r} is no tag; tags are O, and {written} for each label x ({scheme})")
