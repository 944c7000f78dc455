"""The vectors of a caller's labels: one a label, computed once, bounded in bytes."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError
from headway_server.tasks.text.labels import LabelVectors, SetVectors


class Embedder:
    """Vectors that tell by their first number how long a text is; counts what it is asked for."""

    def __init__(self) -> None:
        self.num_texts = 0
        self.fields: list[str] = []

    async def __call__(self, texts: Sequence[str], fields: Sequence[str]) -> SetVectors:
        self.num_texts += len(texts)
        self.fields += fields
        vectors = np.array([[len(text), 1.0] for text in texts], np.float32)
        unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return SetVectors(unit, 0, len(texts))


async def of(kept: LabelVectors, embedder: Embedder, labels: list[str], templates: Sequence[str] = ()) -> np.ndarray:
    return await kept.of(labels, templates, max_text_bytes=1000, embed=embedder)


async def test_a_label_has_the_mean_direction_of_its_templates() -> None:
    embedder = Embedder()
    vectors = await of(LabelVectors(), embedder, ["ab", "abcd"], ["{}", "{} {{"])
    assert embedder.fields == ["candidate_labels[0]"] * 2 + ["candidate_labels[1]"] * 2
    parts = np.array([[2.0, 1.0], [5.0, 1.0]])
    mean = (parts / np.linalg.norm(parts, axis=1, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(vectors[0], mean / np.linalg.norm(mean), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)


async def test_a_set_that_comes_again_is_not_computed_again() -> None:
    kept, embedder = LabelVectors(), Embedder()
    first = await of(kept, embedder, ["a", "bc"])
    again = await of(kept, embedder, ["a", "bc"])
    assert again is first
    assert (embedder.num_texts, *kept.usage()) == (2, "label_vectors", 16, 1, 1)
    for other in (["ab", "c"], ["bc", "a"], ["a"]):
        await of(kept, embedder, other)
    await of(kept, embedder, ["a", "bc"], ["{}!"])
    assert kept.usage()[2:] == (1, 5), "other words, another order, other templates are other sets"


async def test_the_set_used_longest_ago_is_forgotten_past_the_bound() -> None:
    kept, embedder = LabelVectors(max_bytes=2 * 8), Embedder()  # two vectors of two numbers
    for label in ("a", "bb", "a", "ccc"):
        await of(kept, embedder, [label])
    assert kept.usage()[1:3] == (16, 1)
    await of(kept, embedder, ["a"])
    assert kept.usage().num_hits == 2
    await of(kept, embedder, ["bb"])
    assert kept.usage().num_misses == 4
    await of(kept, embedder, ["a", "bb", "ccc"])
    assert kept.usage().num_bytes == 16, "a set that is past the bound by itself is not kept"


@pytest.mark.parametrize(
    ("labels", "templates", "message"),
    [
        ([], [], "candidate_labels: is empty"),
        (["a", "b", "a"], [], r"candidate_labels\[2\]: repeats candidate_labels\[0\]"),
        (["a", ""], [], r"candidate_labels\[1\]: is empty"),
        (["a"], ["no place"], r"templates\[0\]: has 0 times"),
        (["a"] * 5000, [], "candidate_labels: has 5000 elements, the limit is 4096"),
        ([str(i) for i in range(4000)], ["{}" + str(i) for i in range(5)], "makes 20000 texts of 4000 labels"),
        (["a" * 600], ["{}" + "b" * 600], "makes a text of about 1202 bytes"),
    ],
)
async def test_labels_that_cannot_be_are_refused_before_anything_is_computed(
    labels: list[str], templates: list[str], message: str
) -> None:
    embedder = Embedder()
    with pytest.raises(InvalidInputError, match=message):
        await of(LabelVectors(), embedder, labels, templates)
    assert embedder.num_texts == 0
