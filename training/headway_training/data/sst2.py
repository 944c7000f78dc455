"""SST-2: sentiment of sentences and phrases from film reviews, in the layout of GLUE.

The training part holds sentences along with phrases of them, so examples held out at random would have been seen in
pieces. Here whole sentences are held out, with every phrase that occurs in them and in no other sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headway_training.data.datasets import find_dataset
from headway_training.data.examples import HOLD_OUT_SEED, LabeledTexts, Splits
from headway_training.data.files import read_text
from headway_training.errors import DataError, MissingDataError

SST2_LABELS = ("negative", "positive")
MIN_SENTENCE_WORDS = 8
"""A text that is part of no other counts as a sentence from this many words on; shorter ones are mostly phrases of
sentences that were left out for being neutral."""
_NUM_DEV_ROWS = 872


def read_sst2(folder: Path, valid_fraction: float) -> Splits[LabeledTexts]:
    """Reads SST-2 from the data folder.

    Args:
        folder: The folder of the data sets.
        valid_fraction: Share of the sentences that are held out.

    Raises:
        MissingDataError: A file is missing.
        DataError: A row is malformed.
    """
    dataset = find_dataset("sst2")
    train = _read_rows(_find(folder / dataset.folder, ("train.tsv", "train.tsv.gz")))
    test = _read_rows(_find(folder / dataset.folder, ("dev.tsv", "dev.tsv.gz", "dev_rows_001-581.tsv")))
    kept, held = hold_out_sentences(train.texts, valid_fraction)
    rows = "all" if len(test) == _NUM_DEV_ROWS else f"first {len(test)} of the"
    return Splits(
        train=train.take(kept),
        valid=train.take(held),
        test=test,
        train_name=f"SST-2, {len(kept):,} of the {len(train):,} training phrases and sentences",
        test_name=f"SST-2, {rows} {_NUM_DEV_ROWS} development rows",
        license=dataset.license,
        home=dataset.home,
        labels=SST2_LABELS,
    )


def hold_out_sentences(texts: Sequence[str], fraction: float) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    """Splits texts, of which many are parts of others, so that what stays knows nothing of what is held out.

    Args:
        texts: Words with single spaces between them.
        fraction: Share of the sentences that are held out.

    Returns:
        Indices of the texts that stay and of the sentences that are held out, both ascending. Parts of sentences held
        out are in neither.
    """
    words = [text.split() for text in texts]
    sentences = _find_sentences(words)
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(len(sentences))
    long = [sentences[i] for i in order if len(words[sentences[i]]) >= MIN_SENTENCE_WORDS]
    held = sorted(long[: max(1, round(len(long) * fraction))])
    held_parts = {part for i in held for part in _parts(words[i])}
    others = "\n".join(f" {' '.join(words[i])} " for i in sorted(set(sentences) - set(held)))
    kept = [
        i
        for i, several in enumerate(words)
        if hash(tuple(several)) not in held_parts or f" {' '.join(several)} " in others
    ]
    return np.asarray(kept, np.int64), np.asarray(held, np.int64)


def _find_sentences(words: Sequence[Sequence[str]]) -> list[int]:
    """Indices of the texts that are part of no longer one; of equal texts, the first."""
    parts: set[int] = set()
    found = []
    for index in sorted(range(len(words)), key=lambda i: -len(words[i])):
        if hash(tuple(words[index])) not in parts:
            found.append(index)
            parts.update(_parts(words[index]))
    return found


def _parts(words: Sequence[str]) -> list[int]:
    """Hashes of all runs of words, which take less memory than the runs."""
    count = len(words)
    return [hash(tuple(words[start:end])) for start in range(count) for end in range(start + 1, count + 1)]


def _find(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise MissingDataError(
        f"SST-2 is not whole in {folder}: there is no {' or '.join(names)}. Its home is {find_dataset('sst2').home}; "
        "unpack SST-2.zip there, or name the folder that holds sst2/ with --data-dir or HEADWAY_DATA_DIR"
    )


def _read_rows(path: Path) -> LabeledTexts:
    """Reads lines of sentence, tab and label, after a line that names them."""
    texts, labels = [], []
    for number, line in enumerate(read_text(path).splitlines()[1:], start=2):
        text, _, label = line.rpartition("\t")
        if label not in ("0", "1") or not text.strip():
            raise DataError(f"{path}, line {number}: expected a sentence, a tab and 0 or 1")
        texts.append(" ".join(text.split()))
        labels.append(int(label))
    return LabeledTexts(texts=texts, labels=labels)
