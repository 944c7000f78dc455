"""Several labels a text, and pairs of texts: from the user's own file to a checkpoint."""

import random
from pathlib import Path

import pytest
import torch
from evaluation_files import read_text_evaluation
from rich.console import Console
from tokenizers import Tokenizer

from headway_training.checkpoint import load_model, load_tokenizer, read_checkpoint
from headway_training.data.sources import OwnData
from headway_training.data.texts import read_labeled_texts, read_multi_labeled_texts
from headway_training.errors import DataError, RecipeError
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tokenizers import encode_pairs

ANIMALS = ("cat", "dog", "owl")


def write(folder: Path, content: str, name: str = "data.csv") -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


def test_several_labels_stand_in_a_column_with_a_separator(tmp_path):
    file = write(tmp_path, "text,label\none,b|a\ntwo,\nthree, c | a |\n")
    examples, labels = read_multi_labeled_texts(file, separator="|")
    assert labels == ("a", "b", "c")
    assert examples.labels == [(0, 1), (), (0, 2)]
    assert examples.text_pairs is None


def test_an_unknown_label_among_several_is_named_with_its_line(tmp_path):
    with pytest.raises(DataError, match=r"line 3: the label 'z' is not among"):
        read_multi_labeled_texts(write(tmp_path, "text,label\none,a\ntwo,a|z\n"), ("a", "b"), separator="|")


def test_the_second_text_is_in_a_column_of_its_own(tmp_path):
    file = write(tmp_path, "text_pair,label,text\nsecond,x,first\n,y,alone\n")
    examples, _ = read_labeled_texts(file, text_pairs="optional")
    assert (examples.texts, examples.text_pairs) == (["first", "alone"], ["second", ""])
    with pytest.raises(DataError, match=r"line 3: the text_pair is empty"):
        read_labeled_texts(file, text_pairs="required")
    without_header = write(tmp_path, "x,first,second\ny,third,fourth\n", "plain.csv")
    examples, _ = read_labeled_texts(without_header, text_pairs="required")
    assert (examples.texts, examples.text_pairs) == (["first", "third"], ["second", "fourth"])
    with pytest.raises(DataError, match="4 columns; expected label, text and text_pair"):
        read_labeled_texts(write(tmp_path, "x,a,b,c\ny,a,b,c\n", "wide.csv"), text_pairs="required")


@pytest.mark.parametrize("separator", ["", "ab", "a", "1", '"', "\n"])
def test_a_separator_that_cannot_separate_is_refused(separator):
    with pytest.raises((RecipeError, ValueError), match=r"classification\.label_separator: it must be one character"):
        read_recipe("ag-news", [f"classification.label_separator={separator!r}".replace("'", '"')])


SETTINGS = (
    "model.num_layers=1",
    "model.d_model=16",
    "model.num_heads=2",
    "model.d_ff=32",
    "model.max_length=24",
    "model.dropout=0",
    "tokenizer.vocabulary_size=300",
    "optimization.epochs=40",
    "optimization.batch_tokens=400",
    "optimization.learning_rate=0.01",
    "optimization.precision=fp32",
    "optimization.average_decay=0",
    "optimization.label_smoothing=0",
    "optimization.evaluations=4",
    "augmentation.token_dropout=0",
)


def train(folder: Path, data: Path, *settings: str) -> Path:
    options = RunOptions(
        recipe="ag-news",
        settings=(*SETTINGS, *settings),
        own_data=OwnData(train=str(data), valid=str(data)),
        output=folder,
    )
    return run_training(options, Console(quiet=True))


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """120 texts that name none or several animals; the last one is rarer than the others."""
    generator = random.Random(0)
    lines = ["text,label"]
    for number in range(120):
        present = [animal for animal in ANIMALS[:2] if generator.random() < 0.5] + ["owl"] * (number % 40 == 0)
        words = [*present, *generator.sample(["the", "saw", "and", "near", "old"], 3)]
        generator.shuffle(words)
        lines.append(f"{' '.join(words)},{';'.join(present)}")
    return write(tmp_path, "\n".join(lines) + "\n", "zoo.csv")


def test_a_file_of_several_labels_becomes_a_classifier_with_thresholds(tmp_path, zoo):
    settings = ("classification.multi_label=true", "classification.label_separator=;")
    folder = train(tmp_path / "run", zoo, *settings)
    checkpoint = read_checkpoint(folder)
    scheme = checkpoint.classification
    assert scheme is not None
    assert (scheme.kind, len(scheme.thresholds), checkpoint.labels) == ("multi_label", 3, ("cat", "dog", "owl"))
    assert scheme.thresholds[2] == 0.5, "three owls are too few to fit a threshold"
    assert checkpoint.evaluation is not None
    assert checkpoint.evaluation.metric == "micro_f1"
    assert checkpoint.training is not None
    metrics = checkpoint.training.metrics
    assert metrics["micro_f1"] > 95
    assert metrics["expected_calibration_error"] <= metrics["expected_calibration_error_uncalibrated"] + 1e-6
    assert checkpoint.training.baseline is not None
    assert checkpoint.training.baseline.metric == "micro_f1"
    rows = read_text_evaluation(folder)
    assert len(rows) == 120
    assert all(set(row) == {"text", "labels"} for row in rows)
    assert [0, 1] in [row["labels"] for row in rows]
    assert [] in [row["labels"] for row in rows]


@pytest.fixture
def same_or_not(tmp_path: Path) -> Path:
    """Pairs whose class follows from both texts together: whether the second repeats the first."""
    generator = random.Random(1)
    lines = ["text,text_pair,label"]
    for _ in range(200):
        first = generator.choice(ANIMALS)
        second = first if generator.random() < 0.5 else generator.choice([a for a in ANIMALS if a != first])
        lines.append(f"the {first},a {second},{'same' if first == second else 'other'}")
    return write(tmp_path, "\n".join(lines) + "\n", "pairs.csv")


def test_a_file_of_pairs_becomes_a_classifier_that_reads_both_texts(tmp_path, same_or_not):
    settings = ("classification.text_pairs=required", "model.num_token_types=2", "model.pooling=first")
    folder = train(tmp_path / "run", same_or_not, *settings)
    model, checkpoint = load_model(folder)
    assert checkpoint.text_pairs == "required"
    assert checkpoint.training is not None
    assert checkpoint.training.metrics["accuracy"] > 95, "the class follows from neither text alone"
    assert set(read_text_evaluation(folder)[0]) == {"text", "text_pair", "label"}
    ids, types = encode_pairs(load_tokenizer(folder), ["the cat"], ["a dog"], 24)
    tensors = [torch.tensor(ids), torch.ones(1, len(ids[0]), dtype=torch.long), torch.tensor(types)]
    assert not torch.allclose(model(*tensors), model(*tensors[:2]), rtol=0, atol=1e-5), "types must make a difference"


def test_a_pair_past_the_limit_loses_of_its_longer_text_first(tmp_path, same_or_not):
    folder = train(tmp_path / "run", same_or_not, "classification.text_pairs=optional", "optimization.max_steps=2")
    tokenizer: Tokenizer = load_tokenizer(folder)
    (short,) = [len(tokenizer.encode("cat", add_special_tokens=False).ids)]
    ids, types = encode_pairs(tokenizer, ["cat", "dog"], ["dog " * 30, ""], 12)
    assert len(ids[0]) == 12
    assert types[0].count(0) == short + 2, "the first text keeps all its tokens"
    assert types[1] == [0] * len(ids[1]), "an empty second text is none"
