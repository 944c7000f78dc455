"""Pieces of a text fall into what they were merged from, at random and without changing the text."""

import numpy as np
import pytest
import torch

from headway_training.data.sources import OwnData, read_splits
from headway_training.recipes import TokenizerSettings, read_recipe
from headway_training.subwords import PieceSplitter
from headway_training.tasks import make_task
from headway_training.tokenizers import train_tokenizer

TEXT = "the king and the queen speak of the night and the naïve moon " * 4


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_split_pieces_spell_the_same_text(rate):
    tokenizer = train_tokenizer([TEXT], TokenizerSettings(vocabulary_size=320), "generation")
    ids = tokenizer.encode(TEXT).ids
    split = PieceSplitter(tokenizer).split_ids(ids, rate, np.random.default_rng(0))
    assert tokenizer.decode(split) == TEXT
    assert (split == ids) == (rate == 0)
    assert len(split) == len(TEXT.encode()) if rate == 1 else len(split) < len(TEXT.encode())


def test_sentences_to_translate_are_split_by_the_steps_generator(tmp_path, pairs, tiny_settings):
    recipe = read_recipe("multi30k-en-de", [*tiny_settings["multi30k-en-de"], "augmentation.piece_splitting=0.2"])
    task = make_task(recipe, read_splits(recipe, tmp_path, OwnData(train=str(pairs), valid=str(pairs))), tmp_path / "t")
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
        make_task(recipe, read_splits(recipe, tmp_path, own), tmp_path / "tokenizer.json")
        for recipe in (
            read_recipe("tiny-shakespeare", settings),
            read_recipe("tiny-shakespeare", [*settings, "augmentation.piece_splitting=0.5"]),
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
