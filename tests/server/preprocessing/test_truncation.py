"""Texts are cut as the library cuts them before it adds special tokens, in one pass over them."""

from itertools import product

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.text import _shares as shares

SPECIAL = [("[CLS]", 0), ("[SEP]", 1)]
PROCESSORS = {
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIAL
    ),
    "before alone": processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=SPECIAL),
    "BERT": processors.BertProcessing(SPECIAL[1], SPECIAL[0]),
    "RoBERTa": processors.RobertaProcessing(SPECIAL[1], SPECIAL[0], trim_offsets=False),
    "none": None,
}
TEXT, PAIR = "\u00e9\U0001f600 a '\"\\\\ a [SEP] \u00e9\U0001f600 a", "a \u00e9\U0001f600 b a a"


def make_tokenizer(processor) -> Tokenizer:
    words = {"[CLS]": 0, "[SEP]": 1, "a": 2, "\u00e9\U0001f600": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def cut_by_library(tokenizer: Tokenizer, pair: str | None, max_tokens: int, side: str):
    """Encodes each text without special tokens, truncates it, and then adds them."""
    texts = [TEXT] if pair is None else [TEXT, pair]
    encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    room = max(max_tokens - tokenizer.num_special_tokens_to_add(pair is not None), 0)
    lengths = (room,) if pair is None else shares(len(encodings[0]), len(encodings[1]), room)
    for encoding, length in zip(encodings, lengths, strict=True):
        encoding.truncate(length, direction=side)
    return tokenizer.post_process(*encodings)


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pair", [None, PAIR])
async def test_what_is_kept_is_what_the_library_keeps(name, side, pair):
    library = make_tokenizer(PROCESSORS[name])
    tokenizer, num_tokens = TextTokenizer(library), len(library.encode(*[TEXT] if pair is None else [TEXT, pair]))
    least = library.num_special_tokens_to_add(pair is not None)
    for max_tokens, with_offsets in product(range(least, num_tokens + 1), (True, False)):
        [found] = await tokenizer.encode_limited(
            [TEXT],
            fields=["text"],
            max_tokens=max_tokens,
            truncate=True,
            truncation_side=side,
            with_offsets=with_offsets,
            text_pairs=None if pair is None else [pair],
        )
        expected = cut_by_library(library, pair, max_tokens, side)
        assert found.input_ids.tolist() == expected.ids, max_tokens
        assert found.truncated == (max_tokens < num_tokens)
        if pair is None:
            assert found.type_ids is None
        elif name != "none":  # then the library has 1 for the second text of a pair only if it is not cut
            assert found.type_ids.tolist() == expected.type_ids
        if with_offsets:
            assert found.offsets == tuple(expected.offsets)
            assert found.word_ids == tuple(expected.word_ids)


async def test_offsets_of_a_cut_text_are_those_of_the_whole():
    """Trimming white space off the offsets twice, before a cut and after it, would cut letters off."""
    library = Tokenizer(models.BPE({letter: index for index, letter in enumerate("Gabc\u0120")}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = TextTokenizer(library)
    whole, cut = [
        (
            await tokenizer.encode_limited(
                ["ab ab ca"], fields=["text"], max_tokens=most, truncate=True, with_offsets=True
            )
        )
        for most in (9, 5)
    ]
    assert cut[0].offsets == whole[0].offsets[:5]


async def test_a_long_text_is_tokenized_once(monkeypatch):
    tokenizer, read = TextTokenizer(make_tokenizer(PROCESSORS["template"])), []
    encode = TextTokenizer._encode
    monkeypatch.setattr(
        TextTokenizer, "_encode", lambda self, texts, *a, **k: read.append(texts) or encode(self, texts, *a, **k)
    )
    texts = ["a " * 100_000, "a"]
    found = await tokenizer.encode_limited(texts, fields=["0", "1"], max_tokens=4, truncate=True)
    assert [one.input_ids.tolist() for one in found] == [[0, 2, 2, 1], [0, 2, 1]]
    assert [text for part in read for text in part] == texts
