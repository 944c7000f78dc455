"""Reads the public data sets from disk, whole as they come from their homes, or in the parts that lie there instead.

N images.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.datasets import Dataset, find_dataset
from headway_training.data.examples import (
    LabeledImages,
    LabeledTexts,
    ParallelTexts,
    PlainText,
    SpanLabeledTexts,
    Splits,
    hold_out,
)
from headway_training.data.files import read_bytes, read_text
from headway_training.data.labeled_text import read_labeled_texts
from headway_training.data.parallel_text import read_parallel_texts
from headway_training.data.plain_text import cut_text
from headway_training.errors import DataError, MissingDataError

AG_NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_ROW_BYTES = 1 + 3 * 32 * 32


def read_ag_news(folder: Path, valid_fraction: float) -> Splits[LabeledTexts]:
    """Reads AG News from the data folder; title and description are one text."""
    dataset = find_dataset("ag-news")
    train_file = _find(folder, dataset, ("train.csv", "train.csv.gz", "train_subset.csv.gz"))
    test_file = _find(folder, dataset, ("test.csv", "test.csv.gz", "test_rows_0001-3800.csv.gz"))
    numbers = [str(number) for number in range(1, 5)]
    examples, _ = read_labeled_texts(train_file, numbers)
    test, _ = read_labeled_texts(test_file, numbers)
    kept, held = hold_out(len(examples), valid_fraction)
    return Splits(
        train=examples.take(kept),
        valid=examples.take(held),
        test=test,
        train_name=f"AG News, {len(kept):,} of the 120,000 training rows",
        test_name=f"AG News, {'all' if len(test) == 7600 else f'first {len(test):,} of the'} 7,600 test rows",
        license=dataset.license,
        home=dataset.home,
        labels=AG_NEWS_LABELS,
    )


def read_ud_english_ewt(folder: Path, valid_fraction: float) -> Splits[SpanLabeledTexts]:
    """Reads UD English EWT from the data folder; its development part is the test part here."""
    names = [(f"en_ewt-ud-{part}.conllu", f"en_ewt-ud-{part}.conllu.gz") for part in ("train", "dev")]
    return _read_span_labeled(folder, find_dataset("ud-english-ewt"), names, valid_fraction, "UD English EWT 2.16")


def read_wnut17(folder: Path, valid_fraction: float) -> Splits[SpanLabeledTexts]:
    """Reads WNUT17 from the data folder; its development part is the test part here."""
    names = [(name, f"{name}.gz") for name in ("wnut17train.conll", "emerging.dev.conll")]
    return _read_span_labeled(folder, find_dataset("wnut17"), names, valid_fraction, "WNUT17")


def _read_span_labeled(
    folder: Path, dataset: Dataset, names: Sequence[Sequence[str]], valid_fraction: float, title: str
) -> Splits[SpanLabeledTexts]:
    """Reads a training and a development part."""
    train_file, test_file = (_find(folder, dataset, forms) for forms in names)
    examples, labels = read_span_labeled_texts(train_file)
    test, _ = read_span_labeled_texts(test_file, labels)
    kept, held = hold_out(len(examples), valid_fraction)
    return Splits(
        train=examples.take(kept),
        valid=examples.take(held),
        test=test,
        train_name=f"{title}, {len(kept):,} of the {len(examples):,} training sentences",
        test_name=f"{title}, development part",
        license=dataset.license,
        home=dataset.home,
        labels=labels,
    )


def read_multi30k(folder: Path, languages: tuple[str, str]) -> Splits[ParallelTexts]:
    """Reads Multi30k (task 1) from the data folder, from the first language into the second."""
    dataset = find_dataset("multi30k-" + "-".join(languages))

    def part(name: str) -> ParallelTexts:
        files = [_find(folder, dataset, (f"{name}.{code}.gz", f"{name}.{code}")) for code in languages]
        return read_parallel_texts(",".join(map(str, files)))

    return Splits(
        train=part("train"),
        valid=part("val"),
        test=part("test_2016_flickr"),
        train_name="Multi30k, task 1, training part",
        test_name="Multi30k, task 1, test 2016 (Flickr)",
        license=dataset.license,
        home=dataset.home,
    )


def read_tiny_shakespeare(folder: Path, valid_fraction: float, test_fraction: float) -> Splits[PlainText]:
    """Reads Tiny Shakespeare from the data folder; its beginning is the validation part, its end the test part."""
    dataset = find_dataset("tiny-shakespeare")
    text = read_text(_find(folder, dataset, ("input.txt",)))
    train, valid, test = cut_text(text, valid_fraction, test_fraction)
    return Splits(
        train=train,
        valid=valid,
        test=test,
        train_name=f"Tiny Shakespeare, {len(train):,} characters after the first {len(valid):,}",
        test_name=f"Tiny Shakespeare, last {len(test):,} characters",
        license=dataset.license,
        home=dataset.home,
    )


def read_cifar10(folder: Path, valid_fraction: float) -> Splits[LabeledImages]:
    """Reads CIFAR-10 (binary version) from the data folder: the archive, or its files, plain or packed by xz."""
    dataset = find_dataset("cifar10")
    train, test = _cifar10_parts(folder, dataset)
    kept, held = hold_out(len(train), valid_fraction)
    return Splits(
        train=train.take(kept),
        valid=train.take(held),
        test=test,
        train_name=f"CIFAR-10, {len(kept):,} of the 50,000 training images",
        test_name=f"CIFAR-10, {'all' if len(test) == 10_000 else f'first {len(test):,} of the'} 10,000 test images",
        license=dataset.license,
        home=dataset.home,
        labels=CIFAR10_LABELS,
    )


def _find(folder: Path, dataset: Dataset, names: Sequence[str]) -> Path:
    """The first of a data set's files that is there.

    Raises:
        MissingDataError: None is; names the command that gets it.
    """
    for name in names:
        if (folder / dataset.folder / name).is_file():
            return folder / dataset.folder / name
    raise MissingDataError(
        f"{dataset.title} is not in {folder / dataset.folder}: there is no {' or '.join(names)}. "
        f"Get it with `headway-train data {dataset.name}`, or name the folder that holds {dataset.folder}/ "
        "with --data-dir or HEADWAY_DATA_DIR"
    )


def _cifar10_parts(folder: Path, dataset: Dataset) -> tuple[LabeledImages, LabeledImages]:
    """Training and test images."""
    archive = folder / dataset.folder / "cifar-10-binary.tar.gz"
    if archive.is_file():
        batches = dict(_archived_batches(archive))
        train, test = [batches[f"data_batch_{i}.bin"] for i in range(1, 6)], batches["test_batch.bin"]
    else:
        packed = ("{0}.bin.xz", "cifar-10-batches-bin/{0}.bin", "{0}.bin")
        names = [[form.format(f"data_batch_{i}") for form in packed] for i in range(1, 6)]
        names[0].insert(0, archive.name)  # what the error names first: the file that is downloaded
        train = [read_bytes(_find(folder, dataset, forms)) for forms in names]
        tests = [form.format(stem) for form in packed for stem in ("test_batch", "test_batch_0000-4999")]
        test = read_bytes(_find(folder, dataset, tests))
    return _cifar10_images(b"".join(train), archive.parent), _cifar10_images(test, archive.parent)


def _archived_batches(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of rows in the archive."""
    try:
        with tarfile.open(fileobj=io.BytesIO(read_bytes(archive)), mode="r:") as files:
            for member in files:
                content = files.extractfile(member)
                if content is not None and member.name.endswith(".bin"):
                    yield Path(member.name).name, content.read()
    except tarfile.TarError as error:
        raise DataError(f"{archive} is damaged: {error}. Remove it and get it again") from error


def _cifar10_images(content: bytes, folder: Path) -> LabeledImages:
    """Rows of one label byte and three planes of 32 x 32 bytes -> (N, 32, 32, 3)."""
    if len(content) % _CIFAR10_ROW_BYTES or not content:
        raise DataError(
            f"{folder}: {len(content)} bytes of images, which is no multiple of {_CIFAR10_ROW_BYTES}, the size of one"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR10_ROW_BYTES)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # (N, 32, 32, 3)
    return LabeledImages(images=np.ascontiguousarray(images), labels=rows[:, 0].astype(np.int64))
