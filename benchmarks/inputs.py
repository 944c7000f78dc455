"""What contestants are asked: texts of random words, real texts and photographs, and the file that holds them.

Random words are one token each, so that lengths in tokens are exact and every contestant does the same work.
"""

from __future__ import annotations

import base64
import csv
import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway_client.load.plan import LoadTask
from headway_client.load.samples import sample_inputs

NUM_REAL_TEXTS = 256
"""Texts that are taken of a data set, at even distances."""
TASKS = {
    "generation": LoadTask.GENERATE,
    "translation": LoadTask.TRANSLATE,
    "text_classification": LoadTask.CLASSIFY,
    "image_classification": LoadTask.LABEL,
}
"""By the task in a bundle's manifest: what the load tester calls. Other tasks are not measured."""
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPACE = "\u0120"
"""What byte-level vocabularies write for a space."""


class InputError(Exception):
    """A model cannot be asked anything; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with what it is asked: one block of a table."""

    name: str
    task: str
    """What the load tester calls: a value of `LoadTask`."""
    bundle: Path
    """Folder of the bundle."""
    source: str
    """Where the inputs come from."""
    texts: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    """Encoded pictures, if the model reads no texts."""
    token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each text, for contestants that have no tokenizer."""
    new_tokens: tuple[int, ...] = ()
    """Tokens of each answer; empty if the model ends its answers itself."""
    max_new_tokens: int | None = None
    """Most tokens of every generated text."""
    beam_size: int = 1
    parameters: dict[str, Any] = field(default_factory=dict)
    """What the client's method is given besides, by the name of its parameter."""
    model: str = ""
    """Name of the model; left out, the bundle's."""
    weights: Path | None = None
    """Folder of a random model's weights, tokenizer and sizes."""

    @property
    def rate(self) -> str:
        """The figure that contestants are compared by."""
        return "tokens_per_s" if self.task in (LoadTask.GENERATE, LoadTask.TRANSLATE) else "inputs_per_s"

    def write(self, folder: Path) -> Path:
        """Writes it as JSON, with images in base64, and returns the file."""
        fields = asdict(self) | {
            "task": str(self.task),
            "bundle": str(self.bundle),
            "weights": str(self.weights) if self.weights else None,
            "images": [base64.b64encode(image).decode() for image in self.images],
            "model": self.model or self.bundle.parent.name,
            "version": self.bundle.name,
        }
        file = folder / f"{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps(fields), encoding="utf-8")
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of lengths in tokens: so many percent of the texts do not exceed each length."""

    name: str
    percents: tuple[float, ...]
    tokens: tuple[int, ...]

    def draw(self, number: int) -> int:
        """Returns the length of the text with a number, from 1 on.

        Lengths of any few neighbouring numbers spread evenly over the distribution (van der Corput's sequence), so that
        a batch of 8 has about the work of 8 single texts.
        """
        digits = f"{number:b}"[::-1]
        return round(float(np.interp(int(digits, 2) / (1 << len(digits)) * 100, self.percents, self.tokens)))


PROMPTS = (
    Lengths(name="prompts of 128 tokens", percents=(0, 100), tokens=(128, 128)),
    Lengths(name="prompts of 32 to 256 tokens", percents=(0, 100), tokens=(32, 256)),
)
MULTI30K = Lengths(
    name="as long as Multi30k",  # the English test sentences of 2016 in tokens of the shipped English-German model
    percents=(0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 100),
    tokens=(6, 10, 11, 12, 13, 14, 15, 17, 18, 20, 23, 27, 41),
)
AG_NEWS = Lengths(
    name="as long as AG News",  # 3,800 titles with descriptions of the test set in tokens of the shipped model
    percents=(0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100),
    tokens=(20, 28, 35, 40, 45, 49, 53, 56, 60, 63, 69, 77, 88, 121, 254),
)


def words(vocabulary_size: int) -> Iterator[str]:
    """Yields the words that are one token each: a space and three letters."""
    letters = _alphabet(vocabulary_size)
    return (f" {a}{b}{c}" for a in letters for b in letters for c in letters)


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of exactly so many tokens, like GPT-2's.

    Merges come in the order: a space with a letter, pairs of letters, words, pairs of pairs. So `abc` behind a space is
    always made of `_a` and `bc`, and a word is one token wherever it stands.
    """
    letters, num_merges = _alphabet(vocabulary_size), vocabulary_size - 256 - 1
    pairs = [a + b for a in letters for b in letters]
    merges = [(_SPACE, a) for a in letters] + [(pair[0], pair[1]) for pair in pairs]
    merges += [(_SPACE + a, pair) for a in letters for pair in pairs]
    merges = (merges + [(left, right) for left in pairs for right in pairs])[:num_merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert tokenizer.get_vocab_size() == vocabulary_size, "merges fill what bytes and the special token leave"
    return tokenizer


def _alphabet(vocabulary_size: int) -> str:
    """Returns as many letters as leave room for all their pairs and all words of a space and three of them."""
    sizes = (n for n in range(len(_LETTERS) + 1) if n + n**2 + n**3 <= vocabulary_size - 256 - 1)
    return _LETTERS[: max(sizes)]


def random_texts(
    tokenizer: Tokenizer, lengths: Lengths, count: int, *, seed: int
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Draws texts of random words for a tokenizer of `make_tokenizer`: the texts, and the tokens of each."""
    known = list(words(tokenizer.get_vocab_size()))
    ids = [tokenizer.token_to_id(_SPACE + word[1:]) for word in known]
    generator = np.random.default_rng(seed)
    drawn = [generator.integers(0, len(known), lengths.draw(number)) for number in range(1, count + 1)]
    texts = tuple("".join(known[index] for index in indices) for indices in drawn)
    return texts, tuple(tuple(ids[index] for index in indices) for indices in drawn)


def shipped_case(bundle: Path, new_tokens: int, folder: Path | None) -> Case:
    """Takes the inputs for a bundle: of those for its task, the ones that the model can read.

    Args:
        bundle: Folder of the bundle.
        new_tokens: Tokens to generate after a prompt.
        folder: Holds data sets as `headway-train data` leaves them; without it, the load tester's own inputs are taken.

    Raises:
        InputError: The task is not measured, or the model can read none of them.
    """
    manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    if manifest["task"] not in TASKS:
        raise InputError(f"{manifest['task']} is not measured")
    task = TASKS[manifest["task"]]
    case = {"name": bundle.parent.name, "task": task, "bundle": bundle}
    if task is LoadTask.LABEL:
        source, images = photographs(folder, longer_side=64)
        return Case(**case, source=source, images=images)
    is_prompt = task is LoadTask.GENERATE
    source, texts = _real_texts(task, folder) or ("texts of the load tester", sample_inputs(task))
    limit = manifest["limits"]["max_input_tokens"]
    if is_prompt:
        limit = min(limit, manifest["limits"]["max_total_tokens"] - new_tokens)
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    encoded = tokenizer.encode_batch(texts, add_special_tokens=not is_prompt)
    fitting = [(text, tuple(one.ids)) for text, one in zip(texts, encoded, strict=True) if 0 < len(one.ids) <= limit]
    if not fitting:
        shortest = min(len(one.ids) for one in encoded)
        raise InputError(
            f"none of the {len(texts)} {source} has at most {limit} tokens (the shortest has {shortest}); "
            "choose a smaller --new-tokens or a model that holds more"
        )
    return Case(
        **case,
        source=f"{len(fitting)} {source}",
        texts=tuple(text for text, _ in fitting),
        token_ids=tuple(ids for _, ids in fitting),
        max_new_tokens=new_tokens if is_prompt else None,
    )


def photographs(folder: Path | None, *, longer_side: int) -> tuple[str, tuple[bytes, ...]]:
    """Returns where pictures come from, and each as JPEG with a longer side of so many pixels.

    They are those of `photos/` in the folder of data sets, and without it the load tester's drawings.
    """
    files = sorted(file for file in folder.glob("photos/*") if file.suffix in (".jpg", ".png")) if folder else []
    pictures = [file.read_bytes() for file in files] or [one for one in sample_inputs(LoadTask.LABEL) if one]
    kind = "photographs" if files else "drawings of the load tester"
    images = tuple(_as_jpeg(picture, longer_side) for picture in pictures if isinstance(picture, bytes))
    return f"{len(images)} {kind}, JPEG, longer side {longer_side}", images


def _as_jpeg(data: bytes, longer_side: int) -> bytes:
    with Image.open(BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    scale = longer_side / max(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    buffer = BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def data_folder() -> Path | None:
    """Returns the folder that HEADWAY_DATA_DIR names; None if it is not set."""
    named = os.environ.get("HEADWAY_DATA_DIR")
    return Path(named) if named else None


def _real_texts(task: LoadTask, folder: Path | None) -> tuple[str, list[str]] | None:
    """Reads the test set for a task; None if it is not there."""
    pattern, read = _REAL[task]
    file = next(iter(sorted(folder.glob(pattern))), None) if folder else None
    if file is None:
        return None
    texts = read(file)
    stride = max(1, len(texts) // NUM_REAL_TEXTS)
    return f"texts of {file.parent.name}/{file.name}", texts[::stride][:NUM_REAL_TEXTS]


def _read_lines(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines if line.strip()]


def _read_news(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8", newline="") as rows:
        return [f"{title} {text}" for _, title, text in csv.reader(rows)]


def _read_play(file: Path) -> list[str]:
    """Reads the speeches of a play, each cut to a beginning of its own length."""
    speeches = [speech for speech in file.read_text(encoding="utf-8").split("\n\n") if speech]
    return [speech[: 20 + 10 * (index % 20)] for index, speech in enumerate(speeches)]


_REAL: dict[LoadTask, tuple[str, Callable[[Path], list[str]]]] = {
    LoadTask.GENERATE: ("tinyshakespeare/input.txt", _read_play),
    LoadTask.TRANSLATE: ("multi30k/test_2016_flickr.en.gz", _read_lines),
    LoadTask.CLASSIFY: ("ag_news/test*.csv.gz", _read_news),
}
"""Of each task: the file in the folder of data sets, and how it is read."""
