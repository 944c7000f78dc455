"""Training of tokenizers, and what training needs of a trained one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Encoding, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer, WordLevelTrainer

from headway_training.checkpoint import SpecialTokens
from headway_training.errors import DataError
from headway_training.recipes.settings import TaskName, TokenizerSettings

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
_TREEBANK_WORDS = (
    r"(?i:(?<=[a-z])n['\x{2019}]t\b|['\x{2019}](?:s|m|d|re|ve|ll)\b"
    r"|(?<=\bcan)not\b|(?<=\bgon|\bwan)na\b|(?<=\bgot)ta\b)| ?[^\s\p{L}\p{M}\p{N}]"
)
"""What treebanks of English cut from the word before it, and punctuation, mark by mark."""
_JOINED = (
    ("(?i:-lrb-)", "("),
    ("(?i:-rrb-)", ")"),
    ("``|''", '"'),
    (r" +(?=[.,;:!?)%]|'(?i:s|m|d|re|ve|ll)\b|(?i:n't)\b)", ""),
    (r"(?<=[(]) +", ""),
)
"""Patterns of the Penn treebank's tokenization, and what people write instead."""

_SPECIAL_TOKENS: dict[TaskName, tuple[str, ...]] = {
    "generation": (),
    "translation": (PAD, UNK, BOS, EOS),
    "text_classification": (PAD, UNK, BOS, EOS),
    "token_classification": (PAD, UNK, BOS, EOS),
}
"""A running text has neither beginning nor end, and byte-level tokens can spell everything."""


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings, task: TaskName) -> Tokenizer:
    """Trains a tokenizer on the training text.

    A translation's tokenizer ends every source with `<eos>`, a classifier's frames every text as `<bos> ... <eos>` and
    a pair as `<bos> ... <eos> ... <eos>`, of which what follows the first `<eos>` is of type 1; a running text gets no
    special tokens.

    Raises:
        DataError: The text is too small for one.
    """
    special = list(_SPECIAL_TOKENS[task])
    tokenizer = (
        _train_characters(texts, special) if settings.kind == "characters" else _train_bpe(texts, settings, special)
    )
    if tokenizer.get_vocab_size() <= len(special):
        raise DataError("the training text is empty: a tokenizer cannot be trained on it")
    if special:
        bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        frame = "$A <eos>" if task == "translation" else "<bos> $A <eos>"
        pair = f"{frame} $B:1 <eos>:1"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, pair=pair, special_tokens=[(BOS, bos), (EOS, eos)]
        )
    return tokenizer


def _train_bpe(texts: Iterable[str], settings: TokenizerSettings, special: list[str]) -> Tokenizer:
    """Byte-pair encoding over bytes (Sennrich et al. 2016, Radford et al. 2019)."""
    tokenizer = Tokenizer(BPE())
    steps: list[normalizers.Normalizer] = []
    if settings.lowercase:
        steps += [normalizers.NFKC(), normalizers.Lowercase()]
    if settings.join_punctuation:
        steps += [normalizers.Replace(Regex(pattern), text) for pattern, text in _JOINED]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = _byte_level(settings)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=settings.vocabulary_size,
        min_frequency=settings.min_frequency,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(settings: TokenizerSettings) -> pre_tokenizers.PreTokenizer:
    """Cuts at spaces and between letters, digits and the rest (Radford et al. 2019), and maps bytes to characters."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if not settings.treebank_words:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_TREEBANK_WORDS), behavior="isolated"), byte_level])


def _train_characters(texts: Iterable[str], special: list[str]) -> Tokenizer:
    """One token a character; characters the training text does not have become the unknown token."""
    special = special or [UNK]
    tokenizer = Tokenizer(WordLevel(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.train_from_iterator(texts, WordLevelTrainer(special_tokens=special, show_progress=False))
    return tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """The ids of the special tokens that a tokenizer has."""
    ids = {
        name: tokenizer.token_to_id(token)
        for name, token in zip(("pad", "unk", "bos", "eos"), (PAD, UNK, BOS, EOS), strict=True)
    }
    return SpecialTokens(**ids)


def encode_spans(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> list[Encoding]:
    """Encodes texts as `encode_texts` does, framed, and keeps the characters of every token."""
    tokenizer.enable_truncation(max_length)
    try:
        return list(tokenizer.encode_batch(list(texts), add_special_tokens=True))
    finally:
        tokenizer.no_truncation()


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], max_length: int | None, *, frame: bool = True
) -> list[list[int]]:
    """Encodes texts, each cut at its end to `max_length` tokens, the special ones included.

    Args:
        tokenizer: The tokenizer; its own truncation is left off.
        texts: The texts.
        max_length: Most tokens of a text; None: no limit.
        frame: Whether the post-processor adds its special tokens.
    """
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=frame)]
    finally:
        tokenizer.no_truncation()


def encode_pairs(
    tokenizer: Tokenizer, texts: Sequence[str], text_pairs: Sequence[str], max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Encodes texts with what they are paired with, each pair as one input; an empty second text stands for none.

    A pair past `max_length` tokens is cut at the ends of its texts, the longer one first.

    Returns:
        The ids of each input, and the type of each of its tokens: 0, and 1 in the second text.
    """
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    inputs = [(text, pair) if pair else text for text, pair in zip(texts, text_pairs, strict=True)]
    try:
        encodings = tokenizer.encode_batch(inputs)
    finally:
        tokenizer.no_truncation()
    return [encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings]
