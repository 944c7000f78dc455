"""Writes small data sets of our own, so that the recipes can be trained where there is no data.

    python -m benchmarks.gpu_data FOLDER

Texts are random words, their translation is the same words from back to front, and pictures are coloured noise: to try
the recipes and to measure with, not to learn anything worth serving.
"""

import csv
import random
import sys
from pathlib import Path

from PIL import Image

NUM_TEXTS, NUM_PICTURES = {"train": 4000, "valid": 200}, {"train": 400, "valid": 60}
"""Lines of each file; pictures of each class."""
WORDS = tuple(a + b + c + d for a in "bdfg" for b in "aeiou" for c in "klmn" for d in ("", "t", "rs"))
TOPICS = ("Sports", "Business", "Sci/Tech", "World")
COLOURS = {"blue": (60, 80, 190), "green": (60, 170, 80), "red": (190, 60, 60)}


def main(folder: Path) -> None:
    """Writes the data to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(11)  # noqa: S311 (data, no secret)
    for part, count in NUM_TEXTS.items():
        texts = [generator.choices(WORDS, k=generator.randint(4, 24)) for _ in range(count)]
        lines = [" ".join(text) for text in texts]
        pairs = [f"{line}\t{' '.join(reversed(text))}" for line, text in zip(lines, texts, strict=True)]
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / f"{part}.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
        with (folder / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
            labelled = (
                (line, TOPICS[WORDS.index(text[0]) % len(TOPICS)]) for line, text in zip(lines, texts, strict=True)
            )
            csv.writer(file).writerows([("text", "label"), *labelled])
        for name, colour in COLOURS.items():
            pictures = folder / f"{part}-pictures" / name
            pictures.mkdir(parents=True, exist_ok=True)
            for index in range(NUM_PICTURES[part]):
                noise = Image.frombytes("RGB", (32, 32), generator.randbytes(32 * 32 * 3))
                Image.blend(Image.new("RGB", (32, 32), colour), noise, 0.7).save(pictures / f"{index}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
