"""Every recipe of the package trains on data of the user's own, which is made here; what is wrong with it is told."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_own
import tiny_tasks
import tiny_transcriber
import tiny_voice
from documents import names, rows
from PIL import Image
from rich.console import Console

from headway_training.checkpoint import ImagePreprocessing, read_checkpoint
from headway_training.data.captions import read_caption_table
from headway_training.data.conversations import holds_conversations, read_conversations
from headway_training.data.images import read_images, resize_and_crop
from headway_training.data.segments import read_own_segments
from headway_training.data.sources import OWN_LICENSE, OwnData, find_unchecked_files, read_splits
from headway_training.data.speech import SPOKEN, read_recordings
from headway_training.data.tables import find_files, read_rows
from headway_training.data.texts import read_labeled_texts
from headway_training.errors import DataError, RecipeError
from headway_training.kinds import FileSettings, TaskKind, find_task, task_names
from headway_training.recipes import list_recipes, read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks import segmentation

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
RECIPES = {
    "ag-news": ("text classification", "topics.csv"),
    "caption": ("captioning", "own/captions.tsv"),
    "cifar10": ("image classification", "pictures"),
    "cifar10-dino": ("image embedding", "pictures"),
    "clip": ("images and texts", "own/captions.tsv"),
    "emoji-autoencoder": ("autoencoding", "own/images"),
    "emoji-diffusion": ("drawing of texts", "own/captions.tsv"),
    "fashion-mnist-autoencoder": ("autoencoding", "pictures"),
    "fashion-mnist-classifier": ("image classification", "pictures"),
    "fashion-mnist-diffusion": ("drawing of labels", "pictures"),
    "multi30k-de-en": ("translation", "pairs.tsv"),
    "multi30k-en-de": ("translation", "pairs.tsv"),
    "multi30k-en-de-rnn": ("recurrent translation", "pairs.tsv"),
    "order": ("text classification", "topics.csv"),
    "segment": ("segmentation", "own"),
    "telephone-codec": ("audio coding", "own/heard.csv"),
    "telephone-speech": ("speech synthesis", "own/spoken.jsonl"),
    "telephone-transcriber": ("transcription", "own/said.tsv"),
    "tiny-shakespeare": ("generation", "story.txt"),
    "tiny-shakespeare-linear": ("linear generation", "story.txt"),
    "tiny-shakespeare-llama": ("generation", "story.txt"),
    "ud-ewt-pos": ("token classification", "tags.conll"),
}
"""Of each recipe: the run of `tiny_tasks.TASKS` that makes it tiny, and the data."""
TABLES = (".csv", ".tsv", ".jsonl")


@pytest.fixture(scope="module")
def data(made_once, tmp_path_factory) -> Path:
    """The data of all recipes."""
    root: Path = tmp_path_factory.mktemp("every-recipe")
    for one in made_once("tiny-tasks", tiny_tasks.write_data).iterdir():
        (root / one.name).symlink_to(one)
    tiny_own.write_own(root / "own")
    return root


def train(recipe: str, data: Path, folder: Path, *settings: str, file: str = "") -> Path:
    """Runs two steps of a tiny version of a recipe on own data."""
    name, own = RECIPES[recipe]
    tiny, path = tiny_tasks.TASKS[name], str(data / (file or own))
    small = tiny_tasks.read_by(recipe, (*tiny_tasks.BRIEF, "optimization.evaluations=1", *tiny.settings, *settings))
    options = RunOptions(
        recipe=recipe,
        settings=tuple(one for one in small if not one.startswith(("data.", "captioning.text_share"))),
        own_data=OwnData(train=path, valid=path),
        init=data / tiny.init if tiny.init else None,
        output=folder,
        max_steps=2,
    )
    return run_training(options, Console(quiet=True))


def test_every_recipe_is_tried():
    names = [file.stem for file in list_recipes()]
    assert set(RECIPES) == {name for name in names if find_task(read_recipe(name).task).own_data}


def test_a_recipe_without_own_data_says_so(tmp_path):
    [detector] = [file.stem for file in list_recipes() if not find_task(read_recipe(file.stem).task).own_data]
    options = RunOptions(recipe=detector, own_data=OwnData(train="here", valid="here"), output=tmp_path / "run")
    with pytest.raises(DataError, match="object_detection reads its own data set; leave out --train, --valid"):
        run_training(options, Console(quiet=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_own_data(recipe, data, tmp_path):
    checkpoint = read_checkpoint(train(recipe, data, tmp_path / "run"))
    assert checkpoint.task == read_recipe(recipe).task
    assert "trained on" in checkpoint.description
    assert "0 labels" not in checkpoint.description
    start = tiny_tasks.TASKS[RECIPES[recipe][0]].init
    assert checkpoint.license == (read_checkpoint(data / start).license if start else OWN_LICENSE)
    assert (checkpoint.training.dataset_license, checkpoint.training.dataset_home) == (
        OWN_LICENSE,
        "the user's own data",
    )
    assert checkpoint.training.step_count == 2
    baseline = checkpoint.training.baseline
    assert baseline is None or baseline.metric != "image_recall_10" or baseline.value == 100, "of nine images"


@pytest.mark.parametrize(
    ("recipe", "file"),
    [
        ("emoji-autoencoder", "own/captions.tsv"),
        ("telephone-codec", "own/spoken.jsonl"),
        ("telephone-transcriber", "own/spoken.jsonl"),
    ],
)
def test_a_recipe_trains_on_another_form_of_own_data_too(recipe, file, data, tmp_path):
    assert read_checkpoint(train(recipe, data, tmp_path / "run", file=file)).training.step_count == 2


@pytest.mark.parametrize("recipe", [recipe for recipe, (_, own) in RECIPES.items() if own.startswith("own")])
def test_every_file_that_stands_behind_own_data_has_a_checksum(recipe, data):
    file = data / RECIPES[recipe][1]
    found = find_unchecked_files(read_recipe(recipe), Path(), OwnData(train=str(file), valid=str(file)))
    folders = {"segmentation": ("images", "masks"), "audio coding": ("recordings",), "transcription": ("recordings",)}
    named = folders.get(RECIPES[recipe][0], ("recordings",) if "speech" in RECIPES[recipe][0] else ("images",))
    of_folders = {one for folder in named for one in (data / "own" / folder).rglob("*.*")}
    table = data / "own" / "recordings" / "recordings.tsv"
    assert set(found) == (of_folders - {table}) | ({file} if file.is_file() else set())


def test_a_model_that_draws_labels_learns_no_captions_and_the_other_way_about(data, tmp_path):
    with pytest.raises(RecipeError, match=r"model draws labels, and the data has texts; .* such as emoji-diffusion"):
        train("fashion-mnist-diffusion", data, tmp_path / "labels", file="own/captions.tsv")
    with pytest.raises(RecipeError, match="a model that draws labels reads no texts"):
        train("emoji-diffusion", data, tmp_path / "texts", file="pictures")


def test_the_document_says_of_every_task_what_own_data_it_reads():
    told = {name: row[1] for row in rows(PAGE, "recipe's task | files") for name in names(row[0])}
    kinds = {name: find_task(name) for name in task_names()}
    assert told == {name: kind.own_data for name, kind in kinds.items() if kind.own_data}
    assert all(kind.sentence != TaskKind.sentence for kind in kinds.values() if kind.own_data)


def test_the_tables_and_folders_of_the_document_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8").partition("## Your own data")[2].partition("\n## ")[0]
    captions, calls, paths = (
        block
        for block in re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        if "headway" not in block
    )
    for path in {*re.findall(r"^photos/\S+", captions, flags=re.MULTILINE), *paths.split()}:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 1).save(path)
    Path("calls").mkdir()
    for path in re.findall(r"^calls/\d\.wav", calls, flags=re.MULTILINE):
        tiny_transcriber.write_wav(Path(path), tiny_transcriber.tones("low"))
    Path("captions.tsv").write_text(captions, encoding="utf-8")
    Path("calls.csv").write_text(calls, encoding="utf-8")
    assert list(read_caption_table(Path("captions.tsv"))) == [Path("photos/1.jpg"), Path("photos/2.jpg")]
    spoken = read_recordings(Path("calls.csv"), 8000, columns=SPOKEN)
    assert (spoken.texts, spoken.speakers) == (["two seats, please", "thank you"], ["ann", "bob"])
    assert [len(one.masks) for one in read_own_segments(Path("cells")).pictures["own"]] == [1, 2]


# What is read


def test_masks_are_read_as_the_numbers_of_objects_whatever_their_form(data):
    pictures = read_own_segments(data / "own").pictures["own"]
    assert [one.file.name for one in pictures] == sorted(f"{i}.{'jpg' if i % 2 else 'png'}" for i in range(9))
    for number, picture in enumerate(pictures):
        read = picture.load()
        assert read.image.shape == (40, 56, 3)
        assert all(one.shape == (40, 56) for one in read.segmentations)
        first = read.segmentations[0]
        assert np.unique(first).tolist() == [0, 1, 2]
        assert (first[20 + number, 40], first[12, 12 + number]) == (2, 1)
        if number % 3 == 2:  # the third file overlaps the first one, and so is in a map of its own
            assert [int(one.sum() > 0) for one in read.segmentations] == [1, 1]
            assert read.segmentations[1][10, 5] == 1
        else:
            assert len(read.segmentations) == 1


def test_pictures_with_masks_are_measured_at_a_bounded_size(tmp_path):
    for kind, mode, colour in (("images", "RGB", (9, 9, 9)), ("masks", "L", 1)):
        (tmp_path / kind).mkdir()
        Image.new(mode, (2048, 1024), colour).save(tmp_path / kind / "large.png")
    (measured,) = segmentation.read_measured(tmp_path)
    assert measured.image.shape == (256, 512, 3)
    assert measured.mask(0).all()


def test_a_picture_and_its_mask_are_compared_as_they_are_looked_at(tmp_path):
    write_segmented(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.new("RGB", tiny_own.SIZE[::-1]).save(tmp_path / "images" / "1.jpg", exif=exif)
    (turned,) = [one.load() for one in read_own_segments(tmp_path).pictures["own"] if one.file.name == "1.jpg"]
    assert turned.image.shape[:2] == turned.segmentations[0].shape


def test_captions_are_read_by_language_and_images_are_stored_for_crops(data):
    preprocessing = ImagePreprocessing(
        height=8, width=8, resize="shorter_side", resize_size=10, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    settings = FileSettings(classification=None, preprocessing=preprocessing)
    read, _ = find_task("captioning").read(str(data / "own" / "captions.tsv"), None, settings)
    assert read.images.shape == (9, 20, 20, 3)
    assert read.captions["en"][0] == ["two squares that are red", "red squares on grey"]
    assert read.captions["de"][1] == ["zwei Quadrate, ganz grün"]
    stored = resize_and_crop(Image.fromarray(read.images[0]), preprocessing)
    with Image.open(data / "own" / "images" / "0.png") as image:
        served = resize_and_crop(image, preprocessing)
    assert np.abs(stored.astype(int) - served).mean() < 6
    pairs, _ = find_task("image_text_embedding").read(str(data / "own" / "captions.tsv"), None, settings)
    assert pairs.photographs.captions[0] == [*read.captions["en"][0], *read.captions["de"][0]]


def test_recordings_are_brought_to_the_rate_of_the_recipe_in_every_part(data, tmp_path):
    slow = tiny_voice.write_recordings(tmp_path / "slow", repeats=1)
    own = OwnData(train=str(data / "own" / "heard.csv"), valid=str(slow))
    splits = read_splits(read_recipe("telephone-codec"), Path(), own)
    assert splits.train.sampling_rate == splits.valid.sampling_rate == 8000
    longest = max(map(len, splits.train.samples))
    assert longest <= 14 * tiny_voice.HOP + 2


def test_a_table_is_read_whatever_its_form(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"")
    for name, content in (
        ("t.tsv", 'id\tfile\ttranscript\n\n1\ta.wav\tsay "hi", Ann\n'),
        ("t.csv", 'file,transcript\na.wav,"say ""hi"", Ann"\n'),
        ("t.jsonl", '{"file": "a.wav", "transcript": "say \\"hi\\", Ann", "number": 3}\n'),
        ("t.tsv.gz", gzip.compress(b'file\ttranscript\na.wav\tsay "hi", Ann\n')),
        ("T.CSV", 'file,transcript\r\na.wav,"say ""hi"", Ann"\r\n'),
        ("T.JSONL.GZ", gzip.compress(b'{"file": "a.wav", "transcript": "say \\"hi\\", Ann"}')),
        ("t.csv.tsv", 'file\ttranscript\na.wav\tsay "hi", Ann\n'),
    ):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        (row,) = read_rows(path, ("file", "transcript"))
        assert row.cells["transcript"] == 'say "hi", Ann'
        assert find_files(path, [row]) == [tmp_path / "a.wav"]


def test_an_image_that_is_named_in_several_ways_is_one(data, tmp_path):
    (tmp_path / "images").symlink_to(data / "own" / "images")
    table = tmp_path / "captions.tsv"
    table.write_text(f"images/0.png\tred\n./images/0.png\tround\n{tmp_path}/images/../images/0.png\tsmall\n")
    assert read_caption_table(table) == {tmp_path / "images" / "0.png": {"en": ["red", "round", "small"]}}


@pytest.mark.parametrize(
    "recipe", [name for name, (_, own) in RECIPES.items() if own.endswith((".csv", ".tsv", ".jsonl"))]
)
def test_a_table_whose_header_names_other_columns_is_refused(recipe, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("sentence,sentiment\nso good,positive\nso bad,negative\nfine,positive\n")
    read = read_recipe(recipe)
    settings = FileSettings(classification=read.classification, preprocessing=read.preprocessing, sampling_rate=8000)
    with pytest.raises(DataError, match=r"sentence|source<TAB>target"):
        find_task(read.task).read_own(str(table), None, settings)


def test_a_column_that_is_named_twice_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("file,caption,caption\na.png,one,two\n")
    with pytest.raises(DataError, match="the header names caption more than once; rename all but one"):
        read_rows(tmp_path / "t.csv", ("file", "caption"))


@pytest.mark.parametrize("read", [lambda path: read_rows(path, ("file",)), read_conversations])
def test_json_of_too_many_levels_is_told_with_its_line(read, tmp_path):
    (tmp_path / "t.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"t\.jsonl, line 1.* JSON"):
        read(tmp_path / "t.jsonl")


def test_the_form_of_a_file_is_told_by_its_ending_in_any_case(tmp_path):
    turn = {"role": "user", "content": "hi"}
    (tmp_path / "CHAT.JSONL").write_text(json.dumps({"messages": [turn, {"role": "assistant", "content": "ho"}]}))
    assert holds_conversations(tmp_path / "CHAT.JSONL")
    (tmp_path / "TOPICS.TSV").write_text("text\tlabel\na, b\tone\nc\ttwo\n")
    texts, labels = read_labeled_texts(tmp_path / "TOPICS.TSV")
    assert (list(texts.texts), labels) == (["a, b", "c"], ("one", "two"))


def test_a_mask_is_found_whatever_the_case_of_its_ending(data, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    shutil.copy(data / "own" / "images" / "0.png", tmp_path / "images" / "0.PNG")
    shutil.copy(next((data / "own" / "masks").glob("0.*")), tmp_path / "masks" / "0.PNG")
    assert len(read_own_segments(tmp_path)) == 1


def test_images_take_no_more_memory_than_is_documented(tmp_path):
    small = tmp_path / "small.png"
    Image.new("RGB", (64, 64)).save(small)
    preprocessing = ImagePreprocessing(height=64, width=64, mean=(0.5,) * 3, std=(0.5,) * 3)
    read_images([small], preprocessing)  # what is imported and kept is so now
    assert peak_of(lambda: read_images([small] * 100, preprocessing)) < 1.2 * 100 * 64 * 64 * 3
    peaks = []
    for number in range(4):  # pictures with masks are in memory one by one
        for kind, mode in (("images", "RGB"), ("masks", "L")):
            (tmp_path / kind).mkdir(exist_ok=True)
            Image.new(mode, (600, 400), 1).save(tmp_path / kind / f"{number}.png")
        peaks.append(peak_of(lambda: read_own_segments(tmp_path)))
    assert peaks[3] < 1.5 * peaks[1]


def peak_of(act: Callable[[], object]) -> int:
    """Bytes that are held at once at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# What is wrong


