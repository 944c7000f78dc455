"""Named configurations have the size that their papers print."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headway_training.models import (
    LayerConfig,
    build_model,
    count_parameters,
    named_configuration,
)

PRINTED_MILLIONS = {
    "gpt3-small": 125,
    "gpt3-medium": 350,
    "gpt3-large": 760,
    "gpt3-xl": 1_300,
    "gpt3-2.7b": 2_700,
    "gpt3-6.7b": 6_700,
    "gpt3-13b": 13_000,
    "tinyllama-1.1b": 1_100,
    "llama-6.7b": 6_700,
    "transformer-base": 65,
    "transformer-big": 213,
    "bert-base": 110,
    "bert-large": 340,
    "vit-b-16": 86,
    "vit-l-16": 307,
}
"""Parameters, as the papers print them."""
RECIPES = ["shakespeare-gpt", "shakespeare-llama", "multi30k-transformer", "agnews-encoder", "cifar10-vit"]


def count(architecture: str, configuration: LayerConfig) -> int:
    with torch.device("meta"):  # 13 billion parameters, and no memory
        return count_parameters(build_model(architecture, configuration))


@pytest.mark.parametrize(("name", "millions"), PRINTED_MILLIONS.items())
def test_the_parameter_count_is_the_papers(name: str, millions: int) -> None:
    named = named_configuration(name)
    assert count(named.architecture, named.configuration) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "printed"),
    [
        ({"num_encoder_layers": 2, "num_decoder_layers": 2}, 36),
        ({"num_encoder_layers": 4, "num_decoder_layers": 4}, 50),
        ({"num_encoder_layers": 8, "num_decoder_layers": 8}, 80),
        ({"d_ff": 1024}, 53),
        ({"d_ff": 4096}, 90),
    ],
    ids=str,
)
def test_variations_of_transformer_base_differ_from_it_as_in_table_3(changes: dict[str, int], printed: int) -> None:
    """So its layers are the paper's, and what is missing from its 65 million is in the embeddings."""
    base = named_configuration("transformer-base").configuration
    difference = count("transformer", dataclasses.replace(base, **changes)) - count("transformer", base)
    assert difference / 1e6 == pytest.approx(printed - 65, abs=1)  # each printed number is rounded by up to a half


def test_the_recipes_models_fit_the_space_that_their_bundles_have() -> None:
    named = {name: named_configuration(name) for name in RECIPES}
    counts = {name: count(each.architecture, each.configuration) for name, each in named.items()}
    assert sum(counts.values()) < 20e6, counts
    assert all(1.5e6 < counted < 6e6 for counted in counts.values()), counts


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="there is no configuration 'bert-bass'; did you mean 'bert-base'"):
        named_configuration("bert-bass")
