"""Training of tokenizers, and what training needs of one: special tokens, encoded texts, words split anew.

N texts, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from headway_training.checkpoint import SpecialTokens, load_tokenizer, read_checkpoint
from headway_training.errors import CheckpointError, RecipeError
from headway_training.kinds import find_task
from headway_training.recipes import TokenizerSettings

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SPEECH = "<speech>"
"""Comes between a text and the codes of what is said."""
_TREEBANK_WORDS = (
    r"(?i:(?<=[a-z])n['\x{2019}]t\b|['\x{2019}](?:s|m|d|re|ve|ll)\b"
    r"|(?<=\bcan)not\b|(?<=\bgon|\bwan)na\b|(?<=\bgot)ta\b)| ?[^\s\p{L}\p{M}\p{N}]"
)
"""What treebanks of English cut from the word before it, and punctuation, mark by mark."""
_SPACE = frozenset("ĠĊĉčĀ")
"""Characters that stand for the bytes of white space in a byte-level vocabulary."""
_NONE = -1


def train_tokenizer(
    texts: Iterable[str], settings: TokenizerSettings, task: str, marks: Sequence[str] = ()
) -> Tokenizer:
    """Trains byte-pair encoding over bytes (Sennrich et al. 2016; Radford et al. 2019) on the training text.

    `marks` are tokens that no text holds, such as those of languages.
    """
    tokenizer = Tokenizer(BPE())
    if settings.lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # Cuts at spaces and between letters, digits and the rest, and maps bytes to characters.
    cut: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if settings.treebank_words:
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_TREEBANK_WORDS), behavior="isolated"), cut])
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=settings.vocabulary_size,
        min_frequency=settings.min_frequency,
        # A running text has neither beginning nor end, and bytes can spell everything.
        special_tokens=[PAD, UNK, BOS, EOS, *marks] if find_task(task).frame else [],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _frame(tokenizer, task)
    return tokenizer


def _frame(tokenizer: Tokenizer, task: str) -> None:
    """Sets the special tokens around a text: those of the task's `frame`.

    Where a text ends with `<eos>` a pair does so twice, and all after the first one is of type 1.
    """
    frame = find_task(task).frame
    if not frame:
        return
    pair = f"{frame} $B:1 {EOS}:1" if frame.endswith(EOS) else None
    ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS, SPEECH) if token in frame]
    tokenizer.post_processor = processors.TemplateProcessing(single=frame, pair=pair, special_tokens=ids)


def take_tokenizer(folder: Path, task: str) -> Tokenizer:
    """Takes the tokenizer of a checkpoint for a training run.

    Raises:
        CheckpointError: The folder is no checkpoint, or its tokenizer lacks a special token that the task needs.
    """
    tokenizer = load_tokenizer(folder)
    missing = [token for token in (PAD, UNK, BOS, EOS) if tokenizer.token_to_id(token) is None]
    if missing and find_task(task).frame:
        raise CheckpointError(f"the tokenizer of {folder} has no {', '.join(missing)}; {task} needs it")
    if read_checkpoint(folder).task != task:
        _frame(tokenizer, task)
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The ids of the special tokens that a tokenizer has."""
    pad, unk, bos, eos = (tokenizer.token_to_id(token) for token in (PAD, UNK, BOS, EOS))
    return SpecialTokens(pad=pad, unk=unk, bos=bos, eos=eos)


def encode_spans(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[Encoding]:
    """Encodes texts with their special tokens, each cut at its end to `max_length`; offsets are kept."""
    tokenizer.enable_truncation(max_length)
    try:
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=True))
    finally:
        tokenizer.no_truncation()


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], max_length: int | None, *, special: bool = True
) -> list[list[int]]:
    """Encodes texts, each cut at its end to `max_length` tokens, the special ones included.

    Args:
        tokenizer: The tokenizer; its own truncation is left off.
        texts: The texts.
        max_length: Most tokens of a text; None sets no limit.
        special: Whether the post-processor adds its special tokens.
    """
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=special)]
    finally:
        tokenizer.no_truncation()


def encode_pairs(
    tokenizer: Tokenizer, texts: Sequence[str], text_pairs: Sequence[str], max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Encodes pairs of texts, each pair as one input; an empty second text means that there is none.

    A pair of more than `max_length` tokens is cut at the ends of its texts, the longer one first.

    Returns:
        The ids of each input, and the type of each of its tokens: 1 in the second text, else 0.
    """
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    inputs = [(text, pair) if pair else text for text, pair in zip(texts, text_pairs, strict=True)]
    try:
        encodings = tokenizer.encode_batch(inputs)
    finally:
        tokenizer.no_truncation()
    return [encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings]


class SubwordSplitter:
    """Undoes merges of a byte-pair vocabulary at random, so that a model sees how words are spelt.

    A subword is split into the two it was merged from, these again, and so on. BPE-dropout (Provilkov et al. 2020) has
    the same end, and leaves merges out on the way up; the tokenizer does that with a generator that cannot be seeded.
    This one draws from the caller's, so that a resumed run sees what an unbroken one does.

    Raises:
        RecipeError: The tokenizer is no byte-pair encoding.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.to_str())["model"]
        if content["type"] != "BPE":
            raise RecipeError(
                f"augmentation.subword_splitting undoes merges, and a {content['type']} tokenizer has none; set it to 0"
            )
        vocabulary = content["vocab"]
        size = tokenizer.get_vocab_size()
        self._parents = np.full((size, 2), _NONE, np.int64)
        for merge in content.get("merges", ()):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            self._parents[vocabulary[left + right]] = vocabulary[left], vocabulary[right]
        self.is_blank = np.zeros(size, np.bool_)
        """Which subwords are white space alone."""
        for token, index in tokenizer.get_vocab().items():
            self.is_blank[index] = set(token) <= _SPACE

    def split(
        self, ids: Sequence[int] | NDArray[np.int64], rate: float, random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Splits subwords.

        Args:
            ids: Of the subwords, (T,).
            rate: Probability that a subword is split, and each of its parts in turn.
            random: Draws which.

        Returns:
            The ids of the parts, and the place in `ids` that each comes from.
        """
        parts = np.asarray(ids, dtype=np.int64)
        origins = np.arange(len(parts))
        drawn = self._draw(parts, rate, random)
        while drawn.any():
            counts = np.where(drawn, 2, 1)
            first = (np.cumsum(counts) - counts)[drawn]
            parents, fresh = self._parents[parts[drawn]], np.repeat(drawn, counts)
            parts, origins = np.repeat(parts, counts), np.repeat(origins, counts)
            parts[first], parts[first + 1] = parents.T
            drawn = fresh & self._draw(parts, rate, random)
        return parts, origins

    def _draw(self, ids: NDArray[np.int64], rate: float, random: np.random.Generator) -> NDArray[np.bool_]:
        """Which of the subwords are split: (T,)."""
        drawn: NDArray[np.bool_] = (random.random(len(ids)) < rate) & (self._parents[ids, 0] != _NONE)
        return drawn
