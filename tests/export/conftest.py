"""Fixtures of the exporter's tests."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors


@pytest.fixture(scope="session", autouse=True)
def _quick_exports(quick_exports: None) -> None:
    """For every test of the folder."""


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 80 words, `t0` to `t79`; t0 pads, t1 begins and t2 ends a text."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(80)}, "t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A t2", special_tokens=[("t2", 2)])
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file
