"""Tokenizers of the kinds that `tiny_engine` does not have, with vocabularies made by hand."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from headway_server.preprocessing import TextTokenizer


def metaspace_tokenizer() -> TextTokenizer:
    """As SentencePiece makes them: a mark for the space before a word, and bytes for what has no piece."""
    pieces = ["<unk>", "▁the", "▁cat", "▁The", "▁", "s", "t", "he", "c", "at", "▁s", "é", "▁caf", ".", ",", "a"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace()]  # as tokenizers made from SentencePiece models have it
    )
    return TextTokenizer(tokenizer)


def word_piece_tokenizer() -> TextTokenizer:
    """As BERT has it: lower case, and what continues a word marked so."""
    words = ["[UNK]", "[PAD]", "don", "'", "t", "the", "cat", "##s", "##at", "c", ".", ",", "ca", "##t", "(", ")"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]"])
    return TextTokenizer(tokenizer)
