"""Tokenizers: what is encoded comes back, and the special tokens are where each task needs them."""

import pytest
from tokenizers import Tokenizer

from headway_training.errors import DataError
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import encode_texts, special_tokens, train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Ein Fuchs,\n\nzwei Füchse: größer!\t",
    "naïve café — 東京 🦊",
]
SETTINGS = TokenizerSettings(vocabulary_size=300)


def test_bytes_spell_any_text_even_what_training_never_saw():
    tokenizer = train_tokenizer(TEXTS[:1], SETTINGS, "generation")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_characters_come_back_and_unknown_ones_are_marked():
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(kind="characters"), "generation")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert len(tokenizer.encode(text).ids) == len(text)
    assert tokenizer.encode("Ж").ids == [tokenizer.token_to_id("<unk>")]


def test_a_running_text_has_no_special_tokens():
    tokenizer = train_tokenizer(TEXTS, SETTINGS, "generation")
    assert special_tokens(tokenizer).model_dump() == {"pad": None, "bos": None, "eos": None, "unk": None}
    assert tokenizer.encode("ab").ids == tokenizer.encode("ab", add_special_tokens=False).ids


def test_a_source_ends_with_eos_and_a_classifiers_text_is_framed():
    for task, framed in (("translation", (False, True)), ("text_classification", (True, True))):
        tokenizer = train_tokenizer(TEXTS, SETTINGS, task)
        special = special_tokens(tokenizer)
        plain = tokenizer.encode("a fox", add_special_tokens=False).ids
        expected = [*([special.bos] if framed[0] else []), *plain, special.eos]
        assert tokenizer.encode("a fox").ids == expected
        assert None not in special.model_dump().values()


def test_a_long_text_is_cut_at_its_end_and_keeps_its_frame():
    tokenizer = train_tokenizer(TEXTS, SETTINGS, "text_classification")
    special = special_tokens(tokenizer)
    (whole,) = encode_texts(tokenizer, [TEXTS[0]], None)
    (cut,) = encode_texts(tokenizer, [TEXTS[0]], 6)
    assert cut == [special.bos, *whole[1:5], special.eos]
    assert tokenizer.truncation is None
    (unframed,) = encode_texts(tokenizer, [TEXTS[0]], 6, frame=False)
    assert unframed == whole[1:7]


def test_lower_case_is_part_of_the_tokenizer():
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(vocabulary_size=300, lowercase=True), "text_classification")
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.encode("The FOX ﬁne").ids == tokenizer.encode("the fox fine").ids


def test_training_is_repeatable():
    one, other = (train_tokenizer(TEXTS, SETTINGS, "translation").to_str() for _ in range(2))
    assert one == other


def test_no_text_is_an_error():
    with pytest.raises(DataError, match="the training text is empty"):
        train_tokenizer([], TokenizerSettings(kind="characters"), "translation")
