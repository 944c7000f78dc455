"""Tokenizers: encoded text comes back, special tokens are where each task needs them, subwords are split at random."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headway_training.data import OwnData, Span, read_splits
from headway_training.data.files import cut_before_spaces
from headway_training.errors import RecipeError
from headway_training.recipes import TokenizerSettings, read_recipe
from headway_training.tagging import IGNORED, TagScheme, find_subwords, split_tags, subword_tags
from headway_training.tasks import make_task
from headway_training.tokenizers import SubwordSplitter, encode_texts, special_tokens, train_tokenizer

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
    (whole,) = encode_texts(tokenizer, [TEXTS[0]], 1000)
    (cut,) = encode_texts(tokenizer, [TEXTS[0]], 6)
    assert cut == [special.bos, *whole[1:5], special.eos]
    assert tokenizer.truncation is None
    (unframed,) = encode_texts(tokenizer, [TEXTS[0]], 6, special=False)
    assert unframed == whole[1:7]


def test_lower_case_is_part_of_the_tokenizer():
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(vocabulary_size=300, lowercase=True), "text_classification")
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.encode("The FOX ﬁne").ids == tokenizer.encode("the fox fine").ids


def test_training_is_repeatable():
    one, other = (train_tokenizer(TEXTS, SETTINGS, "translation").to_str() for _ in range(2))
    assert one == other


def test_parts_of_a_text_have_the_tokens_of_the_whole():
    text = "The king's  naïve\n\nqueen — doth\n speak, 12th night O! " * 30
    tokenizer = train_tokenizer([text], TokenizerSettings(vocabulary_size=320), "generation")
    parts = list(cut_before_spaces([text], 60))
    assert len(parts) > 10
    assert [token for part in parts for token in tokenizer.encode(part).ids] == tokenizer.encode(text).ids


VERSE = "the king and the queen speak of the night and the naïve moon " * 4


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_split_subwords_spell_the_same_text(rate):
    tokenizer = train_tokenizer([VERSE], TokenizerSettings(vocabulary_size=320), "generation")
    ids = tokenizer.encode(VERSE).ids
    split, origins = SubwordSplitter(tokenizer).split(ids, rate, np.random.default_rng(0))
    assert tokenizer.decode(split.tolist()) == VERSE
    assert (split.tolist() == ids) == (rate == 0)
    assert len(split) == len(VERSE.encode()) if rate == 1 else len(split) < len(VERSE.encode())
    for place, index in enumerate(ids):
        parts = tokenizer.decode(split[origins == place].tolist())
        assert parts == tokenizer.decode([index])


def test_sentences_to_translate_are_split_by_the_steps_generator(tmp_path, pairs, tiny_settings):
    recipe = read_recipe("multi30k-en-de", [*tiny_settings["multi30k-en-de"], "augmentation.subword_splitting=0.2"])
    task = make_task(recipe, read_splits(recipe, tmp_path, OwnData(train=str(pairs), valid=str(pairs))), tmp_path)
    batch = task.epoch_batches(0, 0)[0]
    one, same, other = (task.collate(batch, torch.Generator().manual_seed(seed)).tensors for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert one["source_ids"].shape != other["source_ids"].shape or not torch.equal(
        one["source_ids"], other["source_ids"]
    )
    assert max(one["source_ids"].shape[1], one["target_ids"].shape[1]) <= 16


def test_half_of_the_rows_of_running_text_are_split_and_stay_as_long(tmp_path, verses, tiny_settings):
    settings = [*tiny_settings["tiny-shakespeare"], "optimization.batch_size=6"]
    own = OwnData(train=str(verses), valid=str(verses))
    plain, split = (
        make_task(recipe, read_splits(recipe, tmp_path, own), tmp_path)
        for recipe in (
            read_recipe("tiny-shakespeare", [*settings, "augmentation.subword_splitting=0"]),
            read_recipe("tiny-shakespeare", [*settings, "augmentation.subword_splitting=0.5"]),
        )
    )
    batch = plain.epoch_batches(0, 0)[0]
    expected = plain.collate(batch, torch.Generator().manual_seed(1)).tensors
    one, same, other = (split.collate(batch, torch.Generator().manual_seed(seed)).tensors for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert torch.equal(one["input_ids"][:, 1:], one["targets"][:, :-1])
    assert torch.equal(one["targets"][3:], expected["targets"][3:])
    for row, other_row, whole in zip(one["input_ids"][:3], other["input_ids"], expected["input_ids"], strict=False):
        assert not torch.equal(row, other_row)
        text = plain.tokenizer.decode(row.tolist())
        assert plain.tokenizer.decode(whole.tolist()).startswith(text)


WORDS = ["the running dogs weren't running, naïve  dogs ran", "running dogs and the runner's dog 🙂"] * 4
SCHEME = TagScheme(("word",), covering=True)


@pytest.fixture(scope="module")
def treebank_tokenizer() -> Tokenizer:
    return train_tokenizer(WORDS, TokenizerSettings(vocabulary_size=330, treebank_words=True), "token_classification")


def encoded(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and tags, every run of characters without white space a word."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    spans, start = [], 0
    for word in text.split():
        start = text.index(word, start)
        spans.append(Span(start, start + len(word), 0))
        start += len(word)
    tags = np.full(len(encoding.ids), IGNORED)
    subwords = find_subwords(text, encoding.offsets)
    tags[[subword.token for subword in subwords]] = subword_tags(subwords, spans, SCHEME)
    return np.array(encoding.ids), tags


def split_both(tokenizer: Tokenizer, text: str, rate: float, random: np.random.Generator):
    """Ids and tags of split subwords."""
    splitter = SubwordSplitter(tokenizer)
    ids, tags = encoded(tokenizer, text)
    parts, origins = splitter.split(ids, rate, random)
    return parts, split_tags(tags, origins, splitter.is_blank[parts], SCHEME)


def test_split_subwords_begin_as_many_spans(treebank_tokenizer):
    random = np.random.default_rng(0)
    lengths = set()
    for _ in range(50):
        for text in WORDS[:2]:
            ids, tags = encoded(treebank_tokenizer, text)
            parts, part_tags = split_both(treebank_tokenizer, text, 0.4, random)
            assert treebank_tokenizer.decode(parts.tolist()) == text
            assert (part_tags == SCHEME.begin(0)).sum() == (tags == SCHEME.begin(0)).sum()
            assert len(parts) == len(part_tags) >= len(ids)
            lengths.add(len(parts))
    assert len(lengths) > 5


def test_splitting_everything_leaves_bytes_with_the_tags_of_the_bytes(treebank_tokenizer):
    text = WORDS[0]
    parts, tags = split_both(treebank_tokenizer, text, 1.0, np.random.default_rng(0))
    assert len(parts) == len(text.encode())
    blank = [byte in b" " for byte in text.encode()]
    assert [tag == IGNORED for tag in tags] == blank
    begins = [tag == SCHEME.begin(0) for tag in tags]
    assert begins == [not blank[i] and (i == 0 or blank[i - 1]) for i in range(len(blank))]


def test_a_tokenizer_without_merges_is_refused():
    from tokenizers.models import WordLevel

    with pytest.raises(RecipeError, match="a WordLevel tokenizer has none"):
        SubwordSplitter(Tokenizer(WordLevel({"a": 0}, unk_token="a")))
