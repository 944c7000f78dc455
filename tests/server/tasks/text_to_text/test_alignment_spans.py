"""Characters of tokens, for every kind of tokenizer: what a token is said to stand for is what it reads as."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import byte_tokenizer
from tiny_tokenizers import metaspace_tokenizer, word_piece_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headway_server.preprocessing import TextTokenizer
from headway_server.tasks.text_to_text.alignment import _spans_by_decoding, _tidy, align, source_spans, target_spans

BYTES, META, PIECES = TextTokenizer(byte_tokenizer()), metaspace_tokenizer(), word_piece_tokenizer()


def words(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    text = tokenizer.decode(token_ids)
    return [text[start:end] for start, end in target_spans(text, token_ids, tokenizer)]


def ids(tokenizer: TextTokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.library_tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_a_byte_level_token_has_its_word_without_the_space_it_brings() -> None:
    assert words(BYTES, BYTES.encode_now("the cat sat").input_ids.tolist()) == ["the", "cat", "sat"]


def test_parts_of_a_character_have_the_whole_of_it() -> None:
    text = "a€é😀"
    token_ids = BYTES.encode_now(text).input_ids.tolist()
    assert words(BYTES, token_ids) == ["a", *"€" * 3, *"é" * 2, *"😀" * 4]


def test_a_space_and_a_part_of_a_character_in_one_token_have_the_whole_character() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "Ġâ"])}
    tokenizer = TextTokenizer(Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "â")])))
    tokenizer.library_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.library_tokenizer.decoder = decoders.ByteLevel()
    text = "a €é"
    token_ids = ids(tokenizer, "a", "Ġâ", "Ĥ", "¬", "Ã", "©")
    assert words(tokenizer, token_ids) == ["a", "€", "€", "€", "é", "é"]
    assert _tidy(_spans_by_decoding(text, token_ids, tokenizer), text) == target_spans(text, token_ids, tokenizer)


def test_an_unusual_spelling_has_its_characters_too() -> None:
    assert words(BYTES, ids(BYTES, "t", "h", "e", "Ġ", "Ã", "©")) == ["t", "h", "e", " ", "é", "é"]


def test_a_character_that_is_never_finished_has_no_characters() -> None:
    token_ids = ids(BYTES, "t", "Ã")
    assert target_spans("t", token_ids, BYTES) == [(0, 1), (1, 1)]


def test_tokens_with_a_mark_for_the_space_before_them() -> None:
    assert words(META, ids(META, "▁the", "▁cat", "s", "▁caf", "é", ".")) == ["the", "cat", "s", "caf", "é", "."]
    assert words(META, ids(META, "▁the", "▁", "c", "at")) == ["the", " ", "c", "at"]
    assert words(META, ids(META, "▁the", "<0xE2>", "<0x82>", "<0xAC>", "s")) == ["the", "€", "€", "€", "s"]


def test_word_pieces_and_the_marks_that_are_joined_to_them() -> None:
    assert words(PIECES, ids(PIECES, "the", "ca", "##t", "##s", ".")) == ["the", "ca", "t", "s", "."]
    assert words(PIECES, ids(PIECES, "the", "cat", "[PAD]", ".")) == ["the", "cat", "", "."]
    joined = words(PIECES, ids(PIECES, "don", "'", "t"))
    assert joined[0] == "don"
    assert set("".join(joined[1:])) == {"'", "t"}


@pytest.mark.parametrize("tokenizer", [BYTES, META, PIECES], ids=["byte level", "metaspace", "word pieces"])
@given(data=st.data())
def test_spans_are_parts_of_the_text_in_order_and_leave_out_white_space_alone(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.largest_id), max_size=12))
    text = tokenizer.decode(token_ids)
    spans = target_spans(text, token_ids, tokenizer)
    assert len(spans) == len(token_ids)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    with_text = [span for span in spans if span[0] < span[1]]
    assert with_text == sorted(with_text)
    covered = {place for start, end in spans for place in range(start, end)}
    assert all(text[place].isspace() for place in set(range(len(text))) - covered)


@given(text=st.text(alphabet="the catsé€😀 .", max_size=30))
def test_the_usual_spelling_and_the_growing_text_agree_where_both_can_tell(text: str) -> None:
    token_ids = BYTES.encode_now(text).input_ids.tolist()
    assert _tidy(_spans_by_decoding(text, token_ids, BYTES), text) == target_spans(text, token_ids, BYTES)


def test_both_sides_get_their_characters_and_may_be_moved() -> None:
    source_text, target_text = "the  cat", "cat the"
    source = BYTES.encode_now(source_text, with_offsets=True)
    target_ids = BYTES.encode_now(target_text).input_ids.tolist()
    attention = np.full((len(target_ids), len(source)), 1 / len(source), np.float32)
    aligned = align(
        source_spans=source_spans(source_text, source),
        target_text=target_text,
        target_ids=target_ids,
        attention=attention,
        tokenizer=BYTES,
    )
    assert {source_text[start:end] for start, end in aligned.source_spans if source_text[start:end].strip()} == {
        "the",
        "cat",
    }
    moved = aligned.shifted(source=10, target=20)
    assert moved.target_spans[0][0] == aligned.target_spans[0][0] + 20
    assert moved.source_spans[0] == (10, 13)
    assert moved.attention is attention
