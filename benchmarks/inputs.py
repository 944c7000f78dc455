"""What contestants are asked: texts of random words, real texts and photographs, and the file that holds them.

Random words are one token each, so that lengths in tokens are exact and every contestant does the same work.
"""

import base64
import csv
import gzip
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway_load import samples

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
BYTE_SPACE = "\u0120"
"""What byte-level vocabularies write for a space."""
PIECE_SPACE = "\u2581"
"""What SentencePiece writes for it."""
_SEED = 11
_NUM_REAL_TEXTS = 256


class InputError(Exception):
    """A model cannot be asked anything; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with what it is asked: one block of a table."""

    name: str
    task: str
    """The task in the bundle's manifest."""
    bundle: Path
    source: str
    """Where the inputs come from."""
    texts: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    """Encoded pictures, if the model reads no texts."""
    token_ids: tuple[tuple[int, ...], ...] = ()
    """Of each text, for contestants that have no tokenizer."""
    new_tokens: tuple[int, ...] = ()
    """Tokens of the answer to each text, if they differ and the model does not end its answers itself."""
    max_new_tokens: int | None = None
    """Most tokens of every generated text."""
    beam_size: int = 1
    parameters: dict[str, Any] = field(default_factory=dict)
    """What the client's method is given besides, by the name of its parameter."""
    weights: Path | None = None
    """Folder of a random model's weights, tokenizer and sizes."""

    @property
    def rate(self) -> str:
        """The figure that contestants are compared by."""
        return "tokens_per_s" if self.task in ("generation", "translation") else "inputs_per_s"

    def write(self, folder: Path) -> Path:
        """Writes it as JSON, with images in base64, and returns the file."""
        images = [base64.b64encode(image).decode() for image in self.images]
        named = {"images": images, "model": self.bundle.parent.name, "version": self.bundle.name}
        file = folder / f"{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps(asdict(self) | named, default=str), encoding="utf-8")
        return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of lengths in tokens: so many percent of the texts do not exceed each length."""

    name: str
    percents: tuple[float, ...]
    tokens: tuple[int, ...]

    def draw(self, number: int) -> int:
        """Returns the length of text number 1, 2, ...

        The lengths of any few neighbours spread evenly over the distribution (van der Corput's sequence), so that a
        batch of 8 has about the work of 8 single texts.
        """
        digits = f"{number:b}"[::-1]
        return round(float(np.interp(int(digits, 2) / (1 << len(digits)) * 100, self.percents, self.tokens)))


PROMPTS = (
    Lengths(name="prompts of 128 tokens", percents=(0, 100), tokens=(128, 128)),
    Lengths(name="prompts of 32 to 256 tokens", percents=(0, 100), tokens=(32, 256)),
)
LONG_PROMPTS = Lengths(name="prompts of 256 tokens", percents=(0, 100), tokens=(256, 256))
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


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of exactly so many tokens, like GPT-2's.

    Merges come in the order: a space with a letter, pairs of letters, words, pairs of pairs. So `abc` behind a space is
    always made of `_a` and `bc`, and a word is one token wherever it stands.
    """
    letters = _alphabet(vocabulary_size)
    pairs = [a + b for a in letters for b in letters]
    merges = [(BYTE_SPACE, a) for a in letters] + [(pair[0], pair[1]) for pair in pairs]
    merges += itertools.product([BYTE_SPACE + a for a in letters], pairs)
    merges = list(itertools.islice(itertools.chain(merges, itertools.product(pairs, pairs)), vocabulary_size - 256 - 1))
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
    tokenizer: Tokenizer, lengths: Lengths, count: int
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Draws texts of random words for a tokenizer of `make_tokenizer`: the texts, and the tokens of each.

    Of a tokenizer of SentencePiece with the same words, the tokens are those that it gives, with the one that ends.
    """
    letters = _alphabet(tokenizer.get_vocab_size())
    words = ["".join(word) for word in itertools.product(letters, repeat=3)]
    has_pieces = tokenizer.token_to_id(PIECE_SPACE + words[0]) is not None
    ids = [] if has_pieces else [tokenizer.token_to_id(BYTE_SPACE + word) for word in words]
    generator = np.random.default_rng(_SEED)
    drawn = [generator.integers(0, len(words), lengths.draw(number)) for number in range(1, count + 1)]
    texts = tuple("".join(f" {words[index]}" for index in indices) for indices in drawn)
    if has_pieces:
        return texts, tuple(tuple(one.ids) for one in tokenizer.encode_batch(texts))
    return texts, tuple(tuple(ids[index] for index in indices) for indices in drawn)


def shipped_case(bundle: Path, new_tokens: int, folder: Path | None) -> Case:
    """Takes the inputs for a bundle: of those for its task, the ones that leave room for so many new tokens.

    They are of the data sets in `folder`, as `headway-train data` leaves them, or the load tester's own.

    Raises:
        InputError: The task is not measured, or the model can read none of them.
    """
    manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    task = manifest["task"]
    if task == "image_classification":
        source, images = photographs(folder, longer_side=64)
        return Case(name=bundle.parent.name, task=task, bundle=bundle, source=source, images=images)
    if task not in _TEXTS:
        raise InputError(f"{task} is not measured")
    own, pattern = _TEXTS[task]
    file = next(iter(sorted(folder.glob(pattern))), None) if folder else None
    texts = list(_read(file)) if file else list(own)
    source = f"texts of {file.parent.name}/{file.name}" if file else "texts of the load tester"
    texts = texts[:: max(1, len(texts) // _NUM_REAL_TEXTS)][:_NUM_REAL_TEXTS]
    is_prompt, limit = task == "generation", manifest["limits"]["max_input_tokens"]
    if is_prompt:
        limit = min(limit, manifest["limits"]["max_total_tokens"] - new_tokens)
    encoded = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode_batch(texts, add_special_tokens=not is_prompt)
    fitting = [(text, tuple(one.ids)) for text, one in zip(texts, encoded, strict=True) if 0 < len(one.ids) <= limit]
    if not fitting:
        raise InputError(f"none of {len(texts)} {source} has at most {limit} tokens; choose a smaller --new-tokens")
    return Case(
        name=bundle.parent.name,
        task=task,
        bundle=bundle,
        source=f"{len(fitting)} {source}",
        texts=tuple(text for text, _ in fitting),
        token_ids=tuple(ids for _, ids in fitting),
        max_new_tokens=new_tokens if is_prompt else None,
    )


_TEXTS = {
    "generation": (samples.PROMPTS, "tinyshakespeare/input.txt"),
    "translation": (samples.SENTENCES, "multi30k/test_2016_flickr.en.gz"),
    "text_classification": (samples.HEADLINES, "ag_news/test*.csv.gz"),
    "token_classification": (samples.SENTENCES, "multi30k/test_2016_flickr.en.gz"),
}
"""By task: the load tester's own inputs, and the file in the folder of data sets."""


def _read(file: Path) -> Iterator[str]:
    """Yields the speeches of a play, each cut to a beginning of its own length; news with their titles; or lines."""
    if file.suffix == ".txt":
        speeches = [speech for speech in file.read_text(encoding="utf-8").split("\n\n") if speech]
        yield from (speech[: 20 + 10 * (index % 20)] for index, speech in enumerate(speeches))
        return
    with gzip.open(file, "rt", encoding="utf-8", newline="") as lines:
        if ".csv" in file.suffixes:
            yield from (f"{title} {text}" for _, title, text in csv.reader(lines))
        else:
            yield from (line.strip() for line in lines if line.strip())


def photographs(folder: Path | None, *, longer_side: int) -> tuple[str, tuple[bytes, ...]]:
    """Returns where pictures come from, and each as JPEG with a longer side of so many pixels.

    They are those of `photos/` in the folder of data sets, and without it the load tester's drawings.
    """
    files = sorted(file for file in folder.glob("photos/*") if file.suffix in (".jpg", ".png")) if folder else []
    images = []
    for picture in [file.read_bytes() for file in files] or samples.sample_images():
        with Image.open(BytesIO(picture)) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        scale = longer_side / max(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        buffer = BytesIO()
        image.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    kind = "photographs" if files else "drawings of the load tester"
    return f"{len(images)} {kind}, JPEG, longer side {longer_side}", tuple(images)