def write_segmented(folder: Path) -> Path:
    tiny_own.write_segmented(folder)
    return folder


def cut(file: Path) -> None:
    """Takes the second half away."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _save(mode: str, size: tuple[int, int], name: str, colour: object = 0):
    return lambda folder: Image.new(mode, size, colour).save(folder / name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "masks"), r"there is no folder .*masks; expected .* images and masks"),
        (
            lambda folder: (folder / "masks" / "0.png").unlink(),
            r"0\.png has no masks; expected one file .*masks/0\.png",
        ),
        (_save("L", tiny_own.SIZE, "masks/0.tif"), r"0\.png has 2 masks; expected one file"),
        (_save("L", (40, 56), "masks/0.png"), r"masks/0\.png has 40 x 56 pixels, and its picture '0\.png' has 56 x 40"),
        (_save("L", (8, 8), "masks/2/9.png"), r"masks/2/9\.png has 8 x 8 pixels, and its picture '2\.png' has 56 x 40"),
        (_save("RGB", tiny_own.SIZE, "masks/0.png"), r"masks/0\.png cannot be read .* mode is RGB, and a mask has one"),
        (_save("I", tiny_own.SIZE, "masks/1.tif", 1 << 25), r"1\.jpg has 2 masks"),
        (_save("I", tiny_own.SIZE, "masks/2/9.tif", 1 << 25), r"9\.tif: a pixel is 33,554,432, and .* 0 to 16,777,215"),
        (lambda folder: cut(folder / "masks" / "0.png"), r"masks/0\.png cannot be read as an image"),
        (lambda folder: cut(folder / "images" / "0.png"), r"images/0\.png cannot be read as an image"),
        (_save("L", tiny_own.SIZE, "masks/x.png"), r"masks/x\.png: there is no picture 'x' in .*images"),
        (_save("RGB", tiny_own.SIZE, "images/0.bmp"), r"'0\.bmp' is named '0' too|'0\.png' is named '0' too"),
        (lambda folder: (folder / "images" / "0.png").write_bytes(b"no"), r"images/0\.png cannot be read as an image"),
        (lambda folder: [one.unlink() for one in (folder / "images").iterdir()], "images holds no images"),
    ],
)
def test_what_is_wrong_with_pictures_and_masks_is_told_before_training(spoil, message, tmp_path):
    spoil(write_segmented(tmp_path))
    with pytest.raises(DataError, match=message):
        read_own_segments(tmp_path)


def test_a_picture_may_have_no_object_and_not_all_may(tmp_path):
    write_segmented(tmp_path)
    Image.new("L", tiny_own.SIZE).save(tmp_path / "masks" / "0.png")
    Image.new("1", tiny_own.SIZE).save(tmp_path / "masks" / "2" / "9.png")
    read = [one.load() for one in read_own_segments(tmp_path).pictures["own"]]
    assert not read[0].segmentations[0].any()
    assert [sorted(np.unique(one)) for one in read[2].segmentations] == [[0, 1, 2], [0, 1]]
    measured = segmentation.read_measured(tmp_path)
    assert len(measured) == len(read) - 1
    for number in range(1, tiny_own.NUM_PICTURES):
        for kind in ("images", "masks"):
            for path in (tmp_path / kind).glob(f"{number}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match="every pixel of every mask is 0, so there is no object"):
        read_own_segments(tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "captions.tsv has no rows; expected the columns file, caption"),
        (["images/0.png\ten\t"], r"captions\.tsv, line 2: the caption is empty"),
        (["\ten\tred"], r"captions\.tsv, line 2: the file is empty"),
        (["images/0.png\t\tred"], r"captions\.tsv, line 2: the language is empty"),
        (["images/none.png\ten\tred"], r"captions\.tsv, line 2: there is no file 'images/none\.png' in"),
        (["images/0.png\tred"], r"captions\.tsv, line 2: 2 columns; expected 3 \(file, language, caption\)"),
        (
            ["images/0.png\ten\tred", "images/0.png\tde\trot", "images/1.jpg\ten\tgreen"],
            r"'1\.jpg' has no caption in 'de', which other images have",
        ),
        ([f"{'x' * 5000}\ten\tred"], r"captions\.tsv, line 2: there is no file 'xxx"),
    ],
)
def test_what_is_wrong_with_a_table_of_captions_is_told_with_its_row(rows, message, data, tmp_path):
    (tmp_path / "images").symlink_to(data / "own" / "images")
    table = tmp_path / "captions.tsv"
    table.write_text("\n".join(["file\tlanguage\tcaption", *rows]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_caption_table(table)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"file": "none.wav"}], r"said\.jsonl, line 1: there is no file 'none\.wav' in"),
        ([{"file": "word.wav"}] * 2, r"said\.jsonl, line 2: 'word\.wav' stood on line 1 before; remove one"),
        ([{"file": "word.wav"}, {"file": "./word.wav"}], r"line 2: '\./word\.wav' stood on line 1 before; remove one"),
        ([{"file": "word.wav", "transcript": " "}], r"said\.jsonl, line 1: the transcript is empty"),
        (
            [{"file": "word.wav", "transcript": None}],
            r"said\.jsonl, line 1: there is no transcript; expected file, tran",
        ),
        ([{"file": "short.wav"}], r"said\.jsonl, line 1: 'short\.wav' is 2\.5 ms long, and the shortest .* 20 ms"),
        ([{"file": "said.jsonl"}], r"said\.jsonl, line 1: 'said\.jsonl' cannot be read as audio"),
    ],
)
def test_what_is_wrong_with_a_table_of_recordings_is_told_with_its_row(rows, message, tmp_path):
    tiny_transcriber.write_wav(tmp_path / "word.wav", tiny_transcriber.tones("low"))
    tiny_transcriber.write_wav(tmp_path / "short.wav", tiny_transcriber.tones("low")[:20])
    table = tmp_path / "said.jsonl"
    table.write_text("".join(json.dumps({"transcript": "low", **row}) + "\n" for row in rows))
    with pytest.raises(DataError, match=message):
        read_recordings(table, 8000)


def test_parts_of_own_data_that_do_not_belong_together_are_refused(data, tmp_path):
    english = tmp_path / "english.tsv"
    files = [f"{data / 'own' / 'images' / '0.png'}\tred squares", f"{data / 'own' / 'images' / '1.jpg'}\tgreen squares"]
    english.write_text("\n".join(files) + "\n")  # without a header
    own = OwnData(train=str(data / "own" / "captions.tsv"), valid=str(english))
    with pytest.raises(DataError, match="captions in en, and --train in de, en; give all in the same languages"):
        read_splits(read_recipe("caption"), Path(), own)
    own = OwnData(train=str(data / "pictures"), valid=str(english))
    with pytest.raises(
        DataError, match="must be of one form: each a folder with a folder of images for each label; or"
    ):
        read_splits(read_recipe("fashion-mnist-diffusion"), Path(), own)


def test_settings_of_a_data_set_give_way_to_own_data_and_are_refused_where_they_are_set(data):
    for recipe, setting in (("caption", "captioning.text_share"), ("clip", "augmentation.white_background")):
        own = OwnData(train="a.tsv", valid="a.tsv")
        assert RunOptions(recipe=recipe, own_data=own).read_recipe()
        with pytest.raises(RecipeError, match=f"{setting} is not read, as the data is that of --train"):
            RunOptions(recipe=recipe, own_data=own, settings=(f"{setting}=0.3",)).read_recipe()
