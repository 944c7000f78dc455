"""Archives without a home are made of sources laid out as their homes have them, and data sets read them."""

import dataclasses
import gzip
import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import documents
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from scipy.io import savemat
from tiny_transcriber import tones, write_wav
from typer.testing import CliRunner

from headway_training.cli import app
from headway_training.data import made
from headway_training.data.captions import read_captioned_images
from headway_training.data.pictures import STYLES, read_archive, read_drawings, read_emoji_texts, read_photographs
from headway_training.data.public import DATASETS
from headway_training.data.segments import read_segmented_images
from headway_training.data.speech import read_digits, read_transcribed
from headway_training.errors import DataError, DownloadError, MissingDataError
from headway_training.recipes import list_recipes, read_recipe

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
MAN, WOMAN, PERSON, COOKING = "\N{MAN}", "\N{WOMAN}", "\N{ADULT}", "\u200d\N{COOKING}"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    return folder


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def picture(pixels: object, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(content, kind)
    return content.getvalue()


def sound(tmp_path: Path, word: str = "low") -> bytes:
    write_wav(tmp_path / "one.wav", tones(word))
    return (tmp_path / "one.wav").read_bytes()


def make(name: str, mirror: Path) -> Path:
    data = mirror.parent / "data"
    made.make_data(name, data, Console(quiet=True), mirror=mirror.as_uri())
    assert all((data / archive).is_file() for archive in made.MADE[name].archives)
    return data


def test_every_file_without_a_home_can_be_made_and_is_made_for_a_data_set():
    wanted = {(file.maker, file.name) for one in DATASETS.values() for file in one.files if file.maker}
    assert wanted == {(name, archive) for name, one in made.MADE.items() for archive in one.archives}
    sources = [source for one in made.MADE.values() for source in one.sources]
    assert all(source.url.startswith(("https://", "npm:")) for source in sources)
    assert len({source.name for source in sources}) == len(sources)


@pytest.mark.parametrize("file", list_recipes(), ids=lambda file: file.stem)
def test_a_recipe_names_the_commands_that_make_its_data(file):
    dataset = DATASETS[read_recipe(file.stem).data.dataset]
    named = set(re.findall(r"#   headway-train make-data (\S+)", file.read_text(encoding="utf-8")))
    assert named == {one.maker for one in dataset.files if one.maker}


def test_the_document_has_every_name_with_its_recipes():
    recipes = {file.stem: DATASETS[read_recipe(file.stem).data.dataset] for file in list_recipes()}
    makers = {name: {file.maker for file in dataset.files} for name, dataset in recipes.items()}
    told = {
        documents.names(row[0]).pop(): documents.names(row[2]) for row in documents.rows(PAGE, "archives | sources")
    }
    assert told == {name: {recipe for recipe, of in makers.items() if name in of} for name in made.MADE}


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_packages_come_from_the_registry_that_npm_is_set_to(tmp_path, monkeypatch):
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/own/")
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9/own/"):
        made.make_data("emoji", tmp_path, Console(quiet=True))


def test_packages_need_npm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match="is a package of npm, which is not installed; install it, or give --mirror"):
        made.make_data("emoji", tmp_path, Console(quiet=True))


def test_digits_are_put_into_the_official_parts(mirror, tmp_path):
    heard = sound(tmp_path)
    names = ["7_theo_0", "7_theo_3", "7_theo_4", "7_theo_10", "7_theo_5", "0_george_49"]
    pack(
        mirror / "fsdd.tar.gz", {f"repository-1/recordings/{name}.wav": heard for name in names} | {"r/README.md": b""}
    )
    data = make("digits", mirror)
    train, test = read_digits(data / "fsdd" / "train.tar.gz"), read_digits(data / "fsdd" / "test_3-4.tar.gz")
    assert (train.texts, train.speakers) == (["zero", "seven", "seven"], ["george", "theo", "theo"])
    assert test.texts == ["seven"] * 2


