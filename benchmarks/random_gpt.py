"""A GPT with random weights, as the speed of a size is measured, and a tokenizer whose words are one token each.

Speed does not depend on what the weights are, save in one way: a GPT as it is initialised repeats its last token, which
would flatter a decoder that guesses ahead. So positions, and what the layers write into the residual stream, weigh more
here; a greedy answer of 64 tokens then has about 40 different ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from random_model import Geometry, RandomModel
from random_model import prepare as prepare_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from torch import nn

    from headway_export.source import ExportSource

SEED = 1
_ENLARGED = ("attention.output.weight", "feed_forward.output.weight", "positions.weight")
_FACTOR = 10.0
"""By which these are larger than GPT-2's."""
_EVALUATION_TOKENS = 2048
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPACE = "\u0120"  # what byte-level vocabularies write for a space


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            name="gpt2-small",
            num_layers=12,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            vocabulary_size=50257,
            max_length=1024,
        ),
        Geometry(name="tiny", num_layers=2, d_model=64, num_heads=2, d_ff=256, vocabulary_size=1024, max_length=512),
    )
}


def prepare(geometry: Geometry, scratch: Path) -> RandomModel:
    """Finds a model's files, and makes what is missing or was made by other code.

    Raises:
        ExportError: The exporter refuses the model.
        HeadwayError: The server's parts do not run it.
    """
    return prepare_model(geometry, scratch, code=Path(__file__), build=_build, describe=_describe)


def words(vocabulary_size: int) -> Iterator[str]:
    """The words that are one token each: a space and three letters."""
    letters = _alphabet(vocabulary_size)
    return (f" {a}{b}{c}" for a in letters for b in letters for c in letters)


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of exactly so many tokens, like GPT-2's."""
    merges = _merges(vocabulary_size)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert tokenizer.get_vocab_size() == vocabulary_size, "merges fill what bytes and the special token leave"
    return tokenizer


def _alphabet(vocabulary_size: int) -> str:
    """Returns as many letters as there is room for: all their pairs and all words of a space and three of them."""
    room = vocabulary_size - 256 - 1
    size = max(n for n in range(len(_LETTERS) + 1) if n + n**2 + n**3 <= room)
    return _LETTERS[:size]


def _merges(vocabulary_size: int) -> list[tuple[str, str]]:
    """Returns byte-pair merges, first things first: a space with a letter, pairs, words, and pairs of pairs.

    In that order, `abc` behind a space is always made of `_a` and `bc`, so that a word is one token wherever it is.
    """
    letters = _alphabet(vocabulary_size)
    pairs = [a + b for a in letters for b in letters]
    merges = [(_SPACE, a) for a in letters]
    merges += [(pair[0], pair[1]) for pair in pairs]
    merges += [(_SPACE + a, pair) for a in letters for pair in pairs]
    merges += [(left, right) for left in pairs for right in pairs]
    return merges[: vocabulary_size - 256 - 1]


# What follows runs in a process of its own, with PyTorch.


def _build(geometry: Geometry) -> tuple[nn.Module, Tokenizer]:
    import torch  # noqa: PLC0415

    from headway_training.models.gpt import GPT, GPTConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    configuration = GPTConfig(
        vocabulary_size=geometry.vocabulary_size,
        max_length=geometry.max_length,
        num_layers=geometry.num_layers,
        d_model=geometry.d_model,
        num_heads=geometry.num_heads,
        d_ff=geometry.d_ff,
    )
    module = GPT(configuration).eval()
    for name, parameter in module.named_parameters():
        if name.endswith(_ENLARGED):
            parameter.data.mul_(_FACTOR)
    return module, make_tokenizer(geometry.vocabulary_size)


def _describe(model: RandomModel, module: nn.Module, tokenizer: Tokenizer) -> ExportSource:
    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server.bundles import Architecture, SpecialTokens, Task  # noqa: PLC0415
    from headway_training.models.gpt import GPT  # noqa: PLC0415

    assert isinstance(module, GPT), "it was built here"
    return ExportSource(
        name=model.name,
        task=Task.GENERATION,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=Architecture(
            kind="gpt", parameter_count=parameter_count(module), configuration=module.configuration.to_dict()
        ),
        limits=limits_of(module, Task.GENERATION),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(),  # none ends a text, so that every answer has all its tokens
        evaluation=EvaluationData(
            dataset="random words",
            metric="nats_per_character",
            higher_is_better=False,
            texts=(_random_text(model.geometry.vocabulary_size),),
        ),
    )


def _random_text(vocabulary_size: int) -> str:
    known = list(words(vocabulary_size))
    chosen = np.random.default_rng(SEED).integers(0, len(known), _EVALUATION_TOKENS)
    return "".join(known[index] for index in chosen)
