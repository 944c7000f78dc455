"""Public data sets: both the files of their homes and the parts that may lie there instead are read."""

import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from real_data import REAL

from headway_training.data import DATASETS, Splits, find_dataset
from headway_training.errors import DataError, MissingDataError
from headway_training.recipes import DataSettings


@pytest.fixture
def real_data() -> Path:
    """The folder of the real data sets."""
    if not REAL.is_dir():
        pytest.skip(f"no data sets in {REAL}; set HEADWAY_DATA_DIR to their folder")
    return REAL


def read(name: str, folder: Path, valid_fraction: float = 0.1) -> Splits:
    """The parts of a data set."""
    dataset = find_dataset(name)
    return dataset.read(dataset, folder, DataSettings(dataset=name, valid_fraction=valid_fraction))


def cifar_rows(count: int) -> bytes:
    """Rows whose image i is i in its red plane, 100 in green, and i + 1 in the first row of blue."""
    rows = np.zeros((count, 3073), np.uint8)
    for i in range(count):
        rows[i, 0] = i % 10
        rows[i, 1:1025], rows[i, 1025:2049], rows[i, 2049 : 2049 + 32] = i, 100, i + 1
    return rows.tobytes()


def test_ag_news_is_read_from_the_files_of_its_home(tmp_path):
    folder = tmp_path / "ag_news"
    folder.mkdir()
    rows = "".join(f'"{1 + i % 4}","Title {i}","Say ""x"" \\ y"\n' for i in range(40))
    (folder / "train.csv").write_text(rows)
    (folder / "test.csv").write_text(rows[: rows.index("\n") + 1])
    splits = read("ag-news", tmp_path)
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (36, 4, 1)
    assert splits.test.texts == ['Title 0 Say "x" \\ y']
    assert splits.labels[splits.test.labels[0]] == "World"
    assert not set(splits.train.texts) & set(splits.valid.texts)


def test_cifar10_is_read_alike_from_the_archive_and_from_packed_files(tmp_path):
    packed, archived = tmp_path / "packed" / "cifar10", tmp_path / "archived" / "cifar10"
    packed.mkdir(parents=True)
    archived.mkdir(parents=True)
    names = {f"data_batch_{i}.bin": cifar_rows(4 + i) for i in range(1, 6)} | {"test_batch.bin": cifar_rows(3)}
    with tarfile.open(archived / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in names.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            (packed / f"{name}.xz").write_bytes(lzma.compress(content))
    one, other = read("cifar10", packed.parent), read("cifar10", archived.parent)
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(one, part).images, getattr(other, part).images)
    assert one.test.images.shape == (3, 32, 32, 3)
    assert one.test.images[2, 0, 5].tolist() == [2, 100, 3]
    assert one.test.images[2, 1, 5].tolist() == [2, 100, 0]
    assert one.test.labels.tolist() == [0, 1, 2]


def test_rows_of_the_wrong_size_are_an_error(tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / f"{name}.bin.xz").write_bytes(lzma.compress(b"x" * 100))
    with pytest.raises(DataError, match="no multiple of 3073"):
        read("cifar10", tmp_path)


@pytest.mark.parametrize("name", [name for name, dataset in DATASETS.items() if dataset.files])
def test_missing_data_is_an_error_that_names_the_command(tmp_path, name):
    makers = sorted({file.maker for file in DATASETS[name].files if file.maker})
    command = f"`headway-train make-data ({'|'.join(makers)})`" if makers else f"`headway-train data {name}`"
    with pytest.raises(MissingDataError, match=command + ".*--data-dir or HEADWAY_DATA_DIR"):
        read(name, tmp_path)


def test_a_text_is_cut_into_parts_that_make_it_up_and_the_training_part_reaches_up_to_the_test_part(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(text)
    parts = read("tiny-shakespeare", tmp_path, 0.05)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (850, 50, 100)
    assert parts.valid.text + parts.train.text + parts.test.text == text


def test_of_every_two_texts_of_the_order_task_the_second_has_the_same_words_and_another_answer(tmp_path):
    parts, again = read("order", tmp_path), read("order", tmp_path)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (16_000, 500, 1000)
    assert parts.test.texts == again.test.texts
    for one, other in zip(parts.test.texts[::2], parts.test.texts[1::2], strict=True):
        assert sorted(one.split()) == sorted(other.split())
        assert one.index("cat") < one.index("dog")
        assert other.index("cat") > other.index("dog")
    assert parts.test.labels == [0, 1] * 500


def test_an_unknown_data_set_is_named_with_the_nearest():
    with pytest.raises(DataError, match=r"no data set 'cifar-10'; did you mean 'cifar10.\?"):
        find_dataset("cifar-10")


def test_every_file_has_a_checksum_and_a_home():
    files = [file for dataset in DATASETS.values() for file in dataset.files]
    assert all(len(file.sha256) == 64 for file in files)
    assert all(file.url.startswith("https://") for file in files if file.url)
    assert all(bool(file.url) != bool(file.maker) for file in files)


def test_the_real_texts_have_the_documented_sizes(real_data):
    news = read("ag-news", real_data)
    assert len(news.train) + len(news.valid) in {32_312, 120_000}
    assert news.labels == ("World", "Sports", "Business", "Sci/Tech")
    play = read("tiny-shakespeare", real_data)
    assert len(play.train) + len(play.valid) + len(play.test) == 1_115_394
    assert play.test_name == "Tiny Shakespeare, last 111,539 characters", "the card of the shipped model names it so"
    captions = read("multi30k-en-de", real_data)
    assert (len(captions.train), len(captions.valid), len(captions.test)) == (29_000, 1_014, 1_000)
    words = read("ud-english-ewt", real_data)
    assert words.test_name == "UD English EWT 2.16, development part", "as above"
    assert len(words.train) + len(words.valid) == 12_544
    assert (len(words.test), sum(map(len, words.test.spans)), len(words.labels)) == (2_001, 25_147, 17)
    assert all(span.end > span.start for spans in words.test.spans for span in spans)
