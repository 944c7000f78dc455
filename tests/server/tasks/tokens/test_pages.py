"""Words with boxes: what is refused, how boxes are scaled, and whose box and tags a word's tokens have."""

import math
from random import Random

import numpy as np
import pytest

from headway_server.bundles import Tagging, WordBoxes
from headway_server.errors import InvalidInputError
from headway_server.tasks.tokens.pages import Page, PageInputs, token_boxes
from headway_server.tasks.tokens.spans import SpanDecoder

THOUSANDTHS = WordBoxes(unit="thousandths", before=(0, 0, 0, 0), after=(1000, 1000, 1000, 1000))
FRACTIONS = THOUSANDTHS.model_copy(update={"unit": "fractions"})
LABELS = ("O", "B-x", "I-x", "B-y", "I-y")


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (Page(words=["a", "b"], boxes=[1, 2, 3, 4]), r"p.boxes: has 4 numbers for 2 words; give four for each: x_min"),
        (Page(words=["a"], boxes=[0, 0, 1, 1], width=2), r"p.height: is 0; give width and height above 0, or neither"),
        (Page(words=["a"], boxes=[0, 0, 1, 1], width=-2, height=2), r"p.width: is -2; give width and height above 0"),
        (Page(words=["a"], boxes=[0, 0, 1, 1], width=math.inf, height=2), r"p.width: is inf; give width and height"),
        (
            Page(words=["a", "b"], boxes=[0, 0, 1, 1, 0, 0, 1, 9], width=9, height=8),
            r"p.boxes\[7\]: is 9, y_max of word 1; must be from 0 to 8, the page's height",
        ),
        (
            Page(words=["a"], boxes=[0, 0, 1001, 1]),
            r"p.boxes\[2\]: is 1001, x_max of word 0; must be from 0 to 1000",
        ),
        (Page(words=["a"], boxes=[0, -1, 1, 1]), r"p.boxes\[1\]: is -1, y_min of word 0; must be from 0"),
        (Page(words=["a"], boxes=[0, math.nan, 1, 1]), r"p.boxes\[1\]: is nan, y_min of word 0; must be from 0"),
        (
            Page(words=["a"], boxes=[0, 0, 0.5, 1]),
            r"p.boxes\[2\]: is 0.5, x_max of word 0; thousandths of the",
        ),
        (
            Page(words=["a"], boxes=[3, 0, 2, 1]),
            r"p.boxes\[2\]: is 2, x_max of word 0; must be at least x_min, 3",
        ),
    ],
)
def test_boxes_that_are_none_are_refused_by_name(page, says):
    with pytest.raises(InvalidInputError, match=says):
        page.sides("p")


def test_boxes_are_scaled_as_layoutlm_documents_it():
    draw = Random(0)
    for width, height in ((612, 792), (1654.3, 2339.7), (1, 1), (1000, 1000)):
        corners = [(draw.uniform(0, width), draw.uniform(0, height)) for _ in range(400)]
        pairs = zip(corners[::2], corners[1::2], strict=True)
        sides = [side for pair in pairs for choose in (min, max) for side in map(choose, *pair)]
        sides[:4] = 0, 0, width, height
        page = Page(words=[""] * 200, boxes=sides, width=width, height=height)
        sizes = (width, height) * 400
        expected = [int(1000 * (side / size)) for side, size in zip(sides, sizes, strict=True)]
        found = page.scaled(page.sides("p"), THOUSANDTHS)
        assert (found.dtype, found.ravel().tolist()) == (np.int64, expected)
        fractions = page.scaled(page.sides("p"), FRACTIONS)
        np.testing.assert_array_equal(fractions.ravel(), np.float32([a / b for a, b in zip(sides, sizes, strict=True)]))
    whole = Page(words=[""] * 250, boxes=[*range(1000)])
    assert whole.scaled(whole.sides("p"), THOUSANDTHS).ravel().tolist() == [*range(1000)]


@pytest.mark.parametrize("unit", [THOUSANDTHS, FRACTIONS])
def test_a_token_has_the_box_of_its_word_and_a_special_one_its_own(unit):
    boxes = Page(words=["a", "b"], boxes=[*range(1, 9)]).scaled(np.arange(1.0, 9).reshape(2, 4), unit)
    found = token_boxes(boxes, [None, 0, 0, 1, None], unit)
    scale = 1 if unit is THOUSANDTHS else np.float32(1000)
    expected = [[0] * 4, [1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8], [1000] * 4]
    np.testing.assert_array_equal(found, np.array(expected, found.dtype) / scale)


@pytest.mark.parametrize("aggregation", ["first", "average", "max", "sequence"])
def test_spans_are_of_whole_words(aggregation):
    generator = np.random.default_rng(3)
    decoder = SpanDecoder.of(LABELS, Tagging(scheme="iob2", aggregation=aggregation))
    for _ in range(50):
        lengths = generator.integers(1, 4, 8)
        word_ids = [None, *np.repeat(np.arange(8), lengths).tolist(), None]
        logits = generator.normal(size=(len(word_ids), len(LABELS)), scale=3).astype(np.float32)
        found = decoder.decode_words(logits, word_ids)
        borders = [position for span in found for position in (span.start, span.end)]
        assert borders == sorted(borders)
        assert all(0 <= span.start < span.end <= 8 for span in found)
        if aggregation == "first":
            firsts = [word_ids.index(word) for word in range(8)]
            tags = [LABELS[logits[token].argmax()] for token in firsts]
            before = ["O", *tags]
            starts = [
                word for word, tag in enumerate(tags) if tag[0] == "B" or (tag != "O" and tag[1:] != before[word][1:])
            ]
            assert [span.start for span in found] == starts
    assert decoder.decode_words(np.zeros((2, 5), np.float32), [None, None]) == []


def test_the_bytes_of_pages_are_counted():
    one = PageInputs.of([Page(words=["ab"] * 10, boxes=[0] * 40)])
    many = PageInputs.of([Page(words=["ab"] * 1000, boxes=[0] * 4000)])
    assert many.num_bytes > 100 * (8 + 3) * 9
    assert many.num_bytes > 90 * one.num_bytes
    assert many.num_token_bytes(512, with_offsets=True) >= 512 * 32
