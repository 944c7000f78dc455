"""Phrases as each kind of tokenizer writes them within a text."""

import random
import re

import pytest
from tiny_engine import byte_tokenizer
from tiny_tokenizers import metaspace_tokenizer, word_piece_tokenizer

from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer
from headway_server.tasks.text_to_text.phrases import PhraseEncoder, PhraseRequest, contains, find_words

BYTES = TextTokenizer(byte_tokenizer())


def encode(tokenizer, unknown_id=None, **phrases):
    encoder = PhraseEncoder(tokenizer, unknown_id=unknown_id, owner="tiny")
    return encoder.encode_phrases("phrase_constraints[0]", PhraseRequest(**phrases))


def tokens(tokenizer, phrase_tokens):
    return [tokenizer.library_tokenizer.id_to_token(token) for token in phrase_tokens]


def test_a_required_phrase_has_the_form_that_follows_a_space():
    (cat,) = encode(BYTES, required=("cat",)).required
    assert tokens(BYTES, cat) == ["Ġcat"]
    meta = metaspace_tokenizer()
    (cat,) = encode(meta, required=("cat",)).required
    assert tokens(meta, cat) == ["▁cat"]
    pieces = word_piece_tokenizer()
    (cats,) = encode(pieces, required=("cats",)).required
    assert tokens(pieces, cats) == ["cat", "##s"]


@pytest.mark.parametrize(
    ("phrase", "expected"),
    [
        (". The", False),
        (", and", False),
        ("(the", True),
        ("“the", True),
        ("50 %", True),
        ("猫", False),
        ("ねこ", False),
    ],
)
def test_what_begins_with_a_closing_mark_or_without_spaces_has_no_space_before_it(phrase, expected):
    (written,) = encode(BYTES, required=(phrase,)).required
    assert BYTES.decode(written) == (" " if expected else "") + phrase


def test_a_forbidden_phrase_is_forbidden_wherever_and_however_it_begins():
    for tokenizer in (BYTES, metaspace_tokenizer(), word_piece_tokenizer()):
        forms = encode(tokenizer, forbidden=("the cat",)).forbidden
        assert len(forms) == len(set(forms))
        for text in ("the cat", "a the cat", "(the cat)", "The cat", "cat. The cat sat"):
            written = tokenizer.encode_now(text).input_ids.tolist()
            assert any(contains(written, form) for form in forms), (tokenizer, text)
        assert not any(contains(tokenizer.encode_now("the dog").input_ids.tolist(), form) for form in forms)


def test_what_the_model_cannot_write_is_refused():
    pieces = word_piece_tokenizer()
    for phrases, field in (
        ({"required": ("the xyz",)}, "required[0]"),
        ({"forbidden": ("cat", "xyz")}, "forbidden[1]"),
    ):
        with pytest.raises(InvalidInputError, match="does not know") as caught:
            encode(pieces, unknown_id=0, **phrases)
        assert caught.value.field == f"phrase_constraints[0].{field}"
    encoder = PhraseEncoder(pieces, unknown_id=0, owner="tiny")
    with pytest.raises(InvalidInputError, match="does not know"):
        encoder.encode_prefix("target_prefix", "the xyz", 10)


def test_special_tokens_are_refused_since_the_model_never_writes_them():
    library = byte_tokenizer()
    library.add_special_tokens(["<end>"])
    encoder = PhraseEncoder(TextTokenizer(library), unknown_id=None, owner="tiny")
    for phrases in (PhraseRequest(required=("<end>",)), PhraseRequest(forbidden=("cat<end>",))):
        with pytest.raises(InvalidInputError, match="'<end>', a special token of tiny"):
            encoder.encode_phrases("phrase_constraints[0]", phrases)
    with pytest.raises(InvalidInputError, match="special token") as caught:
        encoder.encode_prefix("target_prefix", "the <end> cat", 10)
    assert caught.value.field == "target_prefix"


def test_a_phrase_has_a_greatest_size():
    assert encode(BYTES, required=(" " + "é" * 128 + " ",), forbidden=("c" * 256,)).required
    for phrases, field in (({"required": ("é" * 129,)}, "required[0]"), ({"forbidden": ("c" * 257,)}, "forbidden[0]")):
        with pytest.raises(InvalidInputError, match=r"has 25\d bytes, the limit is 256") as caught:
            encode(BYTES, **phrases)
        assert caught.value.field == f"phrase_constraints[0].{field}"


@pytest.mark.parametrize(("required", "forbidden"), [("a cat", "cat"), ("The cat", "the"), ("cat-like", "cat")])
def test_a_required_phrase_that_says_a_forbidden_one_is_refused(required, forbidden):
    with pytest.raises(InvalidInputError, match="is a part of it"):
        encode(BYTES, required=(required,), forbidden=(forbidden,))


def test_words_are_found_where_a_pattern_of_words_finds_them():
    letters = random.Random(8)
    for _ in range(500):
        text = "".join(letters.choices("aAbé1_ -猫", k=12))
        phrase = "".join(letters.choices("aébA1-猫", k=letters.randint(1, 2)))
        spellings = "|".join(map(re.escape, {phrase, phrase[0].upper() + phrase[1:]}))
        before = r"(?<!\w)" if phrase[0] not in "-猫" else ""
        after = r"(?!\w)" if phrase[-1] not in "-猫" else ""
        expected = {match.span(1) for match in re.finditer(f"(?={before}({spellings}){after})", text)}
        assert set(find_words(text, phrase)) == expected, (text, phrase)


def test_white_space_around_phrases_does_not_matter_and_equal_ones_count_once():
    encoded = encode(BYTES, required=(" cat ", "cat"), forbidden=("dog", " dog"))
    assert len(encoded.required) == 1
    assert encoded.forbidden_forms[0] == encoded.forbidden_forms[1]


def test_a_phrase_is_found_as_words_of_its_own_however_it_is_spelled():
    encoder = PhraseEncoder(BYTES, unknown_id=None, owner="tiny")
    phrases = encode(BYTES, forbidden=("cat", "猫"))
    for text, spelled in (("a cat.", [" cat"]), ("Cat", ["Cat"]), ("concat cats", []), ("黒猫が", ["猫"])):
        token_ids = [token for letter in text for token in BYTES.encode_now(letter).input_ids.tolist()]
        found = encoder.spellings(phrases, text, token_ids)
        assert [BYTES.decode(form) for form in found] == [word.strip() for word in spelled]


@pytest.mark.parametrize(
    ("tokenizer", "prefix"),
    [
        (BYTES, "Thé cat, "),
        (BYTES, "  two spaces"),
        (metaspace_tokenizer(), "the café cats "),
        (word_piece_tokenizer(), "the cats (cat"),
    ],
    ids=["byte level", "leading spaces", "metaspace", "word pieces"],
)
def test_a_beginning_reads_as_it_was_given_less_the_space_at_its_end(tokenizer, prefix):
    encoder = PhraseEncoder(tokenizer, unknown_id=None, owner="tiny")
    token_ids = encoder.encode_prefix("target_prefix", prefix, 64)
    assert tokenizer.decode(token_ids).replace("( ", "(") == prefix.rstrip()
    assert encoder.encode_prefix("target_prefix", " \n", 64) == ()
