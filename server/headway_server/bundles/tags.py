"""The tags of a token classifier: the meaning of the columns of its logits.

`labels` in the manifest of a token classifier are tags of the IOB2 scheme (Tjong Kim Sang and Veenstra 1999), in the
order of the columns: `B-x` begins a span of label x, `I-x` continues it, `O` is outside of every span. A model with
every word in a span has no `O`; a model with only single-word spans may have no `I-x`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class TagSet:
    """The tags of a model, by label."""

    labels: tuple[str, ...]
    """Labels of spans, in the order of their `B-` tags."""
    begin: tuple[int, ...]
    """Column of the `B-` tag of each label."""
    inside: tuple[int | None, ...]
    """Column of the `I-` tag of each label; None without one."""
    outside: int | None
    """Column of `O`; None without one."""

    @classmethod
    def parse(cls, tags: Sequence[str]) -> TagSet:
        """Parses tags.

        Raises:
            ValueError: A tag is not IOB2 or is repeated, or a label has no `B-` tag.
        """
        columns = {tag: column for column, tag in enumerate(tags)}
        if len(columns) < len(tags):
            repeated = next(tag for column, tag in enumerate(tags) if columns[tag] != column)
            raise ValueError(f"the tag {repeated!r} stands there twice")
        for tag in tags:
            if tag != _OUTSIDE and (tag[:2] not in ("B-", "I-") or len(tag) < 3):
                raise ValueError(f"{tag!r} is no tag; tags are O, and B-x and I-x for each label x (IOB2)")
        labels = tuple(tag[2:] for tag in tags if tag.startswith("B-"))
        without = [tag for tag in tags if tag.startswith("I-") and tag[2:] not in labels]
        if without or not labels:
            raise ValueError(f"{without[0]} has no B-{without[0][2:]}" if without else "no tag begins a span")
        return cls(
            labels=labels,
            begin=tuple(columns[f"B-{label}"] for label in labels),
            inside=tuple(columns.get(f"I-{label}") for label in labels),
            outside=columns.get(_OUTSIDE),
        )
