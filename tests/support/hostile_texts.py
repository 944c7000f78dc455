"""Texts as large as a call may bring, made to be slow: what a tokenizer has most trouble with."""

from __future__ import annotations

import random
import string
from functools import cache
from pathlib import Path
from typing import Final

from tiny_engine import TOKENIZER
from tiny_tokenizers import metaspace_tokenizer, word_piece_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headway_server.preprocessing import TextTokenizer

MAX_BYTES = 256 * 2**10
"""The server's default."""
_STORE: Final = Path(__file__).parents[2] / "models"


@cache
def tokenizers() -> dict[str, TextTokenizer]:
    """Returns those of the shipped bundles, and one of each kind that models of others bring."""
    found = {file.parts[-3]: TextTokenizer.load(file) for file in sorted(_STORE.glob("*/*/tokenizer.json"))}
    return found | {
        "unigram with NFKC": TextTokenizer(_unigram()),
        "unigram, bytes": metaspace_tokenizer(),
        "word pieces": word_piece_tokenizer(),
        "BPE without words": TextTokenizer(_bpe_without_words()),
        "words": TextTokenizer(TOKENIZER),
    }


def _unigram() -> Tokenizer:
    """As SentencePiece trains them for T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    words = ["the cat sat on the mat, aaaa aaaaaaaaaaaaaaaa", "abababababab banana bandana " + string.printable]
    tokenizer.train_from_iterator(
        words * 50, trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return tokenizer


def _bpe_without_words() -> Tokenizer:
    """As models of the Llama kind have it: a whole text is one word, of which pairs are joined."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = ["the▁cat▁sat▁aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa▁abababab", string.printable.replace(" ", "")]
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(texts * 20, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    return tokenizer


_PIECES: Final = (
    *("a", "ab", "aaaaaaab", " ", "  a", "\n", "\t ", "'", "'s", "''''", "1", "1234567890", ".", "?!", "-", "_"),
    *("\u2581", "\u0120", "é", "e\u0301", "\u0301", "\u0323\u0301", "\ufdfa", "\ufb03", "\ufdfb", "\uac01"),
    *("\u1100\u1161\u11a8", "ß", "\u0130", "\u01c5", "\u03d4", "中", "日本語", "ไทย", "नमस्ते", "עברית", "العربية"),
    *("\u200d", "\u200b", "\u00ad", "\ufeff", "\u202e", "\u2028", "\x00", "\x7f", "\x85", "\ue000", "\ufffd"),
    *("\U0001f44d", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\U0001d518"),
    *("\U000e0041", "\U0010ffff", "<unk>", "<s>", "</s>", "<pad>", "<0x0A>", "[UNK]", "[CLS]", "##s"),
    *("<|endoftext|>", "<|", "<eos>", "http://a.b/c?d=e&f=", "a@b.c ", "AaAa", "A", "antidisestablishmentarianism"),
    *("0x1F", "1,000.00", "I'll've "),
)


def text(rng: random.Random) -> str:
    """Writes a text of at most 256 KiB: one or a few pieces over and over, with or without something between them."""
    size = rng.choice((200, 2_000, 20_000, MAX_BYTES, MAX_BYTES))
    match rng.randrange(5):
        case 0:
            unit = rng.choice(_PIECES)
        case 1:
            unit = "".join(rng.choices(_PIECES, k=rng.randrange(2, 9)))
        case 2:
            unit = rng.choice(_PIECES) * rng.choice((1, 30, 1000)) + rng.choice((" ", "\n", ".", "\u3000"))
        case 3:
            unit = "".join(
                chr(rng.choice((rng.randrange(0x20, 0x3000), rng.randrange(0xE000, 0x11_0000)))) for _ in range(500)
            )
        case _:
            unit = "".join(rng.choices(_PIECES, k=2000))
    written = unit * (size // len(unit.encode()) + 1)
    return written.encode()[:size].decode(errors="ignore")
