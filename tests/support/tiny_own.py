"""A user's own data in every form that is read of images and recordings: tables, and folders of pictures with masks."""

import csv
import json
from pathlib import Path

import tiny_voice
from PIL import Image, ImageDraw

COLOURS = {"red": ((200, 30, 30), "rot"), "green": ((30, 200, 30), "grün"), "blue": ((30, 30, 200), "blau")}
NUM_PICTURES = 9
SIZE = (56, 40)
"""Width and height of each picture."""


def write_own(folder: Path) -> Path:
    """Writes pictures and their masks, `captions.tsv`, and recordings as `said.tsv`, `heard.csv` and `spoken.jsonl`."""
    write_segmented(folder)
    write_captions(folder)
    write_recordings(folder)
    return folder


def write_segmented(folder: Path) -> None:
    """Two squares of a colour on grey; masks are one file of numbers, a palette, or a file for each square."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number in range(NUM_PICTURES):
        name, (colour, _) = f"{number}.{'jpg' if number % 2 else 'png'}", list(COLOURS.values())[number % 3]
        image, mask = Image.new("RGB", SIZE, (90, 90, 90)), Image.new("L", SIZE)
        boxes = [(4 + number, 6, 20 + number, 20), (30, 12 + number, 50, 28 + number)]
        for place, box in enumerate(boxes, start=1):
            ImageDraw.Draw(image).rectangle(box, fill=colour)
            ImageDraw.Draw(mask).rectangle(box, fill=100 * place)
        image.save(folder / "images" / name)
        if number % 3 == 2:
            (folder / "masks" / str(number)).mkdir(exist_ok=True)
            for place, box in enumerate([*boxes, (0, 0, 30, 20)]):  # the last one overlaps the first
                one = Image.new("1", SIZE)
                ImageDraw.Draw(one).rectangle(box, fill=1)
                one.save(folder / "masks" / str(number) / f"{place}.png")
        elif number % 3 == 1:
            indices = mask.point(lambda value: value // 100).convert("P")
            indices.putpalette([0, 0, 0, 9, 9, 9, 255, 0, 0])
            indices.save(folder / "masks" / f"{number}.png")
        else:
            mask.save(folder / "masks" / f"{number}.png")


def write_captions(folder: Path) -> Path:
    """A table of the pictures in two languages, of which one has two captions of each."""
    rows = ["file\tlanguage\tcaption"]
    for number in range(NUM_PICTURES):
        file, (name, (_, german)) = (
            f"images/{number}.{'jpg' if number % 2 else 'png'}",
            list(COLOURS.items())[number % 3],
        )
        rows += [f"{file}\ten\ttwo squares that are {name}", f"{file}\ten\t{name} squares on grey"]
        rows.append(f"{file}\tde\tzwei Quadrate, ganz {german}")
    table = folder / "captions.tsv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return table


def write_recordings(folder: Path) -> None:
    """Words of two speakers at twice the rate that recipes ask for, in a table of each form."""
    table = tiny_voice.write_recordings(folder / "recordings", repeats=2, rate=2 * tiny_voice.RATE)
    with table.open(encoding="utf-8", newline="") as content:
        rows = list(csv.DictReader(content, delimiter="\t"))
    rows = [{**row, "file": f"recordings/{row['file']}"} for row in rows]
    for name, delimiter, columns in (
        ("heard.csv", ",", ("file",)),
        ("said.tsv", "\t", ("file", "transcript")),
    ):
        with (folder / name).open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, columns, delimiter=delimiter, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (folder / "spoken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
