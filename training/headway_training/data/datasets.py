"""The public data sets that recipes use: where they live, and how their files are recognised."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headway_training.errors import DataError

_MULTI30K_URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
_AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
_UD_EWT_URL = "https://raw.githubusercontent.com/UniversalDependencies/UD_English-EWT/r2.16/"
_WNUT17_URL = "https://raw.githubusercontent.com/leondz/emerging_entities_17/master/"
_SST2_URL = "https://raw.githubusercontent.com/eyalbd2/Reproducing-AutoPrompt/master/glue_data/SST-2/"
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a public data set."""

    name: str
    """Its name in the data set's folder."""
    url: str
    """Its public home."""
    sha256: str
    """Checksum of the file as it comes from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A public data set."""

    name: str
    """As recipes and `headway-train data` name it."""
    folder: str
    """Its folder below the data folder."""
    title: str
    """Its name in words."""
    files: tuple[RemoteFile, ...]
    """What is downloaded."""
    license: str
    """What its source states."""
    home: str
    """Its public home."""


def _multi30k_file(name: str, sha256: str) -> RemoteFile:
    return RemoteFile(name=name, url=_MULTI30K_URL + name, sha256=sha256)


def _multi30k(pair: str) -> Dataset:
    """The same files, from one language into the other."""
    return Dataset(
        name=f"multi30k-{pair}",
        folder="multi30k",
        title="Multi30k, task 1, English and German",
        files=(
            _multi30k_file("train.en.gz", "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
            _multi30k_file("train.de.gz", "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
            _multi30k_file("val.en.gz", "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
            _multi30k_file("val.de.gz", "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
            _multi30k_file(
                "test_2016_flickr.en.gz", "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"
            ),
            _multi30k_file(
                "test_2016_flickr.de.gz", "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"
            ),
        ),
        license=(
            "not stated for the text; derived from Flickr30K, provided for non-commercial research and education "
            "(the data set's README)"
        ),
        home="https://github.com/multi30k/dataset",
    )


_ALL = (
    Dataset(
        name="ag-news",
        folder="ag_news",
        title="AG News",
        files=(
            RemoteFile(
                name="train.csv",
                url=_AG_NEWS_URL + "train.csv",
                sha256="76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
            ),
            RemoteFile(
                name="test.csv",
                url=_AG_NEWS_URL + "test.csv",
                sha256="521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
            ),
            RemoteFile(
                name="classes.txt",
                url=_AG_NEWS_URL + "classes.txt",
                sha256="612dbfa932f07a6ed837295a7d5746ce7412e7bb4bc32ba919fdb3cda3a1b9b5",
            ),
        ),
        license="for research and any other non-commercial activity (the data set's readme.txt)",
        home="http://www.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
    ),
    Dataset(
        name="tiny-shakespeare",
        folder="tinyshakespeare",
        title="Tiny Shakespeare",
        files=(
            RemoteFile(
                name="input.txt",
                url=_SHAKESPEARE_URL + "input.txt",
                sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
        license="public domain (the plays; no licence is stated for the file)",
        home="https://github.com/karpathy/char-rnn",
    ),
    *(_multi30k(pair) for pair in ("en-de", "de-en")),
    Dataset(
        name="ud-english-ewt",
        folder="ud_english_ewt",
        title="Universal Dependencies English Web Treebank 2.16",
        files=(
            RemoteFile(
                name="en_ewt-ud-train.conllu",
                url=_UD_EWT_URL + "en_ewt-ud-train.conllu",
                sha256="3fb78e2b55482c8ee00caa653af436c88c9e5bc9a73ce26e4ae3ddc79d2b7e7b",
            ),
            RemoteFile(
                name="en_ewt-ud-dev.conllu",
                url=_UD_EWT_URL + "en_ewt-ud-dev.conllu",
                sha256="531a54ff90d6ab12201c5a50c3e78e6ddac4de69abc4bce5d275d3cd29efe2b6",
            ),
        ),
        license="CC BY-SA 4.0 (annotations); the texts are of various sources (the treebank's README)",
        home="https://github.com/UniversalDependencies/UD_English-EWT",
    ),
    Dataset(
        name="wnut17",
        folder="wnut17",
        title="WNUT17, emerging entities",
        files=(
            RemoteFile(
                name="wnut17train.conll",
                url=_WNUT17_URL + "wnut17train.conll",
                sha256="731820e13f71af324c6b55a1575ec2ce59fbaa2a0806f8f0400b98d56cd6a7a5",
            ),
            RemoteFile(
                name="emerging.dev.conll",
                url=_WNUT17_URL + "emerging.dev.conll",
                sha256="e053b752b8155113ca66e7db08af5f2f5f43ab993694e4774f1ec5bad42312d8",
            ),
        ),
        license="CC BY 4.0",
        home="https://github.com/leondz/emerging_entities_17",
    ),
    Dataset(
        name="sst2",
        folder="sst2",
        title="SST-2 (GLUE), training part",
        files=(
            RemoteFile(
                name="train.tsv",
                url=_SST2_URL + "train_full.tsv",
                sha256="48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
            ),
        ),
        license="not stated by the source, which asks for citation of Socher et al. (2013)",
        home="https://gluebenchmark.com/tasks",
    ),
    Dataset(
        name="cifar10",
        folder="cifar10",
        title="CIFAR-10",
        files=(
            RemoteFile(
                name="cifar-10-binary.tar.gz",
                url=_CIFAR10_URL + "cifar-10-binary.tar.gz",
                sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        license="not stated by the source, which asks for citation of Krizhevsky (2009)",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
)

DATASETS: Mapping[str, Dataset] = MappingProxyType({dataset.name: dataset for dataset in _ALL})
"""The data sets by their names."""


def find_dataset(name: str) -> Dataset:
    """Finds a data set by its name.

    Raises:
        DataError: There is none; the message names the nearest.
    """
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise DataError(f"there is no data set {name!r}; did you mean {nearest!r}? Known are {', '.join(DATASETS)}")
    return DATASETS[name]
