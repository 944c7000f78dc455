"""Writes small data sets of our own, so that the recipes can be trained where there is no data.

    python benchmarks/gpu_data.py FOLDER

Sentences are put together at random from a few words, in English and in German; pictures are coloured noise. They are
for trying the recipes and for measuring, not for learning anything worth serving.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

from PIL import Image

SEED = 11
NUM_TRAIN, NUM_VALID = 4000, 200
NUM_PICTURES = {"train": 400, "valid": 60}
"""Of each class."""

_WHO = (("A man", "Ein Mann"), ("A woman", "Eine Frau"), ("A child", "Ein Kind"), ("A dog", "Ein Hund"))
_DOES = (("is running", "läuft"), ("is waiting", "wartet"), ("is sleeping", "schläft"), ("is sitting", "sitzt"))
_WHERE = (
    ("in the park", "im Park"),
    ("on the beach", "am Strand"),
    ("in front of a house", "vor einem Haus"),
    ("next to a river", "neben einem Fluss"),
    ("under a tree", "unter einem Baum"),
)
_WHEN = (("today", "heute"), ("at night", "nachts"), ("in summer", "im Sommer"), ("in the rain", "im Regen"))
_TOPICS = {
    "Sports": ("goal", "coach", "season", "match", "team", "final"),
    "Business": ("shares", "profit", "bank", "market", "prices", "merger"),
    "Sci/Tech": ("software", "satellite", "browser", "chip", "researchers", "planet"),
    "World": ("minister", "border", "election", "talks", "peace", "storm"),
}
_FILLERS = ("the", "a", "after", "new", "says", "for", "with", "last", "more", "week", "and", "of")
_COLOURS = {"blue": (60, 80, 190), "green": (60, 170, 80), "red": (190, 60, 60)}


def main() -> None:
    """Writes the data to the folder that is named."""
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/gpu_data.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(SEED)
    for part, count in (("train", NUM_TRAIN), ("valid", NUM_VALID)):
        pairs = [_pair(generator) for _ in range(count)]
        (folder / f"{part}.txt").write_text("\n".join(english for english, _ in pairs) + "\n", encoding="utf-8")
        (folder / f"{part}.tsv").write_text("\n".join(map("\t".join, pairs)) + "\n", encoding="utf-8")
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *(_headline(generator) for _ in range(count))])
        _draw_pictures(folder / f"{part}-pictures", generator, NUM_PICTURES[part])


def _pair(generator: random.Random) -> tuple[str, str]:
    parts = [generator.choice(options) for options in (_WHO, _DOES, _WHERE, _WHEN)]
    return " ".join(english for english, _ in parts) + ".", " ".join(german for _, german in parts) + "."


def _headline(generator: random.Random) -> tuple[str, str]:
    label = generator.choice(list(_TOPICS))
    words = [*generator.choices(_TOPICS[label], k=2), *generator.choices(_FILLERS, k=generator.randint(3, 30))]
    generator.shuffle(words)
    return " ".join(words), label


def _draw_pictures(folder: Path, generator: random.Random, count: int) -> None:
    for name, colour in _COLOURS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            noise = Image.frombytes("RGB", (32, 32), generator.randbytes(32 * 32 * 3))
            Image.blend(Image.new("RGB", (32, 32), colour), noise, 0.7).save(folder / name / f"{index}.png")


if __name__ == "__main__":
    main()
