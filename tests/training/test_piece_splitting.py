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
