"""Spans of imported token classifiers: those of the pipeline of transformers, for each of its strategies."""

import random

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from headway_server.bundles import Tagging
from headway_server.preprocessing.text import EncodedText
from headway_server.tasks.tokens.spans import SpanDecoder

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    ".",
    ",",
    "-",
    "'",
    "$",
    *"abcxyz",
    *(f"##{letter}" for letter in "abcxyz"),
]
NAMES = {
    "iob2": ["O", "B-x", "I-x", "B-y", "I-y"],
    "iob1": ["I-x", "O", "B-x", "I-y"],
    "io": ["O", "x", "y"],
}
STRATEGIES = ["simple", "first", "average", "max"]


@pytest.fixture(scope="module")
def tokenizer():
    found = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    found.normalizer, found.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return found


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": len(PIECES), "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    transformers.set_seed(5)
    config = transformers.BertConfig(**sizes, num_attention_heads=2, initializer_range=2.0, num_labels=5)
    return transformers.BertForTokenClassification(config).eval()


def texts() -> list[str]:
    draw = random.Random(7)
    words = ["abc", "xyz", "a", "cab's", "Zy.", "b-c", "9", "$a", "é", "xé,"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(60)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scheme", list(NAMES))
def test_spans_are_those_of_the_pipeline(tokenizer, model, scheme, strategy):
    names = NAMES[scheme]
    model.config.id2label = dict(enumerate(names)) | dict.fromkeys(range(len(names), 5), "O")
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    own.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    pipeline = transformers.pipeline("token-classification", model=model, tokenizer=own, aggregation_strategy=strategy)
    decoder = SpanDecoder.of(names, Tagging(scheme=scheme, aggregation=strategy))
    num_spans = 0
    model.classifier.bias.data[len(names) :] = -1e4  # outputs without a name
    for text in texts():
        expected = pipeline(text)
        encoding = tokenizer.encode(text)
        logits = model(**own(text, return_tensors="pt")).logits[0, :, : len(names)].detach().numpy()
        found = decoder.decode_text(logits, text, encoding.offsets, encoding.word_ids)
        assert [(one.start, one.end, decoder.labels[one.label]) for one in found] == [
            (one["start"], one["end"], one["entity_group"]) for one in expected
        ]
        scores = [one["score"] for one in expected]
        np.testing.assert_allclose([one.probability for one in found], scores, atol=1e-5)
        num_spans += len(found)
    assert num_spans > 60


@pytest.mark.parametrize("aggregation", ["sequence", "first"])
def test_tags_that_end_spans_end_them(tokenizer, aggregation):
    names = ["O", "B-x", "I-x", "E-x", "S-x"]
    decoder = SpanDecoder.of(names, Tagging(scheme="bioes", aggregation=aggregation))
    text, wanted = "a b c x y z a b", ["S-x", "S-x", "B-x", "I-x", "E-x", "B-x", "E-x", "O"]
    encoding = tokenizer.encode(text)
    logits = np.zeros((10, 5), np.float32)
    logits[np.arange(1, 9), [names.index(tag) for tag in wanted]] = 5
    spans = decoder.decode_text(logits, text, encoding.offsets, encoding.word_ids)
    assert [text[one.start : one.end] for one in spans] == ["a", "b", "c x y", "z a"]


def test_a_sequence_of_ends_is_completed():
    """The likeliest tag of the last token opens a span that nothing ends; the likeliest sequence has none."""
    names = ["O", "B-x", "I-x", "E-x", "S-x"]
    decoder = SpanDecoder.of(names, Tagging(scheme="bioes"))
    logits = np.array([[0, 3, 0, 0, 0], [0, 3, 0, 2.5, 0]], np.float32)
    [span] = decoder.decode_text(logits, "a b", [(0, 1), (2, 3)])
    assert (span.start, span.end) == (0, 3)


def test_each_word_is_a_span_without_o(tokenizer):
    decoder = SpanDecoder.of(["NOUN", "PUNCT"], Tagging(scheme="words", aggregation="first"))
    text = "abc abc."
    encoding = tokenizer.encode(text)
    logits = np.zeros((len(encoding.ids), 2), np.float32)
    logits[:, 0] = 1
    logits[encoding.tokens.index("."), 1] = 2
    spans = decoder.decode_text(logits, text, encoding.offsets, encoding.word_ids)
    assert [(text[one.start : one.end], decoder.labels[one.label]) for one in spans] == [
        ("abc", "NOUN"),
        ("abc", "NOUN"),
        (".", "PUNCT"),
    ]


def test_prepended_tokens_are_in_no_word():
    encoded = EncodedText(input_ids=np.array([5]), offsets=((0, 1),), word_ids=(0,)).after([1, 2])
    assert encoded.word_ids == (None, None, 0)
