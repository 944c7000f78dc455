"""Tokens of a text on disk: the tokenizer's own, written once, and read without the text ever being in memory."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from headway_training.data import PlainText
from headway_training.data.token_file import map_tokens
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import train_tokenizer

TEXT = "To be, or not to be:  that is the naïve question.\n\nWhether 'tis nobler — in the mind!\n" * 6000


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], TokenizerSettings(vocabulary_size=320), "generation")


@pytest.mark.parametrize("in_file", [True, False])
def test_the_tokens_are_those_of_the_whole_text(tmp_path, tokenizer, in_file):
    source = tmp_path / "text.txt"
    source.write_text(TEXT, encoding="utf-8")
    tokens = map_tokens(PlainText(source if in_file else TEXT), tokenizer, tmp_path / "run" / "tokens.bin")
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == tokenizer.encode(TEXT).ids
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens.bin"]


def test_a_text_is_encoded_once(tmp_path, tokenizer):
    file = tmp_path / "tokens.bin"
    first = map_tokens(PlainText(TEXT), tokenizer, file)
    again = map_tokens(PlainText("another text"), tokenizer, file)
    assert np.array_equal(first, again)
    with pytest.raises(ValueError, match="read-only"):
        again[0] = 1


def test_large_vocabularies_take_four_bytes_a_token(tmp_path, tokenizer):
    class Large:
        """The tokenizer, among a hundred thousand tokens."""

        def get_vocab_size(self) -> int:
            return 100_000

        def encode_batch_fast(self, *arguments, **options):
            return tokenizer.encode_batch_fast(*arguments, **options)

    tokens = map_tokens(PlainText(TEXT), Large(), tmp_path / "tokens.bin")
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == tokenizer.encode(TEXT).ids


def test_an_empty_text_has_no_tokens(tmp_path, tokenizer):
    assert len(map_tokens(PlainText(""), tokenizer, tmp_path / "tokens.bin")) == 0


PROGRAM = """
import sys
from pathlib import Path
import psutil
import torch
from headway_training.data import OwnData, read_splits
from headway_training.recipes import read_recipe
from headway_training.tasks import make_task

torch.set_num_threads(1)
folder = Path(sys.argv[1])
settings = ["tokenizer.vocabulary_size=300", "model.max_length=64", "augmentation.subword_splitting=0"]
own = OwnData(train=str(folder / "large.txt"), valid=str(folder / "small.txt"))
recipe = read_recipe("tiny-shakespeare", settings)
process = psutil.Process()

def work(own):
    task = make_task(recipe, read_splits(recipe, folder, own), folder / Path(own.train).stem)
    for batch in task.epoch_batches(0, 0)[:50]:
        task.collate(batch, torch.Generator().manual_seed(0))
    return task.num_train_examples

work(OwnData(train=own.valid, valid=own.valid))  # whatever libraries take for themselves is taken here
before = process.memory_info().rss
characters = work(own)
print(characters, process.memory_info().rss - before, (folder / "large" / "tokens.bin").stat().st_size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is measured as Linux counts it")
def test_a_text_larger_than_the_memory_it_takes_is_trained_on(tmp_path):
    """12 MB of text, 4.5 M tokens: encoded at once they take more than half a gigabyte."""
    (tmp_path / "small.txt").write_text(TEXT, encoding="utf-8")
    with (tmp_path / "large.txt").open("w", encoding="utf-8") as out:
        for _ in range(24):
            out.write(TEXT)
    output = subprocess.check_output([sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)], text=True)
    characters, grown, size = map(int, output.split())
    assert characters == 24 * len(TEXT)
    assert size > 8e6
    assert grown < 50e6
