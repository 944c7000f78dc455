"""Public data sets: both the files of their homes and the parts that may lie there instead are read."""

import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest
from real_data import REAL

from headway_training.data import DATASETS, find_dataset
from headway_training.data.public import read_ag_news, read_cifar10, read_multi30k, read_tiny_shakespeare
from headway_training.errors import DataError, MissingDataError


@pytest.fixture
def real_data() -> Path:
    """The folder of the real data sets."""
    if not REAL.is_dir():
        pytest.skip(f"no data sets in {REAL}; set HEADWAY_DATA_DIR to their folder")
    return REAL


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
    splits = read_ag_news(tmp_path, 0.1)
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
    one, other = read_cifar10(packed.parent, 0.1), read_cifar10(archived.parent, 0.1)
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
        read_cifar10(tmp_path, 0.1)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("ag-news", lambda folder: read_ag_news(folder, 0.1)),
        ("tiny-shakespeare", lambda folder: read_tiny_shakespeare(folder, 0.1, 0.1)),
        ("multi30k-en-de", lambda folder: read_multi30k(folder, ("en", "de"))),
        ("multi30k-de-en", lambda folder: read_multi30k(folder, ("de", "en"))),
        ("cifar10", lambda folder: read_cifar10(folder, 0.1)),
    ],
)
def test_missing_data_is_an_error_that_names_the_command(tmp_path, name, read):
    with pytest.raises(MissingDataError, match=f"`headway-train data {name}`.*--data-dir or HEADWAY_DATA_DIR"):
        read(tmp_path)


def test_an_unknown_data_set_is_named_with_the_nearest():
    with pytest.raises(DataError, match=r"no data set 'cifar-10'; did you mean 'cifar10.\?"):
        find_dataset("cifar-10")


def test_every_file_has_a_checksum_and_a_home():
    files = [file for dataset in DATASETS.values() for file in dataset.files]
    assert all(len(file.sha256) == 64 and file.url.startswith("https://") for file in files)


def test_the_real_texts_have_the_documented_sizes(real_data):
    news = read_ag_news(real_data, 0.05)
    assert len(news.train) + len(news.valid) in {32_312, 120_000}
    assert news.labels == ("World", "Sports", "Business", "Sci/Tech")
    play = read_tiny_shakespeare(real_data, 0.03, 0.1)
    assert len(play.train) + len(play.valid) + len(play.test) == 1_115_394
    captions = read_multi30k(real_data, ("en", "de"))
    assert (len(captions.train), len(captions.valid), len(captions.test)) == (29_000, 1_014, 1_000)
