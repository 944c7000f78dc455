"""Tags of a token classifier: what is understood, and what is refused."""

import pytest

from headway_server.bundles import Tagging
from headway_server.bundles.tags import TagSet, find_scheme


def test_labels_come_from_the_tags_in_their_order():
    tags = TagSet.parse(["I-place", "B-person", "O", "B-place", "I-person"])
    assert tags == TagSet(labels=("person", "place"), kinds=("I", "B", "O", "B", "I"), numbers=(1, 0, -1, 1, 0))


def test_neither_o_nor_inside_tags_are_needed():
    assert TagSet.parse(["B-x", "B-y"]) == TagSet(labels=("x", "y"), kinds=("B", "B"), numbers=(0, 1))


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


@pytest.mark.parametrize(
    ("tags", "scheme", "labels", "kinds"),
    [
        ("O B-x I-x", "iob2", "x", "OBI"),
        ("O I-x B-x I-y", "iob1", "x y", "OIBI"),
        ("O I-x I-y", "io", "x y", "OII"),
        ("O x y", "io", "x y", "OII"),
        ("O B-x I-x E-x S-x", "bioes", "x", "OBIES"),
        ("U-x L-x I-x B-x O", "bioes", "x", "SEIBO"),
        ("B-x M-x E-x S-x", "bioes", "x", "BIES"),
        ("NOUN VERB B-side", "words", "NOUN VERB B-side", "SSS"),
        ("X-y O", "io", "X-y", "IO"),
    ],
)
def test_names_speak_for_a_scheme(tags, scheme, labels, kinds):
    names = tags.split()
    assert find_scheme(names) == scheme
    found = TagSet.parse(names, scheme)
    assert (found.labels, "".join(found.kinds)) == (tuple(labels.split()), kinds)


def test_words_need_an_aggregation_by_word():
    with pytest.raises(ValueError, match="the scheme words needs one of average, first, max"):
        Tagging(scheme="words")
