"""Tags of a token classifier: what is understood, and what is refused."""

import pytest

from headway_server.bundles.tags import TagSet


def test_labels_come_from_the_tags_in_their_order():
    tags = TagSet.parse(["I-place", "B-person", "O", "B-place", "I-person"])
    assert tags == TagSet(labels=("person", "place"), begin=(1, 3), inside=(4, 0), outside=2)


def test_neither_o_nor_inside_tags_are_needed():
    assert TagSet.parse(["B-x", "B-y"]) == TagSet(labels=("x", "y"), begin=(0, 1), inside=(None, None), outside=None)


def test_a_label_may_have_hyphens():
    assert TagSet.parse(["O", "B-creative-work", "I-creative-work"]).labels == ("creative-work",)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        (["O", "person"], "'person' is no tag; tags are O, and B-x and I-x"),
        (["O", "B-"], "'B-' is no tag"),
        (["O", "B-x", "O"], "the tag 'O' stands there twice"),
        (["O", "B-x", "I-y"], "I-y has no B-y"),
        (["O"], "no tag begins a span"),
    ],
)
def test_what_is_no_set_of_tags_is_refused(tags, message):
    with pytest.raises(ValueError, match=message):
        TagSet.parse(tags)
