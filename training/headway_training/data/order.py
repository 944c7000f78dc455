"""A task made by a program, to see what positions are for: which of two words comes first in a text.

Words are drawn at random, "cat" and "dog" once each among them. Attention by itself does not know where a token stands:
to a model without positions a text is a bag of words. So of two texts that differ in their order alone it answers one
wrongly, and of such pairs the test part is made: it is right in exactly half of it, however long it is trained.

Neither word is the first of a text: that one has no space before it, so it is another token, which tells where it is.
"""

from __future__ import annotations

import numpy as np

from headway_training.data.examples import LabeledTexts, Splits

LABELS = ("cat first", "dog first")
_OTHERS = (
    *("a", "the", "one", "old", "red", "big", "by", "near", "under", "and"),
    *("or", "not", "house", "tree", "river", "stone", "street", "garden", "bridge"),
)
_LONGEST, _SHORTEST = 12, 4
_PAIRS = {"train": 8000, "valid": 250, "test": 500}
_SEED = 20


def make_order_texts() -> Splits[LabeledTexts]:
    """Makes the parts, always the same ones: texts of 4 to 12 words, each followed by the one with both swapped."""
    random = np.random.default_rng(_SEED)
    parts = {name: _make_pairs(random, count) for name, count in _PAIRS.items()}
    return Splits(
        **parts,
        train_name=f"which comes first, {2 * _PAIRS['train']:,} texts made by a program",
        test_name=f"which comes first, {2 * _PAIRS['test']:,} other texts",
        license="Apache-2.0",
        home="headway_training.data.order, which makes it",
        labels=LABELS,
    )


def _make_pairs(random: np.random.Generator, count: int) -> LabeledTexts:
    texts: list[str] = []
    for _ in range(count):
        words = random.choice(_OTHERS, random.integers(_SHORTEST, _LONGEST + 1)).tolist()
        first, second = sorted(random.choice(np.arange(1, len(words)), 2, replace=False))
        for words[first], words[second] in (("cat", "dog"), ("dog", "cat")):
            texts.append(" ".join(words))
    return LabeledTexts(texts=texts, labels=[0, 1] * count)
