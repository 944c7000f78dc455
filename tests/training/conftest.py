"""Tiny data and settings that every training test may use."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A CSV file of 80 texts that a word gives away."""
    generator = random.Random(0)
    file = tmp_path / "reviews.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["id", "label", "text"])
        for i in range(80):
            good = i % 2 == 0
            words = generator.sample(["the", "film", "plot", "actor", "was", "seen", "and"], 4)
            words.insert(generator.randrange(5), "wonderful" if good else "dreadful")
            writer.writerow([i, "praise" if good else "blame", " ".join(words) + ", said one"])
    return file


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A file of 60 source<TAB>target lines: numerals in two languages."""
    numerals = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
    generator = random.Random(1)
    file = tmp_path / "numerals.tsv"
    sources = [generator.choices(list(numerals), k=generator.randint(1, 4)) for _ in range(60)]
    lines = (" ".join(words) + "\t" + " ".join(numerals[word] for word in words) + "\n" for words in sources)
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def verses(tmp_path: Path) -> Path:
    """A plain text of about 4,000 characters."""
    generator = random.Random(2)
    words = ["night", "day", "sun", "moon", "king", "queen", "doth", "speak", "naïve", "of"]
    file = tmp_path / "verses.txt"
    lines = (" ".join(generator.choices(words, k=6)) + "\n" for _ in range(140))
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of 3 classes of 8 plain-coloured images, of different sizes and formats."""
    generator = np.random.default_rng(3)
    folder = tmp_path / "pictures"
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(8):
            size = (20 + 3 * i, 40 - 2 * i, 3)
            pixels = np.clip(np.asarray(colour) + generator.normal(0, 20, size), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.{'png' if i % 2 else 'jpg'}")
    return folder


TINY_MODELS = {
    "ag-news": ["model.d_model=16", "model.num_heads=2", "model.d_ff=32", "model.num_layers=1", "model.max_length=32"],
    "multi30k-en-de": [
        "model.d_model=16",
        "model.num_heads=2",
        "model.d_ff=32",
        "model.num_encoder_layers=1",
        "model.num_decoder_layers=1",
        "model.max_source_length=16",
        "model.max_target_length=16",
    ],
    "tiny-shakespeare": [
        "model.d_model=16",
        "model.num_heads=2",
        "model.d_ff=32",
        "model.num_layers=1",
        "model.max_length=16",
    ],
    "cifar10": [
        "model.d_model=16",
        "model.num_heads=2",
        "model.d_ff=32",
        "model.num_layers=1",
        "model.image_size=16",
        "model.patch_size=8",
        "preprocessing.height=16",
        "preprocessing.width=16",
    ],
}
TINY_RUNS = {
    "ag-news": ["tokenizer.vocabulary_size=300", "optimization.batch_tokens=128"],
    "multi30k-en-de": ["tokenizer.vocabulary_size=300", "optimization.batch_tokens=128"],
    "tiny-shakespeare": ["tokenizer.vocabulary_size=300", "optimization.batch_size=8"],
    "cifar10": ["optimization.batch_size=8"],
}


@pytest.fixture
def tiny_settings() -> dict[str, tuple[str, ...]]:
    """Settings that make each recipe's model and batches tiny, by recipe."""
    return {recipe: (*settings, *TINY_RUNS[recipe]) for recipe, settings in TINY_MODELS.items()}