def test_prompts_have_what_is_said_in_them(mirror, tmp_path):
    lines = "; a remark\nagent-pass: Enter your password.\ndigits/7: seven [up]\nbeep: (a tone)\ngone: Gone.\n"
    heard = {f"./{name}.wav": sound(tmp_path) for name in ("agent-pass", "digits/7", "beep", "unwritten")}
    pack(mirror / "asterisk.tar.gz", {**heard, "./core-sounds-en.txt": lines.encode()})
    folder = make("prompts", mirror) / "asterisk"
    read = read_transcribed(folder / "train.tar.gz", folder / "train.tsv", lambda row: (row["name"], ""), write=str)
    assert dict(zip(read.sources, read.texts, strict=True)) == {
        "agent-pass": "Enter your password.",
        "digits/7": "seven",
    }


def test_nuclei_are_numbered_from_top_to_bottom(mirror):
    masks = np.zeros((3, 20, 30), np.uint8)
    masks[0, 12:, :9], masks[1, :4, 20:], masks[2, 3:9, 2:8] = 255, 255, 255
    files = {f"r-1/stage1_train/ab/masks/{number}.png": picture(mask) for number, mask in enumerate(masks)}
    image = np.full((20, 30, 4), (9, 9, 200, 255))
    pack(mirror / "nuclei.tar.gz", {"r-1/stage1_train/ab/images/ab.png": picture(image), **files})
    (read,) = read_segmented_images(make("nuclei", mirror) / "nuclei" / "train.tar.gz")
    (labels,) = read.segmentations
    assert [int(labels[masks[row] > 0].max()) for row in (1, 2, 0)] == [1, 2, 3]
    assert labels[10, 20] == 0
    assert np.abs(read.image - np.array((9, 9, 200))).max() < 12


def test_photographs_have_the_segmentations_of_several_people_at_half_the_size(mirror):
    whole = np.ones((40, 60), np.uint16)
    whole[:, 30:] = 7
    files = {}
    for part in ("train", "val", "test"):
        content = io.BytesIO()
        cells = np.empty((1, 2), object)
        cells[0, 0], cells[0, 1] = {"Segmentation": whole}, {"Segmentation": whole.T[:40, :60].repeat(2, 1)[:, :60]}
        savemat(content, {"groundTruth": cells})
        files[f"r-1/BSDS500/data/groundTruth/{part}/12.mat"] = content.getvalue()
        files[f"r-1/BSDS500/data/images/{part}/12.jpg"] = picture(np.full((40, 60, 3), 90), "JPEG")
    pack(mirror / "bsds500.tar.gz", files)
    data = make("photographs", mirror)
    (read,) = read_segmented_images(data / "bsds500" / "val.tar.gz")
    assert read.image.shape == (20, 30, 3)
    assert [np.unique(one).tolist() for one in read.segmentations] == [[1, 2], [1, 2]]


