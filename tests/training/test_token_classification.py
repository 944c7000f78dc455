"""Training of token classifiers: which texts make an example, what a batch holds, and what a run leaves."""

import random
from pathlib import Path

import pytest
import torch
from evaluation_files import read_text_evaluation
from rich.console import Console

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.sources import OwnData, read_splits
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tagging import IGNORED
from headway_training.tasks import make_task

SMALL = (
    "model.d_model=16",
    "model.num_heads=2",
    "model.d_ff=32",
    "model.num_layers=1",
    "model.max_length=48",
    "tokenizer.vocabulary_size=300",
    "optimization.batch_tokens=128",
)
WORDS = {"the": "DET", "a": "DET", "dog": "NOUN", "cat": "NOUN", "saw": "VERB", "heard": "VERB", ".": "PUNCT"}


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    """A CoNLL-U file of 40 sentences."""
    generator = random.Random(4)
    lines = []
    for _ in range(40):
        words = [*generator.choices(list(WORDS)[:6], k=generator.randint(2, 6)), "."]
        lines.append(f"# text = {' '.join(words[:-1])}.")
        lines += ["\t".join([str(i), word, "_", WORDS[word], *"______"]) for i, word in enumerate(words, start=1)]
        lines.append("")
    file = tmp_path / "treebank.conllu"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def task(treebank: Path, tmp_path: Path):
    recipe = read_recipe("ud-ewt-pos", SMALL)
    splits = read_splits(recipe, tmp_path, OwnData(train=str(treebank), valid=str(treebank)))
    return make_task(recipe, splits, tmp_path)


def test_every_text_is_in_one_example_of_an_epoch_with_its_neighbours(task):
    seen = set()
    for epoch in range(4):
        texts = []
        for batch in task.epoch_batches(7, epoch):
            for example in batch.tolist():
                more, first = divmod(example, 40)
                assert more < 3
                texts += range(first, first + more + 1)
                seen.add(more)
        assert sorted(texts) == list(range(40))
    assert seen == {0, 1, 2}


def test_a_batch_is_a_function_of_the_generators_seed(task):
    batch = task.epoch_batches(0, 0)[0]
    one, same, other = (task.collate(batch, torch.Generator().manual_seed(seed)).tensors for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert one["input_ids"].shape != other["input_ids"].shape or not torch.equal(one["input_ids"], other["input_ids"])


def test_targets_stand_at_subwords_and_nowhere_else(task):
    scheme = task.checkpoint_fields()["labels"]
    assert "O" not in scheme
    for batch in task.epoch_batches(0, 0):
        made = task.collate(batch, torch.Generator().manual_seed(0))
        ids, mask, targets = (made.tensors[name] for name in ("input_ids", "attention_mask", "targets"))
        assert ids.shape == mask.shape == targets.shape
        assert (targets[mask == 0] == IGNORED).all()
        assert (targets[:, 0] == IGNORED).all()
        begins = torch.tensor([tag.startswith("B-") for tag in scheme])
        predicted = targets != IGNORED
        spans = begins[targets.clamp(min=0)] & predicted
        words = sum(
            len(task._splits.train.spans[i]) for e in batch.tolist() for i in range(e % 40, e % 40 + e // 40 + 1)
        )
        assert int(spans.sum()) == words


def test_a_run_leaves_a_checkpoint_with_tags_spans_and_figures(treebank: Path, tmp_path: Path):
    options = RunOptions(
        recipe="ud-ewt-pos",
        settings=(*SMALL, "optimization.evaluations=1", "optimization.precision=fp32"),
        own_data=OwnData(train=str(treebank), valid=str(treebank)),
        output=tmp_path / "run",
        max_steps=3,
    )
    folder = run_training(options, Console(quiet=True))
    model, checkpoint = load_model(folder)
    assert checkpoint.labels[:2] == ("B-DET", "I-DET")
    assert checkpoint.evaluation.metric == "span_f1"
    assert set(checkpoint.training.metrics) == {"span_f1", "span_precision", "span_recall", "word_accuracy"}
    assert checkpoint.training.baseline.value == 100  # every word has one label here
    rows = read_text_evaluation(folder)
    assert [row["text"][start:end] for row in rows for start, end, _ in row["spans"][-1:]] == ["."] * 40
    ids = torch.tensor([load_tokenizer(folder).encode("a dog saw the cat.").ids])
    assert model(ids, torch.ones_like(ids)).shape == (1, ids.shape[1], len(checkpoint.labels))
