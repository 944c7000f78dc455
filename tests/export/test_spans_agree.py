"""The server finds the spans that training finds: pieces, the search, probabilities, on texts of all kinds."""

import random

import numpy as np
import pytest
from tokenizers import normalizers

from headway_server.bundles.tags import TagSet
from headway_server.tasks.tokens.spans import SpanDecoder
from headway_training.recipes import TokenizerSettings
from headway_training.tagging import TagScheme, find_subwords, predict_spans
from headway_training.tokenizers import train_tokenizer

SCRAPS = [
    "don't",
    "naïve",
    "cafe\u0301",
    "🙂",
    "👍🏽",
    "👩\u200d🚀",
    "❤\ufe0f",
    "ﬁne",
    "中文",
    " ",
    "  ",
    "\n",
    "\u00a0",
    ",",
    "(a)",
    "x²",
    "Ⅳ",
    "\u0301",
    "\u200d",
    "İ",
]


def texts() -> list[str]:
    generator = random.Random(9)
    return ["".join(generator.choices(SCRAPS, k=generator.randint(1, 12))) for _ in range(120)]


@pytest.mark.parametrize("form", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.NFD()])
@pytest.mark.parametrize("covering", [True, False])
def test_spans_agree(form, covering):
    tokenizer = train_tokenizer(
        texts()[:60], TokenizerSettings(vocabulary_size=320, treebank_words=True), "token_classification"
    )
    if form is not None:
        tokenizer.normalizer = form
    scheme = TagScheme(("x", "y"), covering=covering)
    decoder = SpanDecoder(TagSet.parse(scheme.names))
    generator = np.random.default_rng(10)
    num_spans = 0
    for text in texts():
        encoding = tokenizer.encode(text)
        scores = np.log(generator.dirichlet(np.full(len(scheme.names), 0.4), len(encoding.ids)) + 1e-6).astype(
            np.float32
        )
        expected = predict_spans(scores, find_subwords(text, encoding.offsets), scheme, text)
        found = decoder.decode_text(scores, text, encoding.offsets)
        assert [span[:3] for span in found] == [(span.start, span.end, span.label) for span in expected]
        np.testing.assert_allclose(
            [span.probability for span in found], [span.probability for span in expected], rtol=1e-4
        )
        num_spans += len(expected)
        borders = [0, *(border for span in found for border in span[:2]), len(text)]
        assert borders == sorted(borders)
    assert num_spans > 300
