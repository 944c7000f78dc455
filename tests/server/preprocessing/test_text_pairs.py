"""Pairs of texts: read as one input, and shortened as the tokenizers library shortens them in training."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "[UNK]": 5}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


async def encode(texts, pairs, max_tokens, *, truncate, **options):
    return await TextTokenizer(make_tokenizer()).encode_limited(
        texts,
        fields=[f"texts[{index}]" for index in range(len(texts))],
        max_tokens=max_tokens,
        truncate=truncate,
        text_pairs=pairs,
        **options,
    )


async def test_a_pair_is_one_input_with_types():
    [encoded] = await encode(["a a"], ["b"], 6, truncate=False)
    assert encoded.input_ids.tolist() == [1, 3, 3, 2, 4, 2]
    assert encoded.type_ids is not None
    assert encoded.type_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert not encoded.truncated


async def test_a_single_text_has_no_types():
    [encoded] = await encode(["a a"], None, 6, truncate=False)
    assert encoded.type_ids is None


async def test_a_pair_past_the_limit_is_refused_by_the_name_of_its_text():
    with pytest.raises(InvalidInputError, match=r"texts\[1\]: has 6 tokens with the text it is paired with"):
        await encode(["a", "a a"], ["b", "b"], 5, truncate=False)


async def test_pairs_without_a_word_are_refused():
    with pytest.raises(InvalidInputError, match=r"texts\[0\]: has no text"):
        await encode([" "], [" "], 5, truncate=False)


async def test_pairs_are_shortened_as_the_library_shortens_them():
    generator = np.random.default_rng(5)
    library = make_tokenizer()
    for _ in range(300):
        first, second, limit = (int(n) for n in generator.integers((1, 1, 3), (20, 20, 30)))
        text, pair = "a " * first, "b " * second
        [encoded] = await encode([text], [pair], limit, truncate=True)
        library.enable_truncation(limit, strategy="longest_first")
        expected = library.encode(text, pair)
        where = f"{first} and {second} words in {limit} tokens"
        assert encoded.input_ids.tolist() == expected.ids, where
        assert encoded.type_ids.tolist() == expected.type_ids, where
        assert encoded.truncated == (first + second + 3 > limit), where


async def test_a_shortened_pair_may_keep_its_ends():
    [encoded] = await encode(["b a a"], ["a b b b b"], 7, truncate=True, truncation_side="left")
    assert encoded.input_ids.tolist() == [1, 3, 3, 2, 4, 4, 2]