def test_photographs_have_their_captions_and_lines_their_photographs(mirror):
    ids = {"train": ["11", "12"], "val": ["13"], "test_2016": ["14"]}
    for part, names in ids.items():
        (mirror / f"{part}_images.txt").write_text("".join(f"{name}.jpg\n" for name in names))
        for language in ("en", "de"):
            for number in range(1, 6):
                lines = "".join(f"{language} {number} of {name}\n" for name in names)
                (mirror / f"{part}.{number}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    colour = picture(np.full((224, 224, 3), 90), "JPEG")
    pack(mirror / "flickr8k.tar.gz", {f"r-1/data/images/{name}_ab12.jpg": colour for name in ("11", "13", "14", "99")})
    folder = make("captions", mirror) / "flickr8k"
    images = read_archive(folder / "photos_112.tar.gz")
    assert {name: image.shape for name, image in images.items()} == {"11": (112, 112, 3), "13": (112, 112, 3)}
    assert read_photographs(images, folder / "captions_val.tsv.gz", "en").captions == [
        [f"en {number} of 13" for number in range(1, 6)]
    ]
    lines = {}
    for language in ("en", "de"):
        lines[language] = folder / f"train.{language}.txt"
        lines[language].write_text(f"another {language}\nalone {language}\n")
    read = read_captioned_images(
        images, folder / "captions_train.tsv.gz", lines=folder / "task1_lines.tsv.gz", texts=lines
    )
    assert len(read) == 1
    assert read.captions["de"][0][-1] == "another de"
    assert read.texts["en"] == ["alone en"]


def test_emoji_are_drawn_in_each_style_and_persons_doing_one_thing_are_one_concept(mirror, monkeypatch):
    monkeypatch.setattr(made, "draw_svg", draw)
    sources = tuple(dataclasses.replace(one, sha256="") for one in made.MADE["emoji"].sources)
    monkeypatch.setattr(made, "MADE", {"emoji": dataclasses.replace(made.MADE["emoji"], sources=sources)})
    emoji = [MAN + COOKING, WOMAN + COOKING, PERSON + COOKING, MAN, WOMAN, "\N{FISH}", "\N{SPOUTING WHALE}"]
    rows = [
        {
            "hexcode": code(one),
            "emoji": one,
            "label": f"thing {place}",
            "tags": ["a", "b"],
            "group": 1,
            "order": 9 - place,
        }
        for place, one in enumerate(emoji)
    ]
    rows.append({"hexcode": "1F1E6", "emoji": "A", "label": "component", "tags": [], "group": 2, "order": 1})
    files = {f"package/{one}/data.json": json.dumps(rows).encode() for one in ("en", "de")}
    groups = json.dumps({"groups": {"1": "people-body", "2": "component"}}).encode()
    pack(mirror / "emojibase-data.tgz", {**files, "package/meta/groups.json": groups})
    names = {code(one).lower(): f"name-{place}" for place, one in enumerate(emoji)}
    for style in STYLES:
        bodies = {f"name-{place}": {"body": f"<{place}>"} for place in range(6)}  # the last one has none
        icons = {"icons": bodies, "width": 32, "height": 30}
        files = {"icons": icons, "chars": names}
        pack(mirror / f"{style}.tgz", {f"package/{one}.json": json.dumps(files[one]).encode() for one in files})
    folder = make("emoji", mirror) / "emoji"
    texts = read_emoji_texts(folder / "texts.tsv.gz")
    assert texts.names == [f"thing {place}" for place in reversed(range(7))], "in the order of the list"
    numbers = dict(zip(texts.names, texts.concepts.tolist(), strict=True))
    assert numbers["thing 0"] == numbers["thing 1"] == numbers["thing 2"]
    assert len(set(numbers.values())) == 5
    drawn = read_drawings({style: folder / f"{style}_96.tar.gz" for style in STYLES}, texts)
    assert {style: one.images.shape for style, one in drawn.items()} == dict.fromkeys(STYLES, (6, 96, 96, 3))


def code(text: str) -> str:
    return "-".join(f"{ord(one):X}" for one in text)


def draw(text: str) -> bytes:
    """A bar at the left, as high as the number that a body is."""
    assert 'viewBox="0 -1 32 32"' in text, "made square"
    pixels = np.full((96, 96, 3), 255)
    pixels[: 10 + 10 * int(text.split("><")[1].partition(">")[0]), :20] = 0
    return picture(pixels)


def test_what_is_not_there_is_told_with_the_command_that_makes_it(mirror, tmp_path):
    dataset = DATASETS["emoji"]
    with pytest.raises(MissingDataError, match="Make it with `headway-train make-data emoji`"):
        dataset.find(tmp_path, ("emoji/texts.tsv.gz",))
    words = ["digits", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(app, ["data", *words])
    assert result.exit_code == 1
    assert "make it with `headway-train make-data digits`" in result.output.replace("\n", " ")
    pack(mirror / "fsdd.tar.gz", {"r/recordings/1_theo_5.wav": sound(tmp_path)})
    result = CliRunner().invoke(app, ["make-data", *words, "--mirror", mirror.as_uri()])
    assert result.exit_code == 0, result.output
    assert "licence: CC BY-SA 4.0" in result.output
    result = CliRunner().invoke(app, ["data", *words])
    assert "is another than that which the recipes' figures were measured on" in result.output.replace("\n", " ")


def test_a_source_that_is_another_one_is_told(mirror):
    (mirror / "nuclei.tar.gz").write_bytes(b"<html>")
    with pytest.raises(DataError, match=r"nuclei\.tar\.gz cannot be read as what they are taken for .*remove them"):
        make("nuclei", mirror)
    with pytest.raises(DataError, match="nothing is made by the name 'cells'; known are emoji, digits"):
        make("cells", mirror)
