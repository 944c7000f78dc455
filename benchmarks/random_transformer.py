"""A Transformer with random weights, as the speed of a size is measured.

Speed does not depend on what the weights are, save that a translation must not end by itself, so that all sides
produce the same numbers of tokens: the embedding of the token that ends one is zero, and so is its logit, which no
search takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from random_gpt import make_tokenizer
from random_model import Geometry, RandomModel
from random_model import prepare as prepare_model
from sentences import SentenceSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from headway_export.source import ExportSource

SEED = 1
BOS_ID, EOS_ID = 0, 1
"""Bytes that no word of the tokenizer has; a translation begins and would end with them."""
_EVALUATED = 32

GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry(
            name="transformer-base",
            num_layers=6,
            d_model=512,
            num_heads=8,
            d_ff=2048,
            vocabulary_size=32_000,
            max_length=128,
        ),
        Geometry(
            name="tiny-transformer",
            num_layers=2,
            d_model=64,
            num_heads=2,
            d_ff=128,
            vocabulary_size=1024,
            max_length=128,
        ),
    )
}


def prepare(geometry: Geometry, scratch: Path) -> RandomModel:
    """Finds a model's files, and makes what is missing or was made by other code.

    Raises:
        ExportError: The exporter refuses the model.
        HeadwayError: The server's parts do not run it.
    """
    return prepare_model(geometry, scratch, code=Path(__file__), build=_build, describe=_describe)


# What follows runs in a process of its own, with PyTorch.


def _build(geometry: Geometry) -> tuple[nn.Module, Tokenizer]:
    import torch  # noqa: PLC0415

    from headway_training.models.transformer import Transformer, TransformerConfig  # noqa: PLC0415

    torch.manual_seed(SEED)
    configuration = TransformerConfig(
        vocabulary_size=geometry.vocabulary_size,
        max_source_length=geometry.max_length,
        max_target_length=geometry.max_length,
        num_encoder_layers=geometry.num_layers,
        num_decoder_layers=geometry.num_layers,
        d_model=geometry.d_model,
        num_heads=geometry.num_heads,
        d_ff=geometry.d_ff,
        norm="post",
        activation="relu",
        positions="sinusoidal",
    )
    module = Transformer(configuration).eval()
    with torch.no_grad():
        module.tokens.weight[EOS_ID] = 0.0
    return module, make_tokenizer(geometry.vocabulary_size)


def _describe(model: RandomModel, module: nn.Module, tokenizer: Tokenizer) -> ExportSource:
    from headway_export.graphs import parameter_count  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server.bundles import Architecture, Languages, SpecialTokens, Task  # noqa: PLC0415
    from headway_training.models.transformer import Transformer  # noqa: PLC0415

    assert isinstance(module, Transformer), "it was built here"
    sentences = SentenceSource(tokenizer, seed=SEED).take(_EVALUATED)
    return ExportSource(
        name=model.name,
        task=Task.TRANSLATION,
        module=module,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=Architecture(
            kind="transformer", parameter_count=parameter_count(module), configuration=module.configuration.to_dict()
        ),
        limits=limits_of(module, Task.TRANSLATION),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(bos=BOS_ID, eos=EOS_ID),
        languages=Languages(source="en", target="de"),
        evaluation=EvaluationData(
            dataset="random words",
            metric="sacrebleu",
            higher_is_better=True,
            texts=tuple(sentence.text for sentence in sentences),
            references=tuple(sentence.text for sentence in sentences),
        ),
    )
